"""`topk_softmax` and `route` of the reference backend: a stable sort."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["route", "topk_softmax"]


def topk_softmax(
    logits: Tensor, top_k: int, *, renormalize: bool = False, weights: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the k most probable of E experts for each of T tokens; the contract is `hal.ops.moe_routing.TopkSoftmax`."""
    return route(logits, top_k, renormalize=renormalize, weights=weights, ids=ids)


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scale: float = 1.0,
    weights: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose k of E experts for each of T tokens; the contract is `hal.ops.moe_routing.Route`."""
    x = logits.float()
    unusable = x.isnan() if correction_bias is None else x.isnan() | correction_bias.isnan()
    x = x.masked_fill(unusable, -math.inf)
    scores = _softmax(x) if scoring == "softmax" else x.sigmoid()
    if correction_bias is None:
        rank = x  # as the scores, but without their rounding
        group_rank = x if group_score == "max" else scores.masked_fill(x == -math.inf, -math.inf)
    else:
        rank = group_rank = (scores + correction_bias).masked_fill(x == -math.inf, -math.inf)
    if top_groups < num_groups:
        allowed = _allowed(group_rank.unflatten(1, (num_groups, -1)), top_groups, group_score)
        chosen = allowed.gather(1, _best(rank.gather(1, allowed), top_k))
    else:
        chosen = _best(rank, top_k)
    result = scores.gather(1, chosen)
    if renormalize:
        total = result.sum(1, keepdim=True)
        result = torch.where(total > 0, result / total, 0.0)
    result = result * scale
    weights = result if weights is None else weights.copy_(result)
    return weights, chosen.to(torch.int32) if ids is None else ids.copy_(chosen)


def _softmax(x: Tensor) -> Tensor:
    """Softmax of (T, E) without NaN, in which several +inf share the mass and a row of -inf gives 0."""
    top = x.amax(1, keepdim=True)
    raised = (x - top).exp().masked_fill_(x == top, 1.0).masked_fill_(x == -math.inf, 0.0)
    return raised / raised.sum(1, keepdim=True).clamp_min(1.0)


def _best(rank: Tensor, count: int) -> Tensor:
    """Columns of the `count` highest entries of each row, ties by column; adding 0.0 makes -0.0 equal 0.0 to every sort."""
    return (rank + 0.0).sort(dim=1, descending=True, stable=True).indices[:, :count]


def _allowed(rank: Tensor, top_groups: int, group_score: str) -> Tensor:
    """Experts of the best groups, ids ascending, (T, top_groups * G), of ranks (T, groups, G)."""
    size = rank.shape[2]
    score = rank.amax(2) if group_score == "max" else rank.topk(min(2, size), dim=2).values.sum(2)
    groups = _best(score, top_groups).sort(1).values
    return (groups[:, :, None] * size + torch.arange(size, device=rank.device)).flatten(1)
