"""Text from a real model, with every attention call, KV write and layer of experts served by `hal`: what `hal generate` runs.

The proof comes along: the dispatcher counts the implementations that it enters, and unless every layer's attention, KV
write and, in a mixture of experts, experts of every forward pass are among them, the run fails.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hal.backend import Backend, build_backend, use_backend
from hal.errors import ModelError
from hal.generate_view import Printer, print_stats
from hal.models import find_model, load_model, parse_dtype
from hal.report import Report

__all__ = ["GenerateOptions", "GenerateResult", "Stats", "generate", "read_prompts"]

#: Upper bound of the stages of loading that are announced.
_STAGES = 5


@dataclass(frozen=True)
class GenerateOptions:
    """What `hal generate` can be told.

    Attributes:
        model: directory, .gguf file or hub id; None for the default model.
        backend: a backend's name, an explicit request for every op; None for the config's choices.
        config: YAML file or name of a shipped config; None detects.
        max_new_tokens: most tokens that a prompt gets.
        dtype: `float32`, `float16` or `bfloat16`.
        device: such as `cuda:0`; None for the first accelerator, else the CPU.
        offline: fetch nothing.
        raw: continue the prompt as it stands, without the model's chat template.
        stats: print speed and who served what, after the text.
    """

    model: str | None = None
    backend: str | None = None
    config: str | os.PathLike[str] | None = None
    max_new_tokens: int = 64
    dtype: str = "float32"
    device: str | None = None
    offline: bool = False
    raw: bool = False
    stats: bool = False


@dataclass(frozen=True)
class Stats:
    """What a run took, and the proof of who computed it.

    Attributes:
        model: its label.
        device: where it ran.
        dtype: of the weights.
        prompts: sequences in the batch.
        prompt_tokens: tokens of all prompts, pads not counted.
        new_tokens: tokens of all answers, those after a sequence's end not counted.
        prefill_seconds: from the call of `generate` to the first token.
        decode_seconds: from the first token to the last.
        steps: forward passes.
        layers: attention layers.
        expert_layers: layers of experts whose implementation transformers lets us choose.
        served: calls that the dispatcher handed to each (op, backend).
        decisions: its distinct decisions with their reasons.
    """

    model: str
    device: str
    dtype: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    steps: int
    layers: int
    expert_layers: int
    served: dict[tuple[str, str], int]
    decisions: list[Report] = field(repr=False)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, until the first token."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """New tokens per second after the first of each sequence; 0 if there was one step only."""
        return (self.new_tokens - self.prompts) / self.decode_seconds if self.decode_seconds else 0.0

    def calls(self, *ops: str) -> int:
        """Calls of these ops that were served."""
        return sum(count for (op, _), count in self.served.items() if op in ops)


@dataclass(frozen=True)
class GenerateResult:
    """The answers, in the order of the prompts, as text and as token ids (without what follows the end), and the stats."""

    texts: list[str]
    token_ids: list[list[int]]
    stats: Stats


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """Read one prompt per line; blank lines are ignored.

    Raises:
        ModelError: the file cannot be read, is not UTF-8 text, or holds no prompt.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the prompts in {os.fspath(path)} cannot be read: {error}") from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ModelError(f"{os.fspath(path)} holds no prompt; write one per line")
    return prompts


def generate(prompts: list[str], options: GenerateOptions, console: Console | None = None) -> GenerateResult:
    """Generate text greedily and print it: one prompt token by token, several each when it is finished.

    Args:
        prompts: at least one; they make one batch, padded on the left.
        options: see `GenerateOptions`.
        console: where text and stats go, default standard output; progress goes to standard error.

    Returns:
        Texts, token ids and stats.

    Raises:
        ModelError: an option, a prompt or the model is wrong, or a call was not served by `hal`.
        ConfigError, ResolutionError: as of `hal.get_backend` and of the ops.
    """
    dtype, device = _checked(prompts, options)
    counter: Counter[tuple[str, str]] = Counter()
    backend = build_backend(options.backend, config=options.config, observe=lambda op, name, target: counter.update([(op, name)]))
    label, model, tokenizer = _load(options, dtype, device)
    inputs = _tokenize(prompts, model, tokenizer, options).to(device)
    printer = Printer(prompts, tokenizer, _end_tokens(model, tokenizer), console or Console())
    _run(model, tokenizer, backend, inputs, options.max_new_tokens, printer)
    stats = Stats(
        model=label,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        prompts=len(prompts),
        prompt_tokens=int(inputs["attention_mask"].sum()),
        new_tokens=sum(map(len, printer.tokens)),
        prefill_seconds=printer.times[1] - printer.times[0],
        decode_seconds=printer.times[-1] - printer.times[1],
        steps=len(printer.times) - 1,
        layers=model.config.get_text_config(decoder=True).num_hidden_layers,
        expert_layers=_expert_layers(model),
        served=dict(counter),
        decisions=backend.decisions(),
    )
    _prove(stats)
    if options.stats:
        print_stats(stats, printer.console)
    return GenerateResult(printer.texts(), printer.tokens, stats)


