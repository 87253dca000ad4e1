"""`hal.generate` on a tiny checkpoint with a tokenizer of its own."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hal.errors import HalError, ModelError, UnknownBackendError
from hal.generate import GenerateOptions, generate, read_prompts
from hal.generate_view import Printer
from hal.integrations import transformers as integration
from tests.integrations.tiny_models import build

WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(94))]
TEMPLATE = "{% for m in messages %}w90 {{ m['content'] }} w91{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("llama-gqa", tmp_path_factory.mktemp("checkpoint"))


def saved(name: str, folder: Path) -> str:
    """Write a tiny model with a tokenizer whose words are w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = build(name, torch.device("cpu"))
    model.config.eos_token_id = 2
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return str(folder)


def run(prompts: list[str], checkpoint: str, **options: Any) -> tuple[Any, str]:
    text = io.StringIO()
    settings = {"max_new_tokens": 8, "device": "cpu", **options}
    result = generate(prompts, GenerateOptions(model=checkpoint, **settings), Console(file=text, width=120))
    return result, text.getvalue()


def test_one_prompt_is_streamed(checkpoint: str) -> None:
    result, shown = run(["w5 w6 w7"], checkpoint)
    assert shown == result.texts[0] + "\n"
    assert 1 <= len(result.token_ids[0]) <= 8
    assert result.stats.prompt_tokens == 3


def test_a_batch_prints_each_answer_under_its_prompt(checkpoint: str) -> None:
    prompts = ["w5 w6 w7", "w9", "w20 w21 w22 w23 w24 w25"]
    together, shown = run(prompts, checkpoint)
    for index, prompt in enumerate(prompts):
        alone, _ = run([prompt], checkpoint)
        assert alone.token_ids[0] == together.token_ids[index]
        heading = shown.index(f"{index + 1}/3  {prompt}")
        assert together.texts[index] in shown[heading:]


def test_stats_prove_who_served(checkpoint: str) -> None:
    result, shown = run(["w5 w6 w7", "w9"], checkpoint, stats=True, backend="reference")
    stats = result.stats
    assert stats.calls("flash_prefill") == stats.layers == 3
    assert stats.calls("flash_decode") == 3 * (stats.steps - 1)
    assert stats.calls("write_kv") == 3 * stats.steps
    assert {name for _, name in stats.served} == {"reference"}
    assert stats.prefill_rate > 0
    for expected in ("prefill", "decode", "tokens/s", "flash_decode", "backend='reference'", f"hal served {3 * stats.steps}"):
        assert expected in shown


def test_mixture_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = saved("qwen3-moe", tmp_path)
    result, shown = run(["w5 w6 w7", "w9"], mixture, stats=True, backend="reference")
    assert result.stats.calls("fused_moe") == result.stats.expert_layers * result.stats.steps == 2 * result.stats.steps
    assert f"2 layers of experts x {result.stats.steps} = {2 * result.stats.steps}; hal served {2 * result.stats.steps}" in shown
    monkeypatch.setattr(integration, "experts", lambda module, hidden_states, *routing: hidden_states)
    with pytest.raises(ModelError, match="hal served 0 calls of experts"):
        run(["w5 w6 w7"], mixture)


def test_chat_template_unless_raw(checkpoint: str, tmp_path: Path) -> None:
    templated = shutil.copytree(checkpoint, tmp_path / "templated")
    (templated / "chat_template.jinja").write_text(TEMPLATE)
    chat, _ = run(["w5"], str(templated))
    raw, _ = run(["w5"], str(templated), raw=True)
    spelt_out, _ = run(["w90 w5 w91"], checkpoint)
    assert (chat.stats.prompt_tokens, raw.stats.prompt_tokens) == (3, 1)
    assert chat.token_ids == spelt_out.token_ids


@pytest.mark.parametrize(
    ("prompts", "options", "complaint"),
    [
        ([], {}, "there is no prompt"),
        (["w1"], {"max_new_tokens": 0}, "max_new_tokens is 0; accepted: an integer >= 1"),
        (["w1"], {"dtype": "float8"}, "unknown dtype 'float8'"),
        (["w1"], {"device": "gpu"}, "unknown device 'gpu'"),
        (["w1"], {"device": "cuda:99"}, "no device 'cuda:99'"),
        (["w1", ""], {}, "a prompt has no tokens"),
        (["w1"], {"max_new_tokens": 512}, "exceeds the model's 512 positions"),
    ],
    ids=["no-prompt", "no-tokens", "dtype", "device", "no-such-device", "empty-prompt", "too-long"],
)
def test_bad_input(prompts: list[str], options: dict[str, Any], complaint: str, checkpoint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        run(prompts, checkpoint, **options)


def test_unknown_backend(checkpoint: str) -> None:
    with pytest.raises(UnknownBackendError, match="'referense'"):
        run(["w1"], checkpoint, backend="referense")


@pytest.mark.parametrize(("escaping", "new_tokens", "complaint"), [(1, 8, "keys of layer 1 unread"), (2, 1, "served 2 attention calls")])
def test_attention_that_escapes_is_noticed(escaping: int, new_tokens: int, complaint: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = integration.attention

    def leaky(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx == escaping:
            return query.transpose(1, 2), None
        return served(module, query, *args, **kwargs)

    monkeypatch.setattr(integration, "attention", leaky)
    with pytest.raises(HalError, match=complaint):
        run(["w5 w6"], checkpoint, max_new_tokens=new_tokens)


def test_read_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two  \n \nthrée\n", encoding="utf-8")
    assert read_prompts(file) == ["one", "two", "thrée"]
    file.write_text("\n \n")
    with pytest.raises(ModelError, match="holds no prompt"):
        read_prompts(file)
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ModelError, match="cannot be read"):
        read_prompts(file)
    with pytest.raises(ModelError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_characters_of_several_tokens_are_shown_whole() -> None:
    out = io.StringIO()
    printer = Printer(["?"], Bytes(), [0], Console(file=out, width=20))
    printer.start()
    printer.put(torch.tensor([[1, 2]]))
    seen = []
    for byte in "é[b]\n€ und ein langer Text ohne Umbruch".encode():
        printer.put(torch.tensor([byte]))
        seen.append(out.getvalue())
    assert seen[0] == ""
    assert seen[1] == "é"
    printer.put(torch.tensor([0]))
    printer.end()
    assert out.getvalue() == "é[b]\n€ und ein langer Text ohne Umbruch\n"
    assert "\ufffd" not in "".join(seen)
