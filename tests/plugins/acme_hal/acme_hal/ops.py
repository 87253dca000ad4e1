"""Two ops in plain torch, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two states; see the contract in `hal.ops.attention`."""
    logs = torch.stack([lse_a, lse_b])
    logs = torch.where(logs.isinf(), -torch.inf, logs)
    empty = logs == -torch.inf
    total = logs.logsumexp(0)
    nothing = empty.all(0)
    if sinks is not None:
        total = torch.where(nothing, total, torch.logaddexp(total, sinks))
    weights = torch.exp(logs - torch.where(nothing, 0.0, total))
    values = torch.where(empty[..., None], 0.0, torch.stack([out_a, out_b]).float())
    merged = (weights[..., None] * values).sum(0)
    out = torch.empty_like(out_a) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    out.copy_(merged)
    lse.copy_(total)
    return out, lse


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    q_len: int = 1,
    cu_seqlens_q: Tensor | None = None,
    kv_layout: str = "NHD",
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    plan: object | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend row by row; the gate has refused what this ignores. See the contract in `hal.ops.attention`."""
    tokens, heads, dim = q.shape
    pages, page, kv_heads, _ = k_cache.shape
    out = q.new_empty(tokens, heads, v_cache.shape[3]) if out is None else out
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if lse is None else lse
    scale = dim**-0.5 if scale is None else scale
    longest = block_tables.shape[1] * page
    for row in range(tokens):
        sequence, index = divmod(row, q_len)
        position = min(max(int(seq_lens[sequence]), 0), longest) - q_len + index
        first = 0 if window is None else max(0, position - window + 1)
        seen = torch.arange(first, max(first, position + 1))
        page_ids = block_tables[sequence, seen // page].long()
        valid = (page_ids >= 0) & (page_ids < pages)
        at = (page_ids[valid], seen[valid] % page)
        keys, values = (cache[at].float().repeat_interleave(heads // kv_heads, dim=1) for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,nhd->hn", q[row].float(), keys) * scale
        lse[row] = scores.logsumexp(1) if len(scores[0]) else -torch.inf
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), values)
    return (out, lse) if return_lse else out
