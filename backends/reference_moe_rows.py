"""`moe_index`, `moe_expand` and `moe_combine` of the reference backend. Nothing is read by the host; all sizes are static."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops.moe_checks import MoeIndex

#: Bytes of an element -> a dtype that can be indexed.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

__all__ = ["combine_rows", "expand_rows", "index_slots", "local_ids", "moe_combine", "moe_expand", "moe_index"]


def moe_index(
    ids: Tensor,
    num_experts: int,
    *,
    expert_range: tuple[int, int] | None = None,
    expert_map: Tensor | None = None,
    num_local_experts: int | None = None,
    out: MoeIndex | None = None,
) -> MoeIndex:
    """Sort the slots of ids (T, k) by expert; the contract is `hal.ops.moe_permute.MoeIndexOp`."""
    start, end = expert_range or (0, num_experts)
    experts = end - start if num_local_experts is None else num_local_experts
    index = index_slots(local_ids(ids, num_experts, experts, start, expert_map), experts)
    return index if out is None else MoeIndex(*(given.copy_(made) for given, made in zip(out, index, strict=True)))


def local_ids(ids: Tensor, num_experts: int, experts: int, start: int, expert_map: Tensor | None) -> Tensor:
    """Return local expert ids, int64 and shaped as `ids`; a skipped slot has `experts`."""
    ids = ids.long()
    known = (ids >= 0) & (ids < num_experts)
    if expert_map is None:
        ids = ids - start
    elif num_experts:
        ids = expert_map.long()[ids.clamp(0, num_experts - 1)]
    return ids.masked_fill(~known | (ids < 0) | (ids >= experts), experts)


def index_slots(local: Tensor, experts: int) -> MoeIndex:
    """Return the index of local ids in 0..experts, where `experts` itself means skipped."""
    local = local.flatten()
    sizes = torch.zeros(experts + 1, dtype=torch.int32, device=local.device)
    sizes.scatter_add_(0, local, torch.ones_like(local, dtype=torch.int32))
    order = local.sort(stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return MoeIndex(order.to(torch.int32), place.masked_fill_(local == experts, -1).to(torch.int32), sizes[:experts])


def moe_expand(x: Tensor, index: MoeIndex, *, out: Tensor | None = None) -> Tensor:
    """Copy the rows of x (T, H) into the order of the index, (T*k, H); the contract is `hal.ops.moe_permute.MoeExpand`."""
    rows = expand_rows(x, index)
    return rows if out is None else out.copy_(rows)


def expand_rows(x: Tensor, index: MoeIndex) -> Tensor:
    """Return (T*k, ...) rows of x (T, ...) in the order of the index; x may be of any dtype."""
    slots = index.src_to_dst.shape[0]
    if not slots:
        return x.new_empty(0, *x.shape[1:])
    top_k = slots // x.shape[0]
    source = index.dst_to_src.long().clamp(0, slots - 1) // top_k  # what lies behind the used entries may be anything
    return x.view(_BITS[x.itemsize])[source].view(x.dtype)  # as bits: not every dtype can be indexed


def moe_combine(
    y: Tensor, weights: Tensor, index: MoeIndex, *, residual: Tensor | None = None, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Sum the rows of y (T*k, H) of each token; the contract is `hal.ops.moe_permute.MoeCombine`."""
    total = combine_rows(y, weights, index) * scale
    if residual is not None:
        total = total + residual
    return total.to(y.dtype) if out is None else out.copy_(total)


def combine_rows(y: Tensor, weights: Tensor, index: MoeIndex) -> Tensor:
    """Return the fp32 (T, H) weighted sums over the slots of each token, in their order."""
    tokens, top_k = weights.shape
    total = torch.zeros(tokens, y.shape[1], dtype=torch.float32, device=y.device)
    if not tokens:
        return total
    rows = index.src_to_dst.long().view(tokens, top_k)
    for j in range(top_k):
        there = (rows[:, j] >= 0) & (rows[:, j] < y.shape[0])
        part = y[rows[:, j].masked_fill(~there, 0)].float() * weights[:, j, None]
        total += part.masked_fill_(~there[:, None], 0.0)  # a weight of 0 would not silence a NaN
    return total
