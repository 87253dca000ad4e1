"""Finding and loading the model that `hal generate` is to run: the default one, a directory, a GGUF file or a hub id."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hal.default_model import DEFAULT_MODEL, Progress, unpacked
from hal.errors import ModelError, nearest

__all__ = ["DTYPES", "ModelFiles", "find_model", "load_model", "parse_dtype"]

#: dtypes by the names that users write.
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}

_INSTALL = "pip install 'hal-kernels[transformers]'"


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is.

    Attributes:
        label: what to call it.
        source: a directory or a hub id.
        gguf_file: name of a GGUF file inside, or None for a transformers checkpoint.
        offline: fetch nothing.
    """

    label: str
    source: str
    gguf_file: str | None = None
    offline: bool = False


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name; raises ModelError."""
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r};{nearest(name, DTYPES)} Accepted are: {', '.join(DTYPES)}.")
    return DTYPES[name]


def find_model(name: str | None = None, *, offline: bool = False, progress: Progress = lambda text: None) -> ModelFiles:
    """Find a model; the default one is fetched and unpacked if need be.

    Args:
        name: a directory, a `.gguf` file, a hub id `owner/name`, or None (or its name) for the default model.
        offline: fetch nothing.
        progress: told what is being done.

    Raises:
        ModelError: there is no such model.
    """
    if name is None or name == DEFAULT_MODEL.name:
        return ModelFiles(DEFAULT_MODEL.name, str(unpacked(_convert, offline=offline, progress=progress)), offline=True)
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file, but not a .gguf file. Pass a .gguf file or the directory of a checkpoint.")
        return ModelFiles(path.name, str(path.parent), path.name, offline=True)
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf" or name.count("/") != 1
    if looks_like_path:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ModelError(
            f"there is no model at {name!r};{nearest(path.name, [*siblings, DEFAULT_MODEL.name])} Accepted are: a directory with config.json, "
            f"a .gguf file, a hub id `owner/name`, or {DEFAULT_MODEL.name!r}, the default."
        )
    return ModelFiles(name, name, offline=offline)


def _in_directory(path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(path.name, str(path), offline=True)
    found = sorted(p.name for p in path.glob("*.gguf"))
    if len(found) == 1:
        return ModelFiles(found[0], str(path), found[0], offline=True)
    problem = f"holds several GGUF files ({', '.join(found)}); pass one of them" if found else "holds no config.json and no .gguf file"
    raise ModelError(f"the directory {path} {problem}.")


def load_model(files: ModelFiles, *, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Load a model, with attention and experts served by `hal`, and its tokenizer.

    Args:
        files: from `find_model`.
        dtype: of the weights.
        device: where to put them.

    Returns:
        The transformers model in evaluation mode, and its tokenizer, which pads on the left.

    Raises:
        ModelError: transformers or gguf is not installed, or the files cannot be loaded.
    """
    _require_transformers()
    import hal.integrations.transformers as hal_transformers

    served = hal_transformers.register()
    model, tokenizer = _from_files(files, dtype=dtype, attn_implementation=served, experts_implementation=served)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(f"transformers is not installed or cannot be imported ({error}): {_INSTALL}") from error


def _from_files(files: ModelFiles, **options: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if files.gguf_file is not None:
        _require_gguf()
    where = {"gguf_file": files.gguf_file} if files.gguf_file is not None else {}
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(files.source, local_files_only=files.offline, **where)
            model = AutoModelForCausalLM.from_pretrained(files.source, local_files_only=files.offline, **where, **options)
        except Exception as error:  # transformers raises a dozen kinds for missing, foreign and broken files
            advice = f" Pass --model with another one, or nothing for {DEFAULT_MODEL.name}."
            raise ModelError(f"the model {files.label!r} ({files.source}) cannot be loaded: {type(error).__name__}: {error}.{advice}") from error
    return model, tokenizer


def _require_gguf() -> None:
    for package in ("gguf", "accelerate"):  # transformers reads GGUF files with both
        try:
            __import__(package)
        except ImportError as error:
            raise ModelError(f"loading a GGUF file needs the package {package!r} ({error}): {_INSTALL}") from error


def _convert(gguf: Path, directory: Path) -> None:
    """Write the dequantised weights, config and tokenizer of a GGUF file as a transformers checkpoint."""
    _require_transformers()
    model, tokenizer = _from_files(ModelFiles(gguf.name, str(gguf.parent), gguf.name, offline=True), dtype=torch.float32)
    from safetensors.torch import save_model

    if hasattr(model.config, "quantization_config"):  # the weights are plain by now
        del model.config.quantization_config
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_model(model, os.fspath(directory / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own progress bars and remarks out of the output."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
