"""The op contracts: one module per family. `OPS` lists them by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hal.errors import ArgumentError, nearest
from hal.ops.attention import FLASH_DECODE, FLASH_PREFILL, MERGE_STATES, PLAN_DECODE
from hal.ops.kv_cache import WRITE_KV
from hal.ops.op import Arguments, Op, TensorMeta

__all__ = ["OPS", "Arguments", "Op", "TensorMeta", "find_op"]

#: Every op, by name.
OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in (FLASH_DECODE, FLASH_PREFILL, MERGE_STATES, PLAN_DECODE, WRITE_KV)})


def find_op(name: str, caller: str) -> Op:
    """Return the op called `name`; raises ArgumentError with the nearest name on behalf of `caller`."""
    if not isinstance(name, str) or name not in OPS:
        raise ArgumentError(caller, "op", f"is {name!r}", ", ".join(OPS), nearest(name, OPS).strip())
    return OPS[name]
