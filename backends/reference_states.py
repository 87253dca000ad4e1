"""`merge_states` and `plan_decode` of the reference backend."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal.ops.plan import DecodePlan, PlanFacts

__all__ = ["close_states", "merge_states", "plan_decode"]


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
    """Merge two attention results (T, H, Dv) with LSE (T, H); the contract is `hal.ops.attention.MergeStates`.

    `out = (e^(lse_a - m) out_a + e^(lse_b - m) out_b) / (e^(lse_a - m) + e^(lse_b - m))` with `m` the larger LSE.
    """
    log_a, log_b = lse_a.masked_fill(lse_a.isinf(), -math.inf), lse_b.masked_fill(lse_b.isinf(), -math.inf)
    top = torch.maximum(log_a, log_b)
    top = top.masked_fill(top == -math.inf, 0.0)
    weight_a, weight_b = (log_a - top).exp(), (log_b - top).exp()
    total = weight_a + weight_b
    merged_lse = top + total.log()
    # An empty part weighs 0, but what its `out` holds may be NaN.
    part_a = out_a.float().masked_fill((log_a == -math.inf)[..., None], 0.0)
    part_b = out_b.float().masked_fill((log_b == -math.inf)[..., None], 0.0)
    merged = (weight_a[..., None] * part_a + weight_b[..., None] * part_b) / total[..., None]
    merged, merged_lse = close_states(merged, merged_lse, sinks)
    out = merged.to(out_a.dtype) if out is None else out.copy_(merged)
    return out, merged_lse if lse is None else lse.copy_(merged_lse)


def close_states(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Let `exp(sink)` join the denominators of states (..., H, Dv), (..., H), and make empty ones exactly 0 and -inf."""
    empty = lse == -math.inf
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks)
        out = out * (lse - with_sink).exp()[..., None]
        lse = with_sink.masked_fill(empty, -math.inf)
    return out.masked_fill(empty[..., None], 0.0), lse


def plan_decode(
    seq_lens: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    page_size: int,
    max_seq_len: int,
    q_len: int = 1,
    cu_seqlens_q: Tensor | None = None,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: DecodePlan | None = None,
) -> DecodePlan:
    """Return a plan that holds only its facts: what this backend learns from lengths and tables is cheap to read again."""
    if out is not None:
        out.check_maker("reference")
        return out
    facts = PlanFacts.of(
        seq_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=page_size,
        max_seq_len=max_seq_len,
        q_len=q_len,
        cu_seqlens_q=cu_seqlens_q,
        window=window,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
    )
    return DecodePlan(facts, "reference")
