"""Declared backends without kernels, as a fixture for tests of configs, the doctor and the command line on any machine.

A test module asks for it by `pytest_plugins`: an import would give this file a second module name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import MappingProxyType, ModuleType
from typing import Any

import pytest

from hal.ops import OPS
from hal.registry import BrokenPlugin, Registered, Registry
from hal.spec import BackendSpec, Implementation, Package, Requires

_MODULE = "hal_fake_kernels"


@pytest.fixture
def fake_registry() -> Callable[..., Registry]:
    """Make a registry of the three built-in names: a whole reference, a Triton without prefill, an ixformer without ops."""
    return _registry


def _registry(broken: tuple[BrokenPlugin, ...] = (), left_out: tuple[str, ...] = ()) -> Registry:
    specs = (
        _spec("reference", OPS),
        _spec("triton", [op for op in OPS if op != "flash_prefill"], devices=("cuda",), packages=(Package("triton", ">=3.6"),)),
        _spec("ixformer", (), devices=("cuda",), vendors=("iluvatar",), packages=(Package("ixformer", install="It ships with CoreX."),)),
    )
    return Registry(MappingProxyType({spec.name: Registered(spec, "hal") for spec in specs}), broken, left_out)


def _spec(name: str, ops: Iterable[str], **requires: Any) -> BackendSpec:
    """A backend whose functions have the contract's signatures and only raise when called."""
    module = sys.modules.setdefault(_MODULE, ModuleType(_MODULE))
    for op in ops:
        setattr(module, op, _function(op))
    implementations = {op: Implementation(f"{_MODULE}:{op}") for op in ops}
    return BackendSpec(name, 1, implementations, Requires(**requires), description=f"the fake {name}")


def _function(op: str) -> object:
    def function(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the fake {op} was called")

    function.__signature__ = OPS[op].parameters  # type: ignore[attr-defined]
    return function
