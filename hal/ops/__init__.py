"""The op contracts: one module per family. `OPS` lists them by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hal.errors import ArgumentError, nearest
from hal.ops.attention import FLASH_DECODE, FLASH_PREFILL, MERGE_STATES, PLAN_DECODE
from hal.ops.kv_cache import WRITE_KV
from hal.ops.moe_activations import GELU_AND_MUL, SILU_AND_MUL, SWIGLU_OAI_AND_MUL
from hal.ops.moe_fused import FUSED_MOE
from hal.ops.moe_gemm import GROUP_GEMM
from hal.ops.moe_permute import MOE_COMBINE, MOE_EXPAND, MOE_INDEX
from hal.ops.moe_routing import ROUTE, TOPK_SOFTMAX
from hal.ops.op import Arguments, Op, TensorMeta

__all__ = ["OPS", "Arguments", "Op", "TensorMeta", "find_op"]

_ATTENTION = (FLASH_DECODE, FLASH_PREFILL, MERGE_STATES, PLAN_DECODE, WRITE_KV)
_ROUTING = (TOPK_SOFTMAX, ROUTE)
_EXPERTS = (MOE_INDEX, MOE_EXPAND, GROUP_GEMM, SILU_AND_MUL, GELU_AND_MUL, SWIGLU_OAI_AND_MUL, MOE_COMBINE, FUSED_MOE)

#: Every op, by name.
OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in (*_ATTENTION, *_ROUTING, *_EXPERTS)})


def find_op(name: str, caller: str) -> Op:
    """Return the op called `name`; raises ArgumentError with the nearest name on behalf of `caller`."""
    if not isinstance(name, str) or name not in OPS:
        raise ArgumentError(caller, "op", f"is {name!r}", ", ".join(OPS), nearest(name, OPS).strip())
    return OPS[name]
