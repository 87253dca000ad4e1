"""The Triton backend: NVIDIA and AMD GPUs, and the CPU where TRITON_INTERPRET=1 asks for Triton's interpreter.

The declaration imports no Triton. Iluvatar's CoreX brings Triton 3.1 or 3.2, which the version window refuses; a config
that widens the window lets it try. `flash_prefill` is not served yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from hal.device import DeviceInfo
from hal.reasons import Reason, ReasonCode
from hal.spec import BackendSpec, Implementation, KVCachePreference, Package, Requires

__all__ = ["backend"]

_TRITON = Package("triton", ">=3.6", "A CUDA build of torch brings Triton; elsewhere: pip install 'hal-kernels[triton]'.")

#: dtype -> least NVIDIA compute capability for which every supported Triton compiles it (3.6 stops at e5m2 on 8.0).
_LEAST_ARCH = {torch.bfloat16: (8, 0), torch.float8_e4m3fn: (8, 9), torch.float8_e5m2: (8, 9)}
#: Names of the dtypes among the facts of a call.
_DTYPES = ("dtype", "kv_dtype", "weight_dtype", "out_dtype")
#: Most experts held here: one program makes the list of all their tiles. Most rows of a product: int32 counts them, and a tile more.
_MOST_EXPERTS, _MOST_ROWS = 8191, 2**31 - 2**16


def _gate(call: Any, device: DeviceInfo) -> Iterator[Reason]:
    """Refuse the dtypes that this device's compiler target lacks."""
    if device.vendor != "nvidia" or device.arch is None:
        return
    dtypes = {getattr(call, name) for name in _DTYPES if hasattr(call, name)}
    for dtype in sorted(dtypes, key=str):
        least = _LEAST_ARCH.get(dtype, (0, 0))
        if device.arch < least:
            have, need = (".".join(map(str, arch)) for arch in (device.arch, least))
            yield Reason(ReasonCode.ARCH, f"{dtype} needs compute capability {need} in Triton kernels; {device.name} has {have}")


def _expert_gate(call: Any, device: DeviceInfo) -> Iterator[Reason]:
    """Refuse what the expert kernels do not cover."""
    yield from _gate(call, device)
    held = getattr(call, "num_local_experts", call.num_experts)
    if held > _MOST_EXPERTS:
        yield Reason(ReasonCode.SHAPE, f"{held} experts; the kernels take up to {_MOST_EXPERTS}", "Spread the experts over more ranks.")
    rows = getattr(call, "rows", 0)
    if rows > _MOST_ROWS:
        yield Reason(ReasonCode.SHAPE, f"{rows} rows; the kernels take up to {_MOST_ROWS}", "Split the rows.")


def backend() -> BackendSpec:
    """Declare the Triton backend."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return BackendSpec(
        name="triton",
        api_version=1,
        implementations={
            "flash_decode": Implementation("hal.backends.triton_ops:flash_decode", gate=_gate),
            "merge_states": Implementation("hal.backends.triton_ops:merge_states", gate=_gate),
            "plan_decode": Implementation("hal.backends.triton_ops:plan_decode"),
            "write_kv": Implementation("hal.backends.triton_ops:write_kv", gate=_gate),
            "topk_softmax": Implementation("hal.backends.triton_moe:topk_softmax", gate=_gate),
            "route": Implementation("hal.backends.triton_moe:route", gate=_gate),
            "moe_index": Implementation("hal.backends.triton_moe:moe_index", gate=_expert_gate),
            "moe_expand": Implementation("hal.backends.triton_moe:moe_expand"),
            "group_gemm": Implementation("hal.backends.triton_moe:group_gemm", gate=_expert_gate),
            "silu_and_mul": Implementation("hal.backends.triton_moe:silu_and_mul", gate=_gate),
            "gelu_and_mul": Implementation("hal.backends.triton_moe:gelu_and_mul", gate=_gate),
            "swiglu_oai_and_mul": Implementation("hal.backends.triton_moe:swiglu_oai_and_mul", gate=_gate),
            "moe_combine": Implementation("hal.backends.triton_moe:moe_combine", gate=_gate),
            "fused_moe": Implementation("hal.backends.triton_moe:fused_moe", gate=_expert_gate),
        },
        requires=Requires(
            devices=("cuda", "cpu") if interpreted else ("cuda",),
            vendors=("nvidia", "amd", "iluvatar", "cpu") if interpreted else ("nvidia", "amd", "iluvatar"),
            packages=(_TRITON,),
        ),
        tuning="hal.backends.triton_tuning:apply",
        kv_cache=KVCachePreference(layout="NHD", page_size=16),
        description="Triton kernels: NVIDIA and AMD GPUs" + (", interpreted on the CPU" if interpreted else ""),
    )
