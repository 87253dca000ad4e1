"""Which backends exist: the built-in ones, and those that other distributions add through entry points.

Listing a backend imports its declaration and nothing else. A broken plug-in is kept as a record with its exception:
it costs nobody else anything, and is fatal only to whoever asks for it by name.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hal.errors import PluginError, nearest
from hal.ops import OPS
from hal.ops.layouts import KV_LAYOUTS
from hal.spec import BackendSpec, HookSpec, Implementation, Requires, Symbol

__all__ = ["BUILTIN_BACKENDS", "ENTRY_POINT_GROUP", "REFERENCE", "BrokenPlugin", "Registered", "Registry", "discover", "hookimpl"]

ENTRY_POINT_GROUP = "hal.backends"
#: The backend that defines what each op means, and that serves on any machine.
REFERENCE = "reference"
#: Functions that return the built-in declarations. They are listed in code because a checkout has no entry points.
BUILTIN_BACKENDS = ("hal.backends.reference:backend", "hal.backends.triton:backend", "hal.backends.ixformer:backend")

log = logging.getLogger("hal")
hookimpl = pluggy.HookimplMarker("hal")


@dataclass(frozen=True)
class Registered:
    """A backend and the distribution that brought it."""

    spec: BackendSpec
    origin: str


@dataclass(frozen=True)
class BrokenPlugin:
    """A plug-in that could not be used, by its entry-point name."""

    name: str
    origin: str
    error: BaseException

    def __str__(self) -> str:
        return f"plug-in {self.name!r} of {self.origin}: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Registry:
    """All backends by name, the plug-ins that failed, and those that HAL_PLUGINS left out."""

    backends: Mapping[str, Registered]
    broken: tuple[BrokenPlugin, ...] = ()
    left_out: tuple[str, ...] = ()


def discover(plugins: Iterable[str] | None = None) -> Registry:
    """Collect the built-in backends and those of installed plug-ins.

    Args:
        plugins: entry-point names that may load; None for all.

    Returns:
        The registry. Each broken plug-in is also warned about, once.
    """
    backends: dict[str, Registered] = {}
    for target in BUILTIN_BACKENDS:
        module, _, function = target.partition(":")
        _add(backends, getattr(importlib.import_module(module), function)(), "hal")
    allowed = None if plugins is None else set(plugins)
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name)
    for name in sorted((allowed or set()) - {entry.name for entry in installed}):
        known = [entry.name for entry in installed]
        log.warning("HAL_PLUGINS names %r, which is not installed;%s Installed are: %s", name, nearest(name, known), ", ".join(known) or "none")
    broken: list[BrokenPlugin] = []
    left_out: list[str] = []
    for entry in installed:
        origin = entry.dist.name if entry.dist else "an unknown distribution"
        if allowed is not None and entry.name not in allowed:
            left_out.append(entry.name)
            continue
        try:
            added = dict(backends)
            for spec in _load(entry):
                _add(added, spec, origin)
            backends = added  # all of a plug-in or nothing
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            broken.append(BrokenPlugin(entry.name, origin, error))
            log.warning("%s; it is left out (`hal doctor` shows it)", broken[-1])
    return Registry(MappingProxyType(backends), tuple(broken), tuple(left_out))


def _load(entry: EntryPoint) -> list[BackendSpec]:
    manager = pluggy.PluginManager("hal")
    manager.add_hookspecs(HookSpec)
    plugin = entry.load()
    manager.register(plugin, name=entry.name)
    manager.check_pending()  # a misspelt hook name is an error, not a plug-in without backends
    implementations = manager.hook.hal_backends.get_hookimpls()
    if not implementations:
        raise PluginError(f"{entry.value} has no `hal_backends` hook; decorate a function of that name with `hal.hookimpl`")
    found: list[BackendSpec] = []
    for implementation in implementations:
        hook: Any = implementation.function
        found.extend(hook())
    return found


def _add(backends: dict[str, Registered], spec: Any, origin: str) -> None:
    """Check a declaration and enter it; a rule broken is a PluginError that names it."""
    if not isinstance(spec, BackendSpec):
        raise PluginError(f"`hal_backends` returned {type(spec).__name__} {spec!r}; return hal.BackendSpec objects")
    if not (isinstance(spec.name, str) and spec.name.replace("-", "_").isidentifier() and spec.name == spec.name.lower()):
        raise PluginError(f"backend name {spec.name!r} is not a lower-case identifier")
    if spec.name in backends:
        raise PluginError(f"backend {spec.name!r} exists already, from {backends[spec.name].origin}; choose another name")
    if spec.kv_cache.layout not in KV_LAYOUTS or spec.kv_cache.page_size < 1:
        raise PluginError(f"backend {spec.name!r} prefers {spec.kv_cache}; layouts are {', '.join(KV_LAYOUTS)}, pages have a slot or more")
    _check_requires(spec.name, spec.requires)
    for op, implementation in spec.implementations.items():
        if op not in OPS:
            raise PluginError(f"backend {spec.name!r} declares an unknown op {op!r};{nearest(op, OPS)} Ops are: {', '.join(OPS)}")
        if not isinstance(implementation, Implementation):
            raise PluginError(f"backend {spec.name!r}, op {op!r}: {type(implementation).__name__} is not hal.Implementation")
        _check_requires(f"{spec.name}, op {op}", implementation.requires)
        if len([part for part in implementation.target.split(":") if part]) != 2 or implementation.target.count(":") != 1:
            raise PluginError(f"backend {spec.name!r}, op {op!r}: target {implementation.target!r} is not 'package.module:function'")
    backends[spec.name] = Registered(spec, origin)


def _check_requires(owner: str, requires: Any) -> None:
    if not isinstance(requires, Requires):
        raise PluginError(f"backend {owner!r}: `requires` is {type(requires).__name__}, not hal.Requires")
    for name in ("devices", "vendors", "packages", "symbols"):
        if not isinstance(getattr(requires, name), tuple):
            raise PluginError(f"backend {owner!r}: `requires.{name}` is {getattr(requires, name)!r}, not a tuple")
    for package in requires.packages:
        try:
            SpecifierSet(package.versions)
        except InvalidSpecifier:
            raise PluginError(
                f"backend {owner!r}: {package.versions!r} of package {package.name!r} is no version window such as '>=3.6,<4'"
            ) from None
    for symbol in requires.symbols:
        if not isinstance(symbol, Symbol):
            raise PluginError(f"backend {owner!r}: symbol {symbol!r} is {type(symbol).__name__}, not hal.Symbol")
