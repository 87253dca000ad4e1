"""The Triton backend's ops: the contracts' signatures in front of the launchers in `hal.kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

import hal.kernels.flash_decode as _decode
import hal.kernels.merge_states as _merge
import hal.kernels.write_kv as _write
from hal.kernels.layouts import head_dims
from hal.ops.plan import DecodePlan, PlanFacts

__all__ = ["flash_decode", "merge_states", "plan_decode", "write_kv"]

_NAME = "triton"


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
    plan: DecodePlan | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `hal.ops.attention.FlashDecode`."""
    tokens, heads, head_dim = q.shape
    if out is None:
        out = q.new_empty((tokens, heads, head_dims(k_cache, v_cache, kv_layout)[2]))
    if lse is None and return_lse:
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    _decode.flash_decode(
        q,
        k_cache,
        v_cache,
        seq_lens,
        block_tables,
        out,
        lse,
        q_len=q_len,
        cu_seqlens_q=cu_seqlens_q,
        kv_layout=kv_layout,
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        window=window,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        plan=plan.data if plan is not None and plan.backend == _NAME else None,
        batch_invariant=batch_invariant,
    )
    if not return_lse:
        return out
    assert lse is not None  # allocated above
    return out, lse


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
    """See `hal.ops.attention.PlanDecode`.

    With `cu_seqlens_q` the plan is empty: its size would depend on T, and blocks may change between calls. Each call
    then partitions itself, in one small kernel.
    """
    if out is not None:
        out.check_maker(_NAME)
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
    data = None
    if facts.q_len is not None:
        data = _decode.plan_decode(
            seq_lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=facts.head_dim_v,
            max_seq_len=max_seq_len,
            q_len=q_len,
            window=window,
            kv_dtype=facts.kv_dtype,
            batch_invariant=batch_invariant,
            out=None if out is None else out.data,
        )
    return DecodePlan(facts, _NAME, data) if out is None else out


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
    """See `hal.ops.attention.MergeStates`."""
    if out is None:
        out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    if lse is None:
        lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    _merge.merge_states(out_a, lse_a, out_b, lse_b, out, lse, sinks)
    return out, lse


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """See `hal.ops.kv_cache.WriteKV`."""
    _write.write_kv(key, value, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale)
