"""Attention of tiles of query rows over chunks of gathered keys, with an online softmax: the reference's general path.

Everything is fp32 inside. No value is read by the host and all sizes come from the caller, so that the same lines run
on a CPU, on a GPU, and under CUDA graph capture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.backends.reference_keys import Keys, Span
from hal.backends.reference_products import matmul
from hal.backends.reference_states import close_states

__all__ = ["Rows", "Scoring", "attend"]


@dataclass(frozen=True)
class Scoring:
    """How scores are made and which keys a row sees; names as in the contract.

    Attributes:
        depth: (T,) depth of each token of a tree; None without `tree_mask`.
    """

    scale: float
    softcap: float
    window: int | None
    causal: bool
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    tree_mask: Tensor | None
    depth: Tensor | None


@dataclass(frozen=True)
class Rows:
    """A tile of N groups of R query rows; the rows of a group belong to one block and share its sequence's keys.

    Attributes:
        token: (N, R) row of q, or T where there is none.
        place: (N, R) place of the row in its block.
        sequence: (N,) which sequence.
        first: (N,) row of q at which the block starts.
        base: (N,) position of the block's first token, S minus the length of the block.
        length: (N,) S.
    """

    token: Tensor
    place: Tensor
    sequence: Tensor
    first: Tensor
    base: Tensor
    length: Tensor


def attend(q: Tensor, rows: Rows, keys: Keys, spans: Iterable[Span], scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return out (N, R, H, Dv) and LSE (N, R, H), both fp32, of the rows over the keys in `spans`.

    Args:
        q: (T, H, D), T >= 1.
        rows: the tile.
        keys: where keys and values are.
        spans: parts of the sequences, in order; keys outside them are not looked at.
        scoring: scores and visibility.
    """
    (groups, count), (tokens, heads, dim), kv_heads = rows.token.shape, q.shape, keys.num_kv_heads
    group_size, dim_v = heads // kv_heads, keys.head_dim_v
    live = rows.token < tokens
    query = q.index_select(0, rows.token.clamp_max(tokens - 1).flatten()).float()
    query = query.view(groups, count, kv_heads, group_size, dim).transpose(1, 2).reshape(groups, kv_heads, count * group_size, dim)
    top = query.new_full((groups, kv_heads, count * group_size, 1), -math.inf)
    total, out = torch.zeros_like(top), query.new_zeros(groups, kv_heads, count * group_size, dim_v)
    for span in spans:
        chunk = keys.load(rows.sequence, span)
        visible, distance = _visibility(rows, chunk.index, scoring)
        visible = visible & live[..., None] & (chunk.exists & (chunk.index < rows.length[:, None]))[:, None]
        scores = matmul(query, chunk.k.transpose(2, 3)).mul_(scoring.scale)
        if scoring.softcap:
            scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        by_head = scores.view(groups, kv_heads, count, group_size, -1)
        if scoring.alibi_slopes is not None:
            by_head.sub_(scoring.alibi_slopes.view(kv_heads, 1, group_size, 1) * distance[:, None, :, None])
        by_head.masked_fill_(~visible[:, None, :, None], -math.inf)
        # A weight of 0 does not silence a NaN in V: keys that no row sees are zeroed.
        values = chunk.v.masked_fill_(~visible.any(1)[:, None, :, None], 0.0)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        offset = new_top.masked_fill(new_top == -math.inf, 0.0)
        weights, rescale = scores.sub_(offset).exp_(), (top - offset).exp_()
        total = total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        out = out.mul_(rescale).add_(matmul(weights, values))
        top = new_top

    def by_row(x: Tensor) -> Tensor:
        return x.view(groups, kv_heads, count, group_size, -1).transpose(1, 2).reshape(groups, count, heads, -1)

    return close_states(by_row(out / total), by_row(top + total.log()).squeeze(-1), scoring.sinks)


def _visibility(rows: Rows, index: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return which existing keys each row may see, (N, R, C) bool, and the ALiBi distance to them, broadcastable to that."""
    if scoring.tree_mask is None or scoring.depth is None:
        distance = (rows.base[:, None] + rows.place)[..., None] - index
        visible = distance >= 0 if scoring.causal else torch.ones_like(distance, dtype=torch.bool)
    else:
        last_token, last_column = scoring.tree_mask.shape[0] - 1, scoring.tree_mask.shape[1] - 1
        token = rows.token.clamp(0, last_token)
        draft = index - rows.base[:, None]  # column of the tree mask; below 0 in the prefix
        key_token = (rows.first[:, None] + draft).clamp(0, last_token)
        key_position = torch.where(draft >= 0, rows.base[:, None] + scoring.depth[key_token], index)
        distance = (rows.base[:, None] + scoring.depth[token])[..., None] - key_position[:, None]
        columns = draft.clamp(0, last_column)[:, None].expand(-1, token.shape[1], -1)
        visible = (draft < 0)[:, None] | scoring.tree_mask[token].gather(2, columns)
    if scoring.window is not None:
        visible = visible & (distance < scoring.window)
    return visible, distance if scoring.causal else distance.abs()