def _checked(prompts: list[str], options: GenerateOptions) -> tuple[torch.dtype, torch.device]:
    if not prompts:
        raise ModelError("there is no prompt; pass one, or a file with one per line")
    if options.max_new_tokens < 1:
        raise ModelError(f"max_new_tokens is {options.max_new_tokens}; accepted: an integer >= 1")
    accelerated = torch.cuda.is_available()
    try:
        device = torch.device(options.device or ("cuda:0" if accelerated else "cpu"))
    except RuntimeError as error:
        raise ModelError(f"unknown device {options.device!r}; accepted: cpu, cuda, cuda:0, ...") from error
    if device.type == "cuda" and (device.index or 0) >= (torch.cuda.device_count() if accelerated else 0):
        raise ModelError(f"there is no device {str(device)!r} on this machine; use --device cpu")
    return parse_dtype(options.dtype), device


def _load(options: GenerateOptions, dtype: torch.dtype, device: torch.device) -> tuple[str, Any, Any]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("finding the model", total=_STAGES)

        def announce(text: str) -> None:
            progress.update(task, description=text, advance=1)

        files = find_model(options.model, offline=options.offline, progress=announce)
        announce(f"loading {files.label}")
        model, tokenizer = load_model(files, dtype=dtype, device=device)
    return files.label, model, tokenizer


def _tokenize(prompts: list[str], model: Any, tokenizer: Any, options: GenerateOptions) -> Any:
    templated = bool(tokenizer.chat_template) and not options.raw
    texts = prompts
    if templated:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=not templated)
    lengths = inputs["attention_mask"].sum(1)
    if inputs["input_ids"].shape[1] == 0 or bool((lengths == 0).any()):
        raise ModelError("a prompt has no tokens; write at least one character")
    most = getattr(model.config, "max_position_embeddings", None)
    longest = int(lengths.max())
    if most is not None and longest + options.max_new_tokens > most:
        raise ModelError(f"the longest prompt has {longest} tokens; with {options.max_new_tokens} new ones that exceeds the model's {most} positions")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")} if not hasattr(inputs, "to") else inputs


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]


def _expert_layers(model: Any) -> int:
    from hal.integrations.experts import expert_modules

    return len(expert_modules(model))


def _run(model: Any, tokenizer: Any, backend: Backend, inputs: Any, max_new_tokens: int, printer: Printer) -> None:
    from transformers import GenerationConfig

    from hal.integrations.transformers import PagedCache

    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = PagedCache.for_model(model, backend, max_length=ids.shape[1] + max_new_tokens)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, eos_token_id=printer.ends or None, use_cache=True
    )
    printer.start()
    with use_backend(backend):  # which experts ask for; attention has it in the cache
        model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=printer, **cache.as_kwargs())


def _prove(stats: Stats) -> None:
    """Every layer of every forward pass must have had its attention, its KV write and its experts from `hal`."""
    expected = stats.layers * stats.steps
    attention, writes = stats.calls("flash_prefill", "flash_decode"), stats.calls("write_kv")
    if attention != expected or writes != expected:
        raise ModelError(
            f"{stats.model}: hal served {attention} attention calls and {writes} KV writes, expected {expected} of each "
            f"({stats.layers} layers x {stats.steps} forward passes): part of this model's attention is computed elsewhere"
        )
    experts, expected = stats.calls("fused_moe"), stats.expert_layers * stats.steps
    if experts != expected:
        raise ModelError(
            f"{stats.model}: hal served {experts} calls of experts, expected {expected} ({stats.expert_layers} layers of experts x {stats.steps} "
            f"forward passes): part of this model's experts is computed elsewhere"
        )
