"""The static half of a decision: can this backend serve this op on this device at all?

Requirements are judged from the cheapest to the dearest, and a vendor library is imported only for a device that it
could serve. Nothing is cached here; `hal.resolve` keeps the answers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hal.device import DeviceInfo
from hal.ops import Op
from hal.reasons import Reason, ReasonCode
from hal.spec import BackendSpec, Gate, Implementation, Package, Requires, Symbol
from hal.version import API_VERSION

__all__ = ["Static", "judge", "package_version"]


@dataclass(frozen=True)
class Static:
    """Answer of one backend for one op on one device: reasons against it, or the function to call."""

    backend: str
    reasons: tuple[Reason, ...]
    implementation: Implementation | None = None
    function: Callable[..., Any] | None = None
    packages: tuple[tuple[str, str], ...] = ()

    @property
    def gate(self) -> Gate | None:
        """The gate that still has to judge each call."""
        return self.implementation.gate if self.implementation else None


def judge(spec: BackendSpec, op: Op, device: DeviceInfo, windows: Mapping[str, str]) -> Static:
    """Judge one backend; `windows` replaces version windows by package name."""
    if spec.api_version != API_VERSION:
        text = f"{spec.name} was written for API version {spec.api_version}; this hal has {API_VERSION}"
        return Static(spec.name, (Reason(ReasonCode.VERSION, text, "Install matching versions of hal and the plug-in."),))
    implementation = spec.implementations.get(op.name)
    if implementation is None:
        return Static(spec.name, (Reason(ReasonCode.NOT_IMPLEMENTED, f"{spec.name} does not serve {op.name}"),))
    requirements = (spec.requires, implementation.requires)
    reasons = [r for q in requirements for r in _device_reasons(spec.name, q, device)]
    packages: list[tuple[str, str]] = []
    if not reasons:
        for package in (p for q in requirements for p in q.packages):
            found, against = _package(package, windows.get(package.name, package.versions))
            packages.append((package.name, found))
            reasons += against
    function = None
    if not reasons:
        reasons += [r for q in requirements for symbol in q.symbols for r in _symbol_reasons(symbol)]
    if not reasons:
        function, against = _load(implementation.target, op)
        reasons += against
    return Static(spec.name, tuple(reasons), implementation, function, tuple(packages))


def _device_reasons(backend: str, requires: Requires, device: DeviceInfo) -> list[Reason]:
    if requires.devices and device.type not in requires.devices:
        return [Reason(ReasonCode.DEVICE, f"{backend} serves {', '.join(requires.devices)} tensors; these are on {device.type}")]
    if requires.vendors and device.vendor not in requires.vendors:
        found = device.name or "an unknown device"
        return [Reason(ReasonCode.DEVICE, f"{backend} serves {', '.join(requires.vendors)} devices; this is {found} ({device.vendor})")]
    if requires.min_arch and device.arch and device.arch < requires.min_arch:
        have, need = (".".join(map(str, arch)) for arch in (device.arch, requires.min_arch))
        return [Reason(ReasonCode.ARCH, f"{backend} needs compute capability {need}; {device.name} has {have}")]
    return []


def package_version(package: Package) -> str | None:
    """Return the version of a package, "" if it is there without one, None if it is not installed."""
    try:
        return version(package.distribution or package.name)
    except PackageNotFoundError:
        pass
    try:
        if find_spec(package.name) is None:
            return None
    except (ImportError, ValueError):  # a parent is missing, or a module without a spec: the import below decides
        pass
    # A vendor's image may hold the module without metadata; then only the module itself knows its version.
    try:
        return str(getattr(importlib.import_module(package.name), "__version__", ""))
    except ModuleNotFoundError:
        return None


def _package(package: Package, window: str) -> tuple[str, list[Reason]]:
    try:
        found = package_version(package)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included: its words are the reason
        return "", [Reason(ReasonCode.LOAD_ERROR, f"importing {package.name} failed: {type(error).__name__}: {error}", package.install)]
    if found is None:
        return "", [Reason(ReasonCode.NOT_INSTALLED, f"package {package.name!r} is not installed", package.install)]
    if not window:
        return found, []
    try:
        inside = SpecifierSet(window).contains(Version(found), prereleases=True)
    except InvalidVersion:
        fix = f"Set `versions: {{{package.name}: ''}}` in the config to accept it."
        return found, [Reason(ReasonCode.VERSION, f"version of {package.name} is {found!r}, unreadable; needed {window}", fix)]
    if inside:
        return found, []
    fix = package.install or f"Install {package.name}{window}, or widen `versions:` in the config."
    return found, [Reason(ReasonCode.VERSION, f"{package.name} is {found}; needed {window}", fix)]


def _symbol_reasons(symbol: Symbol) -> list[Reason]:
    module, _, attribute = symbol.name.partition(":")
    other_release = "Another release of the vendor library may have it."
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return [Reason(ReasonCode.SYMBOL_MISSING, f"module {module!r} does not exist here ({error})", other_release)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included: its words are the reason
        return [Reason(ReasonCode.LOAD_ERROR, f"importing {module} failed: {type(error).__name__}: {error}")]
    if not attribute:
        return []
    if not hasattr(owner, attribute):
        return [Reason(ReasonCode.SYMBOL_MISSING, f"{module} has no symbol {attribute!r}", other_release)]
    if not symbol.parameters:
        return []
    try:
        found = inspect.signature(getattr(owner, attribute)).parameters
    except (TypeError, ValueError) as error:
        return [Reason(ReasonCode.SIGNATURE, f"{symbol.name} has no readable signature: {error}")]
    missing = [name for name in symbol.parameters if name not in found]
    if missing:
        text = f"{symbol.name} does not take {', '.join(missing)}; it takes {', '.join(found) or 'nothing'}"
        return [Reason(ReasonCode.SIGNATURE, text, other_release)]
    return []


def _load(target: str, op: Op) -> tuple[Callable[..., Any] | None, list[Reason]]:
    module, _, attribute = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included: its words are the reason
        return None, [Reason(ReasonCode.LOAD_ERROR, f"loading {target} failed: {type(error).__name__}: {error}")]
    wanted = [(p.name, p.kind, p.default) for p in op.parameters.parameters.values()]
    try:
        found = [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError) as error:
        return None, [Reason(ReasonCode.SIGNATURE, f"{target} has no readable signature: {error}")]
    if found != wanted:
        differing = sorted({name for name, *_ in set(wanted) ^ set(found)}) or ["their order"]
        fix = f"Give it exactly the parameters of hal's {op.name} contract."
        return None, [Reason(ReasonCode.SIGNATURE, f"{target} differs from the contract in: {', '.join(differing)}", fix)]
    return function, []
