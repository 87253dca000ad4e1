"""What the documents show is what runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("hal_readme", ROOT / "tests" / "readme.py")
assert spec
assert spec.loader
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)


def test_generated_parts_are_current():
    assert readme.README.read_text() == readme.renewed(readme.README.read_text()), "run: python tests/readme.py --write"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_documents_name_exist(document):
    text = (ROOT / document).read_text()
    links = set(re.findall(r"\]\(([\w./-]+)\)", text)) | set(re.findall(r"`((?:hal|backends|kernels|tests|docs|configs)/[\w./-]+)`", text))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert targets == {"run", "test"}
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
