"""Other implementations to compare with, from a Python file that the user gives; which functions it may define is each benchmark's matter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hal.errors import HalError

__all__ = ["PeersFile", "load_module"]

_MODULE = "hal_bench_peers_file"


class PeersFile:
    """The functions of a peers file.

    Attributes:
        path: of the file.
        functions: those that it defines, of those that were asked for.
    """

    def __init__(self, path: Path, known: tuple[str, ...], where: str) -> None:
        """Import the file.

        Args:
            path: of the file.
            known: functions that it may define.
            where: what says more about them.

        Raises:
            HalError: it is not there, it cannot be imported, or it has none of the functions.
        """
        self.path = path
        self.module = load_module(path, known)
        self.functions: dict[str, Callable[..., Any]] = {
            name: getattr(self.module, name) for name in known if callable(getattr(self.module, name, None))
        }
        if not self.functions:
            raise HalError(f"peers file {path} defines none of: {', '.join(known)}; see {where}")


def load_module(path: Path, known: tuple[str, ...]) -> ModuleType:
    """Import a peers file; raises HalError if that is impossible."""
    if not path.is_file():
        raise HalError(f"--against {path}: there is no such file; give a Python file with functions {', '.join(known)}")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise HalError(f"--against {path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # Triton and pickle look functions' modules up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[_MODULE]
        raise HalError(f"--against {path}: importing it failed with {type(error).__name__}: {error}") from error
    return module
