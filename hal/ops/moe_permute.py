# mypy: disable-error-code="no-untyped-def"
# (the `_..._signature` functions: their types are those of the Protocol above each, and a test compares the parameters)
"""The stages of the expert pipeline that move rows: `moe_index`, `moe_expand`, `moe_combine`.

Axes: T tokens, k experts per token, E experts held here, H hidden size. Slot `s = t * k + j` is expert j of token t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hal.ops.checks import FLOATS, Checker
from hal.ops.moe_checks import MOST_IDS, MoeIndex, check_ids, check_index, check_placement, index_facts, range_facts
from hal.ops.op import Arguments, Op, TensorMeta
from hal.ops.signature import facts, number, types

__all__ = ["MOE_COMBINE", "MOE_EXPAND", "MOE_INDEX", "MoeCombine", "MoeExpand", "MoeIndexCall", "MoeIndexOp", "MoeRowsCall"]

#: Largest element that `moe_expand` copies.
_MOST_BYTES = 8


class MoeIndexOp(Protocol):
    """Type of `backend.moe_index`."""

    def __call__(
        self,
        ids: Tensor,
        num_experts: int,
        *,
        expert_range: tuple[int, int] | None = None,
        expert_map: Tensor | None = None,
        num_local_experts: int | None = None,
        out: MoeIndex | None = None,
    ) -> MoeIndex:
        """Sort the slots by expert: a stable counting sort.

        Args:
            ids: (T, k) int32 expert ids, k >= 1, any row stride. An id below 0 or from `num_experts` on, or of an expert that
                is not held here, is skipped, whatever its value. A row may repeat an id.
            num_experts: how many experts the ids speak of, on all ranks together; at least 0.
            expert_range: (start, end): experts start..end-1 are held here, as local experts 0..end-start-1. May be empty.
            expert_map: (num_experts,) int32, local expert of each id; -1, or any value outside 0..num_local_experts-1, for
                an expert that is not held here.
            num_local_experts: E; needed with `expert_map`, whose values no host reads; otherwise it follows.
            out: the result's tensors, written when given; contiguous and distinct.

        Returns:
            `MoeIndex(dst_to_src, src_to_dst, expert_sizes)`: sorted row -> slot, slot -> sorted row or -1, and the rows of
            each local expert. All three are written in full but for `dst_to_src` from `sum(expert_sizes)` on.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _moe_index_signature(ids, num_experts, *, expert_range=None, expert_map=None, num_local_experts=None, out=None):
    return (
        ids.shape, ids.stride(), ids.dtype, ids.device, num_experts, range_facts(expert_range), facts(expert_map), num_local_experts,
        index_facts(out), types(num_experts, num_local_experts),
    )  # fmt: skip


@dataclass(frozen=True)
class MoeIndexCall:
    """What a gate sees of a `moe_index` call.

    Attributes:
        tokens: T. top_k: k. num_experts: experts that ids speak of. num_local_experts: E.
        features: the optional arguments in use: expert_range, expert_map, out.
        ids_strides: in elements.
    """

    tokens: int
    top_k: int
    num_experts: int
    num_local_experts: int
    features: frozenset[str]
    ids_strides: tuple[int, ...]


def _local_experts(check: Checker, a: Arguments) -> int:
    """Number of experts held here."""
    found = check_placement(check, a, a.num_experts)
    if found is None:
        return check.integer("num_local_experts", a.num_local_experts, least=0, most=MOST_IDS)
    if a.num_local_experts is not None and check.integer("num_local_experts", a.num_local_experts, least=0, most=MOST_IDS) != found:
        raise check.fail("num_local_experts", f"is {a.num_local_experts}", f"{found}, or None without expert_map")
    return found


def check_moe_index(a: Arguments) -> MoeIndexCall:
    """Check a `moe_index` call and return what gates look at."""
    check = Checker("moe_index", a.ids.device)
    tokens, top_k = check_ids(check, a.ids)
    check.integer("num_experts", a.num_experts, least=0, most=MOST_IDS)
    local = _local_experts(check, a)
    if a.out is not None:
        check_index(check, "out", a.out, tokens * top_k, local, written=True)
    used = frozenset(name for name in ("expert_range", "expert_map", "out") if getattr(a, name) is not None)
    return MoeIndexCall(tokens, top_k, a.num_experts, local, used, a.ids.stride())


def _meta_moe_index(a: Arguments) -> tuple[TensorMeta, ...]:
    slots = a.ids.shape[0] * a.ids.shape[1]
    local = a.num_experts if a.expert_range is None else a.expert_range[1] - a.expert_range[0]
    local = local if a.num_local_experts is None else a.num_local_experts
    return tuple(TensorMeta((size,), torch.int32) for size in (slots, slots, local))


