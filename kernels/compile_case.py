"""How a kernel module tells the ahead-of-time compiler what its launcher may ask for.

An argument is written as Triton's own type string, with `:16` after it when the launcher's value is a multiple of 16
(aligned pointers, strides of whole rows), or as the constant that it is bound to: None for an absent tensor, or the
value of a constexpr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["EVERYWHERE", "FLOATS", "TYPE_NAMES", "CompileCase", "pointer", "refusals"]

#: (takes part in programmatic dependent launch, targets) of the kernels that run on all.
EVERYWHERE = ((True, ("sm_90",)), (False, ("sm_80", "gfx942")))
#: dtypes that are not quantised.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: torch dtype -> Triton's name.
TYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}

#: Quantised dtypes that Triton does not compile for compute capability 8.0: e4m3 never, e5m2 with 3.6.
_REFUSED = {torch.float8_e4m3fn: frozenset({"sm_80"})}
_UNSERVED = {torch.float8_e5m2: frozenset({"sm_80"})}


@dataclass(frozen=True)
class CompileCase:
    """One compiled variant of a kernel.

    Attributes:
        name: unique and readable, such as `decode/bf16/D128`.
        kernel: the `triton.jit` or `gluon.jit` function.
        types: argument -> type string, `:16` appended for multiples of 16.
        constants: argument -> the value that it is bound to.
        warps: warps of a program.
        stages: stages of the load pipeline.
        fp_fusion: contraction of multiply and add.
        refused: targets (`sm_80`, ...) on which the backend refuses this case with ARCH, because no Triton compiles it.
        unserved: targets on which the backend refuses it with ARCH because some supported Triton does not compile it.
        no_spills: the case is on the main path and must not spill registers on NVIDIA targets.
        targets: the targets whose launcher uses this config; empty for all.
        registers: most registers of a thread, None for what the compiler likes.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    fp_fusion: bool = True
    refused: frozenset[str] = field(default_factory=frozenset)
    unserved: frozenset[str] = field(default_factory=frozenset)
    no_spills: bool = False
    targets: tuple[str, ...] = ()
    registers: int | None = None


def refusals(kv_dtype: torch.dtype) -> tuple[frozenset[str], frozenset[str]]:
    """The `refused` and the `unserved` targets of a case with caches of `kv_dtype`."""
    return _REFUSED.get(kv_dtype, frozenset()), _UNSERVED.get(kv_dtype, frozenset())


def pointer(dtype: torch.dtype) -> str:
    """Type string of a 16-byte aligned pointer to `dtype`."""
    return f"*{TYPE_NAMES[dtype]}:16"
