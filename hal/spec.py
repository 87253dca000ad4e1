"""What a backend author writes: declarations, read by `hal`, that import nothing heavy.

A backend declares, `hal` decides. Per op it names a target (`"package.module:function"`, imported only once the op is
resolved to it), what that needs, and optionally a gate: a pure function from the facts of a call to the reasons
against serving it. The target has exactly the signature of the op's contract in `hal.ops`.

Built-in backends are listed in `hal.registry`. Another distribution adds its own through the entry-point group
`hal.backends`: the entry point names a module (or object) with a `hal_backends` hook::

    from hal import BackendSpec, Implementation, hookimpl

    @hookimpl
    def hal_backends():
        return [BackendSpec(name="acme", api_version=1, implementations={...})]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from hal.device import DeviceInfo
from hal.reasons import Reason

__all__ = ["BackendSpec", "Gate", "HookSpec", "Implementation", "KVCachePreference", "Package", "Requires", "Symbol"]

hookspec = pluggy.HookspecMarker("hal")

#: A gate: (facts of the call, see `hal.ops`; the device) -> reasons against serving it, none if it is served.
#: It is pure and judged once per distinct call signature.
Gate = Callable[[Any, DeviceInfo], Iterable[Reason]]


@dataclass(frozen=True)
class Package:
    """A library that must be present.

    Attributes:
        name: import name.
        versions: PEP 440 specifier such as `>=3.6,<4`; empty accepts any, also an unreadable version.
        install: how to get it, shown when it is missing.
        distribution: name in the package index, if it differs from the import name.
    """

    name: str
    versions: str = ""
    install: str = ""
    distribution: str = ""


@dataclass(frozen=True)
class Symbol:
    """A function or module that a vendor library must have.

    Attributes:
        name: `"module:attribute"`, or `"module"`.
        parameters: parameter names that the function must take; releases of one library may differ in them.
    """

    name: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Requires:
    """Static requirements; an empty field requires nothing. Those of a backend and of its implementations add up.

    Attributes:
        devices: torch device types.
        vendors: values of `DeviceInfo.vendor`.
        min_arch: least compute capability, checked on devices that have one.
        packages: libraries with version windows.
        symbols: what a vendor library must have.
    """

    devices: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ()
    min_arch: tuple[int, int] | None = None
    packages: tuple[Package, ...] = ()
    symbols: tuple[Symbol, ...] = ()


@dataclass(frozen=True)
class Implementation:
    """How a backend serves one op.

    Attributes:
        target: `"package.module:function"`, with exactly the contract's parameters.
        requires: what this op needs beyond what its backend needs.
        gate: judges the facts of a call; None if every call inside the contract is served.
        host_sync: the implementation waits for the device; CUDA graph capture is then refused.
    """

    target: str
    requires: Requires = field(default_factory=Requires)
    gate: Gate | None = None
    host_sync: bool = False


@dataclass(frozen=True)
class KVCachePreference:
    """What an engine should allocate so that the backend serves natively: a `kv_layout` and a page size."""

    layout: str = "NHD"
    page_size: int = 16


@dataclass(frozen=True)
class BackendSpec:
    """A backend: its name, what it needs, and the ops that it serves.

    Attributes:
        name: lower-case identifier, as used in configs and `HAL_BACKEND`.
        api_version: the `hal.API_VERSION` it was written for.
        implementations: op name -> implementation.
        requires: what every op of this backend needs.
        kv_cache: the cache that it serves natively.
        description: one line for `hal doctor`.
        tuning: `"package.module:function"`, called with the `hal.tuning.Tuning` of a config that has one before the backend's
            first call under it; empty for a backend that takes none.
    """

    name: str
    api_version: int
    implementations: Mapping[str, Implementation]
    requires: Requires = field(default_factory=Requires)
    kv_cache: KVCachePreference = field(default_factory=KVCachePreference)
    description: str = ""
    tuning: str = ""


class HookSpec:
    """The plug-in interface."""

    @hookspec
    def hal_backends(self) -> Iterable[BackendSpec]:  # type: ignore[empty-body]
        """Return the backends that this plug-in adds. Must import nothing heavy."""
