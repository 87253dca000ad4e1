"""Every error that `hal` raises on purpose.

    HalError
    ├── ArgumentError      (ValueError)    an argument of an op is not what its contract accepts
    ├── CaptureError       (RuntimeError)  a first call, or a host-synchronising op, inside CUDA graph capture
    ├── ConfigError        (ValueError)    a YAML config or a HAL_* variable is wrong
    ├── ModelError         (RuntimeError)  a model cannot be found, verified or loaded
    ├── PluginError        (RuntimeError)  a plug-in is broken or breaks a rule of `hal.spec`
    └── ResolutionError    (RuntimeError)  no permitted backend can serve the op
        ├── UnknownBackendError
        └── FallbackError                  only the reference could, and the config says `fallback: error`

Each message says what is wrong, where it comes from, what is accepted and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.report import Report

__all__ = [
    "ArgumentError",
    "CaptureError",
    "ConfigError",
    "FallbackError",
    "HalError",
    "ModelError",
    "PluginError",
    "ResolutionError",
    "UnknownBackendError",
    "nearest",
]


class HalError(Exception):
    """Base of all errors of this package."""


class ArgumentError(HalError, ValueError):
    """An argument of an op is outside its contract; nothing was launched or written.

    Args:
        op: name of the op.
        argument: name of the argument at fault.
        problem: what was found.
        accepted: what the contract accepts.
        fix: what to do about it.
    """

    def __init__(self, op: str, argument: str, problem: str, accepted: str, fix: str = "") -> None:
        self.op, self.argument, self.problem, self.accepted, self.fix = op, argument, problem, accepted, fix
        hint = f" {fix}" if fix else ""
        super().__init__(f"{op}: `{argument}` {problem}; accepted: {accepted}.{hint}")


class CaptureError(HalError, RuntimeError):
    """A call that cannot be captured in a CUDA graph was made during capture."""


class ConfigError(HalError, ValueError):
    """A config file or a HAL_* variable is wrong.

    Args:
        message: what is wrong, what is accepted, what to do.
        where: `file:line:column` or the name of the variable.
    """

    def __init__(self, message: str, where: str) -> None:
        self.where = where
        super().__init__(f"{where}: {message}")


class ModelError(HalError, RuntimeError):
    """A model cannot be found, verified or loaded."""


class PluginError(HalError, RuntimeError):
    """A plug-in is broken, or breaks a rule of the backend interface."""


class ResolutionError(HalError, RuntimeError):
    """No permitted backend can serve the op. `report` holds every candidate with its reasons."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        self.report = report
        super().__init__(message)


class UnknownBackendError(ResolutionError):
    """A backend name that nobody registered."""


class FallbackError(ResolutionError):
    """Only the reference could serve the call, and the config says `fallback: error`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` did you mean 'x'?` for the known name closest to `name`, or an empty string."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f" did you mean {found[0]!r}?" if found else ""
