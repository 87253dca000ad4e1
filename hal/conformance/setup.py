"""From the options of a run to its session."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from hal.backend import build_backend, registry
from hal.conformance.session import Session
from hal.conformance.subject import Subject
from hal.conformance.waivers import DEFAULT, WaiverError, load
from hal.errors import ConfigError, UnknownBackendError
from hal.spec import BackendSpec

__all__ = ["SetupError", "prepare"]


class SetupError(Exception):
    """The options of a run cannot be met."""


def prepare(options: argparse.Namespace) -> Session:
    """Return the session for the `--hal-*` options.

    Raises:
        SetupError: unknown backend, no such device, no GPU where one is required, or a wrong waiver file.
    """
    device = _device(options)
    name = options.hal_backend
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        config = build_backend(name).config
        files = [DEFAULT, *([options.hal_waivers] if options.hal_waivers else [])]
        waivers = tuple(w for path in files for w in load(path) if w.applies(name, device.type))
    except (UnknownBackendError, ConfigError, WaiverError) as error:
        raise SetupError(str(error)) from error

    def build(validate: Any, observe: Any) -> Any:
        return build_backend(name, config=replace(config, validate=validate, fallback="error"), observe=observe)

    spec = _spec(name)
    subject = Subject(name, device, options.hal_seed, build, frozenset(spec.implementations))
    return Session(subject, waivers, options.hal_require_gpu, options.hal_json, options.hal_markdown)


def _spec(name: str) -> BackendSpec:
    known = registry()
    if name not in known.backends:
        broken = next(str(p) for p in known.broken if p.name == name)
        raise SetupError(f"backend {name!r} cannot be tested: {broken}")
    return known.backends[name].spec


def _device(options: argparse.Namespace) -> torch.device:
    if options.hal_require_gpu and not torch.cuda.is_available():
        raise SetupError("--hal-require-gpu: this machine has no CUDA device")
    try:
        device = torch.device(options.hal_device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise SetupError(f"--hal-device {options.hal_device}: {error}") from error
    if options.hal_require_gpu and device.type != "cuda":
        raise SetupError(f"--hal-require-gpu: the device under test is {device}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SetupError(f"--hal-device {device}: this machine has no CUDA device")
        if device.index is not None:
            torch.cuda.set_device(device)  # streams and graphs of the tests belong to the current device
        return torch.device("cuda", torch.cuda.current_device())
    return device
