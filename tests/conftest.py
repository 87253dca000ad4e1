"""Fixtures for the dispatcher's own tests: backends made of fake modules, so that no real one is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

import hal.backend
from hal import Backend, BackendSpec, Choice, Config, Implementation, Source
from hal.registry import BrokenPlugin, Registered, Registry

SOURCE = Source("file", "test.yaml:3")


@pytest.fixture(autouse=True)
def fresh_hal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts without HAL_* variables (but for the models' folder), backends or a default."""
    for name in list(__import__("os").environ):
        if name.startswith("HAL_") and name != "HAL_CACHE_DIR":
            monkeypatch.delenv(name)
    hal.backend.reset()
    yield
    hal.backend.reset()


def merge_states(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
    """A merge that marks its results, so that a test sees who ran."""
    return "merged", lse_a


def plan_decode(
    seq_lens, *, num_heads, num_kv_heads, head_dim, head_dim_v=None, page_size, max_seq_len, q_len=1, cu_seqlens_q=None, window=None,
    kv_dtype=None, batch_invariant=False, out=None,
):  # fmt: skip
    """A plan that marks its result."""
    return "planned"


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Make an importable module with the given attributes."""

    def make(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def fake_backend(fake_module: Callable[..., ModuleType]) -> Callable[..., BackendSpec]:
    """Declare a backend that serves merge_states (with an optional gate) and plan_decode by fake functions."""

    def make(name: str, *, gate: Any = None, result: Any = None, function: Any = None, **fields: Any) -> BackendSpec:
        def own(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
            return (name if result is None else result), lse_a

        fake_module(f"fake_{name}", merge_states=function or own, plan_decode=plan_decode)
        fields.setdefault(
            "implementations",
            {
                "merge_states": Implementation(f"fake_{name}:merge_states", gate=gate),
                "plan_decode": Implementation(f"fake_{name}:plan_decode"),
            },
        )
        return BackendSpec(name=name, api_version=fields.pop("api_version", 1), **fields)

    return make


@pytest.fixture
def make_hal() -> Callable[..., Backend]:
    """Build a `Backend` from declarations, a chain of names and config fields."""

    def make(
        *specs: BackendSpec, chain: tuple[str, ...], explicit: bool = False, broken: tuple[BrokenPlugin, ...] = (), observe: Any = None, **fields: Any
    ) -> Backend:
        registry = Registry(MappingProxyType({s.name: Registered(s, "tests") for s in specs}), broken)
        config = Config("test", SOURCE, Choice(chain, explicit, SOURCE), **fields)
        return Backend("test", config, registry, observe)

    return make


@pytest.fixture
def states() -> tuple[torch.Tensor, ...]:
    """Arguments of a valid merge_states call: (2, 4, 16) outs and (2, 4) LSEs."""
    return torch.randn(2, 4, 16), torch.randn(2, 4), torch.randn(2, 4, 16), torch.randn(2, 4)
