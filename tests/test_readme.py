"""What the documents show is what runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.config_file import load
from hal.ops import OPS

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("hal_readme", ROOT / "tests" / "readme.py")
assert spec
assert spec.loader
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)


def test_generated_parts_are_current():
    assert readme.README.read_text() == readme.renewed(readme.README.read_text()), "run: python tests/readme.py --write"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_files_that_documents_name_exist(document):
    text = (ROOT / document).read_text()
    links = set(re.findall(r"\]\(([\w./-]+)\)", text)) | set(re.findall(r"`((?:hal|backends|kernels|tests|docs|configs)/[\w./-]+)`", text))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def block(language: str, containing: str) -> str:
    """The one code block of the README in that language with that text."""
    (found,) = [b for b in re.findall(rf"```{language}\n(.*?)```", readme.README.read_text(), re.DOTALL) if containing in b]
    return found


def test_config_of_the_readme_is_valid(tmp_path):
    path = tmp_path / "my-box.yaml"
    path.write_text(block("yaml", "my-box"))
    config = load(path, backends=["reference", "triton"], ops=list(OPS))
    assert config.choice("flash_decode").explicit
    assert not config.choice("merge_states").explicit
    assert (config.fallback, config.choice("write_kv").reason) == ("error", "measured on our cards")


def test_transformers_lines_of_the_readme_run(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4}
    scope: dict[str, Any] = {"AutoModelForCausalLM": AutoModelForCausalLM, "name": str(tmp_path), "inputs": inputs}
    exec(block("python", "hal_transformers"), scope)
    assert tuple(scope["output"].shape) == (1, 7)


def test_no_placeholder_is_left():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert [str(d) for d in documents if re.search(r"@[A-Z]+@", d.read_text())] == []


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert targets == {"run", "test"}
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