class MoeExpand(Protocol):
    """Type of `backend.moe_expand`."""

    def __call__(self, x: Tensor, index: MoeIndex, *, out: Tensor | None = None) -> Tensor:
        """Copy each token once for each of its experts, in the order of the index: `out[d] = x[dst_to_src[d] // k]`.

        Args:
            x: (T, H) of any dtype of up to 8 bytes, quantised rows and scales of rows among them; the last dimension contiguous,
                any row stride.
            index: from `moe_index`, of T * k slots.
            out: (T*k, H) in x's dtype, any row stride, apart from x.

        Returns:
            (T*k, H), bit for bit; rows from `sum(expert_sizes)` on are unspecified.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _moe_expand_signature(x, index, *, out=None):
    return (x.shape, x.stride(), x.dtype, x.device, index_facts(index), facts(out), x.requires_grad and torch.is_grad_enabled())


class MoeCombine(Protocol):
    """Type of `backend.moe_combine`."""

    def __call__(
        self,
        y: Tensor,
        weights: Tensor,
        index: MoeIndex,
        *,
        residual: Tensor | None = None,
        scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Sum the experts' results of each token: `out[t] = scale * sum_j weights[t, j] * y[src_to_dst[t * k + j]] + residual[t]`.

        The sum runs over j = 0..k-1 in this order, in fp32, and is rounded once at the end, so that every run gives the same
        bits. Skipped slots add nothing: neither their rows of y nor their weights matter, be they NaN. A token whose slots are all
        skipped gives 0 (plus residual) exactly.

        Args:
            y: (T*k, H) fp32, fp16 or bf16, rows in the order of the index; the last dimension contiguous, any row stride.
                Rows from `sum(expert_sizes)` on are never read.
            weights: (T, k) fp32, any row stride.
            index: from `moe_index`, of T * k slots.
            residual: (T, H) in y's dtype, any row stride.
            scale: factor of the sum.
            out: (T, H) in y's dtype, any row stride, apart from the inputs.

        Returns:
            (T, H) in y's dtype.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _moe_combine_signature(y, weights, index, *, residual=None, scale=1.0, out=None):
    return (
        y.shape, y.stride(), y.dtype, y.device, facts(weights), index_facts(index), facts(residual), number(scale), scale == 1.0, facts(out),
        y.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip


@dataclass(frozen=True)
class MoeRowsCall:
    """What a gate sees of a `moe_expand` or `moe_combine` call.

    Attributes:
        op: name of the op.
        dtype: dtype of the rows.
        tokens: T. top_k: k, 0 if T is 0 in `moe_expand`. num_experts: E. hidden: H.
        features: the optional arguments in use: residual, scale, out.
        strides: of x or y, in elements.
    """

    op: str
    dtype: torch.dtype
    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    features: frozenset[str]
    strides: tuple[int, ...]


def check_moe_expand(a: Arguments) -> MoeRowsCall:
    """Check a `moe_expand` call and return what gates look at."""
    check = Checker("moe_expand", a.x.device)
    check.tensor("x", a.x, shape=(None, None), axes="(T, H)")
    if a.x.dtype.itemsize > _MOST_BYTES:
        raise check.fail("x", f"has dtype {a.x.dtype}", f"a dtype of up to {_MOST_BYTES} bytes")
    if a.x.is_quantized or a.x.is_conj() or a.x.is_neg():
        raise check.fail(
            "x",
            "is quantised, or a lazy conjugate or negative",
            "elements that are what memory holds",
            "Use .int_repr(), .resolve_conj() or .resolve_neg().",
        )
    check.no_grad(x=a.x)
    tokens, hidden = a.x.shape
    index = check_index(check, "index", a.index)
    slots = index.src_to_dst.shape[0]
    if (slots % tokens or not slots) if tokens else slots:
        raise check.fail("index", f"has {slots} slots", f"T * k, a multiple of the {tokens} rows of `x`")
    check.output("out", a.out, shape=(slots, hidden), axes="(T*k, H)", dtypes=(a.x.dtype,))
    used = frozenset(("out",) if a.out is not None else ())
    return MoeRowsCall("moe_expand", a.x.dtype, tokens, slots // max(tokens, 1), index.expert_sizes.shape[0], hidden, used, a.x.stride())


def check_moe_combine(a: Arguments) -> MoeRowsCall:
    """Check a `moe_combine` call and return what gates look at."""
    check = Checker("moe_combine", a.y.device)
    check.tensor("weights", a.weights, shape=(None, None), axes="(T, k)", dtypes=(torch.float32,))
    tokens, top_k = a.weights.shape
    if not top_k:
        raise check.fail("weights", f"has shape {tuple(a.weights.shape)}", "(T, k) with k >= 1")
    check.tensor("y", a.y, shape=(tokens * top_k, None), axes="(T*k, H)", dtypes=FLOATS)
    hidden = a.y.shape[1]
    index = check_index(check, "index", a.index, tokens * top_k)
    if a.residual is not None:
        check.tensor("residual", a.residual, shape=(tokens, hidden), axes="(T, H)", dtypes=(a.y.dtype,))
    check.no_grad(y=a.y, weights=a.weights, residual=a.residual)
    check.number("scale", a.scale)
    check.output("out", a.out, shape=(tokens, hidden), axes="(T, H)", dtypes=(a.y.dtype,))
    used = {name for name in ("residual", "out") if getattr(a, name) is not None} | ({"scale"} if a.scale != 1.0 else set())
    return MoeRowsCall("moe_combine", a.y.dtype, tokens, top_k, index.expert_sizes.shape[0], hidden, frozenset(used), a.y.stride())


def _meta_moe_expand(a: Arguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta((a.index.src_to_dst.shape[0], a.x.shape[1]), a.x.dtype),)


def _meta_moe_combine(a: Arguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta((a.weights.shape[0], a.y.shape[1]), a.y.dtype),)


MOE_INDEX = Op("moe_index", MoeIndexOp, _moe_index_signature, check_moe_index, _meta_moe_index)
MOE_EXPAND = Op("moe_expand", MoeExpand, _moe_expand_signature, check_moe_expand, _meta_moe_expand)
MOE_COMBINE = Op("moe_combine", MoeCombine, _moe_combine_signature, check_moe_combine, _meta_moe_combine)
