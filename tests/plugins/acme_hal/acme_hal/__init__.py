"""A third-party backend: what it serves, declared without importing torch kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hal import BackendSpec, DeviceInfo, Implementation, Reason, ReasonCode, Requires, hookimpl

#: Optional arguments of attention that `acme_hal.ops.flash_decode` honours.
_FEATURES = frozenset({"lse", "window", "batch_invariant"})


def _only_fp32(dtype: torch.dtype) -> Iterator[Reason]:
    if dtype != torch.float32:
        yield Reason(ReasonCode.DTYPE, f"acme serves float32, not {dtype}", "Convert to float32.")


def merge_gate(call: Any, device: DeviceInfo) -> Iterator[Reason]:
    """Judge a `merge_states` call."""
    yield from _only_fp32(call.dtype)


def decode_gate(call: Any, device: DeviceInfo) -> Iterator[Reason]:
    """Judge a `flash_decode` call."""
    yield from _only_fp32(call.dtype)
    if call.kv_dtype != call.dtype:
        yield Reason(ReasonCode.DTYPE, f"acme serves unquantised caches, not {call.kv_dtype}")
    if call.kv_layout != "NHD":
        yield Reason(ReasonCode.LAYOUT, f"acme serves kv_layout 'NHD', not {call.kv_layout!r}")
    if call.q_len is None:
        yield Reason(ReasonCode.FEATURE, "acme does not serve cu_seqlens_q")
    for feature in sorted(call.features - _FEATURES):
        yield Reason(ReasonCode.FEATURE, f"acme does not serve {feature}")


@hookimpl
def hal_backends() -> list[BackendSpec]:
    """Return the backend of this distribution."""
    return [
        BackendSpec(
            name="acme",
            api_version=1,
            requires=Requires(devices=("cpu",)),
            description="a third party's torch code, float32 only",
            implementations={
                "merge_states": Implementation("acme_hal.ops:merge_states", gate=merge_gate),
                "flash_decode": Implementation("acme_hal.ops:flash_decode", gate=decode_gate, host_sync=True),
            },
        )
    ]
