"""What the contracts of the expert pipeline share: `MoeIndex`, expert placement, weights, scales."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal.ops.checks import FLOATS, Checker
from hal.ops.op import Arguments
from hal.ops.signature import facts, types

__all__ = [
    "BLOCK",
    "EXPERT_QUANTISED",
    "GATE_UP",
    "MOST_IDS",
    "MoeIndex",
    "check_activation_scales",
    "check_bias",
    "check_expert_weight",
    "check_ids",
    "check_index",
    "check_placement",
    "check_weight_scales",
    "index_facts",
    "output_dtypes",
    "pair_facts",
    "range_facts",
    "result_dtype",
    "scale_kind",
]

_INDEX = (torch.int32,)
_FP32 = (torch.float32,)
#: Slots and ids of experts are int32.
_MOST_SLOTS = 2**31 - 1
MOST_IDS = 2**31 - 1
#: Rows and columns of a block that shares one scale.
BLOCK = 128
#: dtypes of quantised experts.
EXPERT_QUANTISED = (torch.int8, torch.float8_e4m3fn)
#: How gate and up columns lie: all gates first, or a gate and its up in turn.
GATE_UP = ("concat", "interleaved")
#: Number of dimensions of the weight scales -> what one scale is for.
_SCALE_KINDS = {1: "tensor", 2: "channel", 3: "block"}


class MoeIndex(NamedTuple):
    """Which slot stands where once the slots are sorted by expert; slot `s = t * k + j` is expert j of token t.

    Attributes:
        dst_to_src: (T*k,) int32, slot of each sorted row. Experts ascending, and slots ascending within one; entries from
            `sum(expert_sizes)` on are unspecified and never read.
        src_to_dst: (T*k,) int32, sorted row of each slot; -1 for a skipped slot.
        expert_sizes: (E,) int32, rows of each expert that is held here.
    """

    dst_to_src: Tensor
    src_to_dst: Tensor
    expert_sizes: Tensor


def index_facts(index: MoeIndex | None) -> Hashable:
    """What a signature holds of an index; AttributeError if it is none."""
    return None if index is None else (facts(index.dst_to_src), facts(index.src_to_dst), facts(index.expert_sizes))


def pair_facts(pair: tuple[Tensor, Tensor] | None) -> Hashable:
    """What a signature holds of two optional tensors; RuntimeError, AttributeError or TypeError if it is no pair."""
    if pair is None:
        return None
    if pair.__class__ is not tuple or len(pair) != 2:
        raise TypeError("not a pair")
    return facts(pair[0]), facts(pair[1])


def range_facts(expert_range: tuple[int, int] | None) -> Hashable:
    """What a signature holds of a range of experts; TypeError if it is none."""
    return None if expert_range is None else (expert_range, *types(*expert_range))


def check_index(check: Checker, argument: str, index: Any, slots: int | None = None, experts: int | None = None, written: bool = False) -> MoeIndex:
    """Check a MoeIndex of `slots` slots and `experts` experts, None for any; `written` as an output."""
    if not isinstance(index, MoeIndex):
        raise check.fail(argument, f"is {type(index).__name__}", "a hal.MoeIndex", "Use moe_index.")
    if slots is None:
        check.tensor(f"{argument}.dst_to_src", index.dst_to_src, shape=(None,), axes="(T*k,)", dtypes=_INDEX)
        slots = index.dst_to_src.shape[0]
    shapes = {"dst_to_src": (slots, "(T*k,)"), "src_to_dst": (slots, "(T*k,)"), "expert_sizes": (experts, "(E,)")}
    for name, (size, axes) in shapes.items():
        check.tensor(f"{argument}.{name}", getattr(index, name), shape=(size,), axes=axes, dtypes=_INDEX)
        if written:
            check.distinct(f"{argument}.{name}", getattr(index, name))
    return index


def check_ids(check: Checker, ids: Any) -> tuple[int, int]:
    """Check expert ids and return (T, k)."""
    check.tensor("ids", ids, shape=(None, None), axes="(T, k)", dtypes=_INDEX)
    tokens, top_k = ids.shape
    if not top_k or tokens * top_k > _MOST_SLOTS:
        raise check.fail("ids", f"has shape {tuple(ids.shape)}", "(T, k) with k >= 1 and at most 2^31 - 1 slots", "Split the batch.")
    return tokens, top_k


def check_placement(check: Checker, a: Arguments, num_experts: int | None) -> int | None:
    """Check `expert_range` and `expert_map` over `num_experts` ids (None: a range is given, and its end will do).

    Returns the number of experts here, None if a map hides it.
    """
    if a.expert_range is not None and a.expert_map is not None:
        raise check.fail("expert_range", "and `expert_map` are both given", "one of them, or neither")
    if a.expert_map is not None:
        check.tensor("expert_map", a.expert_map, shape=(num_experts,), axes="(num_experts,)", dtypes=_INDEX)
        return None
    if a.expert_range is None:
        return num_experts
    if not isinstance(a.expert_range, tuple) or len(a.expert_range) != 2:
        raise check.fail("expert_range", f"is {a.expert_range!r}", "a tuple (start, end)")
    most = MOST_IDS if num_experts is None else num_experts
    start = check.integer("expert_range", a.expert_range[0], least=0, most=most)
    return check.integer("expert_range", a.expert_range[1], least=start, most=most) - start


def check_expert_weight(check: Checker, argument: str, value: Any, shape: tuple[int | None, ...], axes: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check (E, N, K) weights: either of the last two dimensions is contiguous."""
    check.tensor(argument, value, shape=shape, axes=axes, dtypes=dtypes, last_contiguous=False)
    _, rows, columns = value.shape
    if value.numel() and not (value.stride(2) == 1 or value.stride(1) == 1 or rows == columns == 1):
        raise check.fail(
            argument, f"has strides {value.stride()}", "strides that keep one of the last two dimensions contiguous", "Call .contiguous()."
        )


