"""What this machine has and what `hal` makes of it, as plain data. `hal.doctor_view` draws it; `to_dict` is for reports.

Versions are read from package metadata: nothing is imported that dispatch itself does not import.
"""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from hal import environment
from hal.backend import build_backend, registry
from hal.config import Choice, Config
from hal.device import DeviceInfo, local_devices
from hal.errors import HalError
from hal.ops import OPS
from hal.registry import Registry
from hal.report import Report
from hal.version import API_VERSION, CONTRACT_VERSION, __version__

__all__ = ["FOREIGN_VARIABLES", "BackendRow", "Diagnosis", "diagnose", "package_versions"]

#: Libraries whose version may explain a difference between two machines.
_LIBRARIES = ("triton", "ixformer", "transformers", "pydantic", "pluggy")

#: Variables of others that change what `hal` finds.
FOREIGN_VARIABLES: Mapping[str, str] = MappingProxyType(
    {"CUDA_VISIBLE_DEVICES": "which GPUs this process sees", "TRITON_INTERPRET": "1 runs Triton kernels on the CPU, slowly"}
)


@dataclass(frozen=True)
class BackendRow:
    """A backend, or a plug-in that could not be used.

    Attributes:
        name: of the backend; of the entry point for a plug-in that failed or was left out.
        origin: distribution that brought it.
        ops: ops that it serves, at least on some device.
        description: its own words.
        api_version: the backend interface it was written for; None if it could not be read.
        error: text of the exception that kept it out, or why it was left out; empty if it is in.
        traceback: of that exception.
    """

    name: str
    origin: str
    ops: tuple[str, ...] = ()
    description: str = ""
    api_version: int | None = None
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `hal doctor` shows.

    Attributes:
        versions: library -> version; empty if it is not installed.
        devices: accelerators, then the CPU.
        variables: HAL_* and foreign variables that are set.
        backends: registered backends, then plug-ins that are not usable.
        config: the effective config; None if there is a problem.
        reports: one for each op and device.
        problem: text of the error that kept `hal` from working at all; empty if there is none.
    """

    versions: Mapping[str, str]
    devices: tuple[DeviceInfo, ...]
    variables: Mapping[str, str]
    backends: tuple[BackendRow, ...] = ()
    config: Config | None = None
    reports: tuple[Report, ...] = ()
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data for `--json`; the same machine and settings give the same data."""
        return {
            "versions": dict(self.versions),
            "devices": [device.to_dict() for device in self.devices],
            "environment": dict(self.variables),
            "config": _config_dict(self.config) if self.config else None,
            "backends": [{**vars(row), "ops": list(row.ops)} for row in self.backends],
            "ops": [report.to_dict() for report in self.reports],
            "problem": self.problem,
        }


def diagnose(backend: str | None = None, *, config: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Look at this machine under the given request.

    Args:
        backend: as for `hal.get_backend`.
        config: as for `hal.get_backend`.

    Returns:
        The diagnosis. A wrong variable, config or name does not raise: it is the `problem` of the diagnosis.
    """
    facts = Diagnosis(package_versions(), tuple(local_devices()), _variables())
    try:
        facts = replace(facts, backends=_rows(registry()))
        chosen = build_backend(backend, config=config)
        reports = tuple(chosen.explain(op, device=f"{d.type}:{d.index}") for d in facts.devices for op in OPS)
    except HalError as error:
        return replace(facts, problem=str(error))
    return replace(facts, config=chosen.config, reports=reports)


def _variables() -> dict[str, str]:
    return environment.in_force() | {name: os.environ[name] for name in FOREIGN_VARIABLES if name in os.environ}


def package_versions() -> dict[str, str]:
    """Return the versions that a bug report needs, without importing what is not imported yet."""
    own = {"hal": __version__, "backend interface": str(API_VERSION), "op contracts": CONTRACT_VERSION}
    host = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or ""}
    return own | host | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        # A vendor's image may hold the module without metadata.
        return "present, version unknown" if find_spec(name) else ""


def _rows(known: Registry) -> tuple[BackendRow, ...]:
    rows = [
        BackendRow(name, entry.origin, tuple(entry.spec.implementations), entry.spec.description, entry.spec.api_version)
        for name, entry in known.backends.items()
    ]
    rows += [
        BackendRow(plugin.name, plugin.origin, error=f"{type(plugin.error).__name__}: {plugin.error}", traceback=_trace(plugin.error))
        for plugin in known.broken
    ]
    rows += [BackendRow(name, "plug-in", error="left out by HAL_PLUGINS") for name in known.left_out]
    return tuple(rows)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _config_dict(config: Config) -> dict[str, Any]:
    return {
        "name": config.name,
        "source": vars(config.source),
        "default": _choice_dict(config.default),
        "ops": {op: _choice_dict(choice) for op, choice in config.ops.items()},
        "disabled": [{**vars(entry), "source": vars(entry.source)} for entry in config.disabled],
        "versions": dict(config.versions),
        "fallback": config.fallback,
        "validate": config.validate,
    }


def _choice_dict(choice: Choice) -> dict[str, Any]:
    return {**vars(choice), "backends": list(choice.backends), "source": vars(choice.source)}