def scale_kind(scales: Tensor | None) -> str | None:
    """None, "tensor", "channel" or "block": what one scale of expert weights is for."""
    return None if scales is None else _SCALE_KINDS.get(scales.dim())


def check_weight_scales(check: Checker, argument: str, scales: Any, weight: Tensor) -> str | None:
    """Check the scales of (E, N, K) weights, which quantised ones need and others must not have; return their kind."""
    if weight.dtype not in EXPERT_QUANTISED:
        if scales is not None:
            raise check.fail(argument, "is given", "None: the expert weights are not quantised")
        return None
    experts, rows, columns = weight.shape
    accepted = f"fp32 scales (E,) = ({experts},), (E, N) = ({experts}, {rows}) or blocks ({experts}, {-(-rows // BLOCK)}, {-(-columns // BLOCK)})"
    if scales is None:
        raise check.fail(argument, "is None", accepted)
    check.tensor(argument, scales, dtypes=_FP32)
    shapes = {1: (experts,), 2: (experts, rows), 3: (experts, -(-rows // BLOCK), -(-columns // BLOCK))}
    if tuple(scales.shape) != shapes.get(scales.dim()):
        raise check.fail(argument, f"has shape {tuple(scales.shape)}", accepted)
    return _SCALE_KINDS[scales.dim()]


def check_activation_scales(check: Checker, x: Tensor, x_scales: Any, weight_dtype: torch.dtype, kind: str | None) -> None:
    """Check x (R, K) against the experts' dtype, and its scales: per row, or per row and 128 columns beside block scales."""
    allowed = FLOATS if kind is None else (*FLOATS, weight_dtype)
    if x.dtype not in allowed or (kind is None and x.dtype is not weight_dtype):
        accepted = f"the dtype of the expert weights, {weight_dtype}" if kind is None else f"float32, float16, bfloat16 or {weight_dtype}"
        raise check.fail("x", f"has dtype {x.dtype}", accepted)
    if x.dtype not in EXPERT_QUANTISED:
        if x_scales is not None:
            raise check.fail("x_scales", "is given", "None: x is not quantised")
        return
    rows, columns = x.shape
    shape, axes = ((rows, -(-columns // BLOCK)), "one for each row and 128 columns") if kind == "block" else ((rows,), "one for each row")
    if x_scales is None:
        raise check.fail("x_scales", "is None", f"fp32 scales {shape}: {axes}")
    check.tensor("x_scales", x_scales, shape=shape, axes=axes, dtypes=_FP32)


def check_bias(check: Checker, argument: str, bias: Any, shape: tuple[int, int], axes: str) -> None:
    """Check an optional bias of the experts, of any floating-point dtype."""
    if bias is not None:
        check.tensor(argument, bias, shape=shape, axes=axes, dtypes=FLOATS)


def result_dtype(x: Tensor, out: Tensor | None) -> torch.dtype:
    """Dtype of a result: that of x; for a quantised x that of `out`, else bf16."""
    if x.dtype not in EXPERT_QUANTISED:
        return x.dtype
    return torch.bfloat16 if out is None else out.dtype


def output_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes that `out` may have."""
    return FLOATS if x.dtype in EXPERT_QUANTISED else (x.dtype,)
