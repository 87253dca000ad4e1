# mypy: disable-error-code="no-untyped-def"
# (the `_..._signature` functions: their types are those of the Protocol above each, and a test compares the parameters)
"""The attention family: `flash_decode`, `flash_prefill`, `merge_states`, `plan_decode`.

Axes: B sequences, T query tokens, H query heads, Hkv kv heads, D head dim of Q and K, Dv of V, P slots of a page.
The checks behind these contracts are in `hal.ops.attention_checks` and `hal.ops.attention_values`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from hal.ops import attention_checks as checks
from hal.ops import attention_values as values
from hal.ops.op import Op
from hal.ops.plan import DecodePlan
from hal.ops.signature import facts, number, scale_facts, types

__all__ = ["FLASH_DECODE", "FLASH_PREFILL", "MERGE_STATES", "PLAN_DECODE", "FlashDecode", "FlashPrefill", "MergeStates", "PlanDecode"]


_INDEX = torch.int32
_grad_enabled = torch.is_grad_enabled  # one attribute look-up less on every call


class FlashDecode(Protocol):
    """Type of `backend.flash_decode`."""

    def __call__(
        self,
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
        """Attention of a few query tokens per sequence against a long paged KV cache.

        Per row and head: `scores = scale * q . k`, then softcap, then bias, then mask, then softmax, then `@ v`.
        Split over the keys as in Flash-Decoding (Dao et al., 2023) where a backend finds it useful.

        Args:
            q: (T, H, D) fp32, fp16 or bf16; T = B * q_len, or packed by `cu_seqlens_q`. H is a multiple of Hkv;
                D is a multiple of 8 in 16..256, or 576 with Dv = 512.
            k_cache: paged keys in `kv_layout`; q's dtype, or fp8 e4m3, fp8 e5m2 or int8. At least one slot a page.
            v_cache: paged values, the dtype of `k_cache`; strides are independent of K's, Dv may differ from D,
                and it may be a view of `k_cache` (MLA).
            seq_lens: (B,) int32, keys of each sequence, the new tokens included.
            block_tables: (B, max_pages) int32, page ids of each sequence in order. Entries past a sequence's last
                page, or wholly outside the window, may hold anything.
            q_len: query tokens of every sequence; ignored with `cu_seqlens_q`.
            cu_seqlens_q: (B+1,) int32 offsets of the blocks of query tokens: starts at 0, non-decreasing, blocks may
                be empty; rows from `cu_seqlens_q[B]` on are padding.
            kv_layout: `NHD`, `HND`, `HND_SPLIT` or `SPLIT_V0`, see `hal.ops.layouts`.
            scale: factor of the scores; default `D ** -0.5`.
            softcap: scores become `softcap * tanh(score / softcap)`; 0 turns it off.
            window: keys that a row sees, itself included, 1 to 2^31 - 1; None for all.
            alibi_slopes: (H,) fp32; adds `-slope * (p - j)` to the score of row position p and key j.
            sinks: (H,) fp32; `exp(sink)` joins the denominator once, neither scaled nor capped.
            tree_mask: (T, Q) bool, Q >= the longest block: `[t, c]` = row t sees draft token c of its own sequence,
                which is key `S - q_len + c`. It replaces causality inside the block, in both triangles; prefix keys
                stay visible; columns from q_len on are ignored. For ALiBi and the window, rows and draft keys stand
                at `S - q_len + depth`, depth = true entries of that token's row within the block minus 1, at least 0.
            k_scale: `k = k_cache * k_scale` for a quantised cache: a float above 0, fp32 () or (1,), (Hkv,), or per token and
                head shaped as the cache without D, any strides. int8 needs it; fp8 without it means 1.
            v_scale: the same for V.
            out: (T, H, Dv) in q's dtype or fp32, any strides with the last dimension contiguous; it may be `q`.
            lse: (T, H) fp32, written when given.
            return_lse: return `(out, lse)`.
            plan: from `plan_decode` with the facts of this call; steers speed only. A foreign plan is ignored.
            batch_invariant: a row's bits do not depend on its batch mates, padding or block.

        Returns:
            out (T, H, Dv), or (out, lse). `lse` is the natural logarithm of the denominator, sinks included. Row i
            of a block of q_len stands at `p = S - q_len + i` and sees `max(0, p - window + 1) <= j <= p`. A row
            with nothing to see (S = 0, padding row, q_len > S): out exactly 0, lse exactly -inf.

        Raises:
            ArgumentError: an argument is outside this contract. Values inside tensors are read on the CPU, and on
                other devices under `validate: always`; unchecked, a length below 0 acts as 0, one beyond
                `max_pages * P` as that, and a page id outside the cache is skipped.
        """


def _flash_decode_signature(
    q,
    k_cache,
    v_cache,
    seq_lens,
    block_tables,
    *,
    q_len=1,
    cu_seqlens_q=None,
    kv_layout="NHD",
    scale=None,
    softcap=0.0,
    window=None,
    alibi_slopes=None,
    sinks=None,
    tree_mask=None,
    k_scale=None,
    v_scale=None,
    out=None,
    lse=None,
    return_lse=False,
    plan=None,
    batch_invariant=False,
):
    # Runs on every call: flat, and only what a check or a gate reads. Most calls pass no optional tensor at all.
    extras: Hashable = None
    if not (cu_seqlens_q is alibi_slopes is sinks is tree_mask is k_scale is v_scale is out is lse is plan is None):
        extras = (
            facts(cu_seqlens_q), facts(alibi_slopes), facts(sinks), facts(tree_mask), scale_facts(k_scale), scale_facts(v_scale),
            facts(out), facts(lse), plan if plan is None else (plan.token, plan.__class__),
        )  # fmt: skip
    # Equal numbers of other types are other arguments: True == 1 == 1.0.
    if not (
        q_len.__class__ is int and (window is None or window.__class__ is int) and softcap.__class__ is float
        and return_lse.__class__ is batch_invariant.__class__ is bool
    ):  # fmt: skip
        extras = (extras, *types(q_len, window, softcap, return_lse, batch_invariant))
    # Where a check only compares, so does this: a bool hashes at once.
    device, kv_dtype = q.device, k_cache.dtype
    return (
        q.shape, q.stride(), q.dtype, device,
        k_cache.shape, k_cache.stride(), kv_dtype, k_cache.device == device,
        v_cache.shape, v_cache.stride(), v_cache.dtype is kv_dtype, v_cache.device == device,
        seq_lens.shape, seq_lens.is_contiguous(), seq_lens.dtype is _INDEX, seq_lens.device == device,
        block_tables.shape, block_tables.stride(), block_tables.dtype is _INDEX, block_tables.device == device,
        q_len, kv_layout, number(scale), softcap, window, return_lse, batch_invariant, extras,
        _grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad),
    )  # fmt: skip


class FlashPrefill(Protocol):
    """Type of `backend.flash_prefill`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        max_q_len: int,
        seq_lens: Tensor | None = None,
        block_tables: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        causal: bool = True,
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
        batch_invariant: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of long blocks of query tokens, against a paged cache or packed keys.

        Arguments not listed mean what they mean in `flash_decode`.

        Args:
            q: (T, H, D), packed by `cu_seqlens_q`.
            k: paged keys when `block_tables` is given, else (Tk, Hkv, D) packed by `cu_seqlens_k`.
            v: values likewise, with head dim Dv.
            cu_seqlens_q: (B+1,) int32; rows from `cu_seqlens_q[B]` on are padding.
            max_q_len: no block of query tokens is longer.
            seq_lens: (B,) int32 keys of each sequence, new tokens included; with `block_tables` only.
            block_tables: (B, max_pages) int32; exactly one of it and `cu_seqlens_k` is given.
            cu_seqlens_k: (B+1,) int32 offsets of packed keys; scales per token then have shape (Tk, Hkv).
            causal: row i of a block of n stands at `p = S - n + i` and sees `j <= p`; False: all keys (a window then
                still bounds the past, and the ALiBi distance is `|p - j|`; a tree mask is refused).

        Returns:
            out (T, H, Dv) or (out, lse), as in `flash_decode`.

        Raises:
            ArgumentError: as in `flash_decode`.
        """


def _flash_prefill_signature(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    max_q_len,
    seq_lens=None,
    block_tables=None,
    cu_seqlens_k=None,
    causal=True,
    kv_layout="NHD",
    scale=None,
    softcap=0.0,
    window=None,
    alibi_slopes=None,
    sinks=None,
    tree_mask=None,
    k_scale=None,
    v_scale=None,
    out=None,
    lse=None,
    return_lse=False,
    batch_invariant=False,
):
    return (
        facts(q), facts(k), facts(v), facts(cu_seqlens_q), facts(seq_lens), facts(block_tables), facts(cu_seqlens_k),
        max_q_len, causal, kv_layout, number(scale), softcap, window, return_lse, batch_invariant,
        types(max_q_len, causal, softcap, window, return_lse, batch_invariant),
        facts(alibi_slopes), facts(sinks), facts(tree_mask), scale_facts(k_scale), scale_facts(v_scale), facts(out), facts(lse),
        _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
    )  # fmt: skip


class MergeStates(Protocol):
    """Type of `backend.merge_states`."""

    def __call__(
        self,
        out_a: Tensor,
        lse_a: Tensor,
        out_b: Tensor,
        lse_b: Tensor,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Merge two attention results over disjoint sets of keys into the result over their union.

        `out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)`, in fp32 inside (FlashInfer's merge of
        attention states). Parts are computed without sinks; the last merge adds them.

        Args:
            out_a: (T, H, Dv) fp32, fp16 or bf16.
            lse_a: (T, H) fp32, natural logarithm. -inf or +inf means empty; the part's `out` is then not looked at.
            out_b: (T, H, Dv), the dtype of `out_a`.
            lse_b: (T, H) fp32.
            sinks: (H,) fp32; `exp(sink)` joins the denominator.
            out: (T, H, Dv) in the dtype of `out_a` or fp32; may be `out_a` or `out_b`.
            lse: (T, H) fp32; may be `lse_a` or `lse_b`.

        Returns:
            (out, lse). Two empty parts give exactly 0 and -inf, with sinks too.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _merge_states_signature(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
    return (
        out_a.shape, out_a.stride(), out_a.dtype, out_a.device,
        lse_a.shape, lse_a.stride(), lse_a.dtype, lse_a.device,
        out_b.shape, out_b.stride(), out_b.dtype, out_b.device,
        lse_b.shape, lse_b.stride(), lse_b.dtype, lse_b.device,
        sinks if sinks is None else facts(sinks),
        out if out is None else facts(out),
        lse if lse is None else facts(lse),
        _grad_enabled() and (out_a.requires_grad or out_b.requires_grad or lse_a.requires_grad or lse_b.requires_grad),
    )  # fmt: skip


class PlanDecode(Protocol):
    """Type of `backend.plan_decode`."""

    def __call__(
        self,
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
        """Partition the work of `flash_decode` evenly, once per step, for all layers with the same facts.

        The plan is an opaque object of fixed size on the device, valid until lengths change. It steers speed only:
        leaving it out, or passing a stale or foreign one, changes no result beyond rounding.

        Args:
            seq_lens: (B,) int32.
            num_heads: H.
            num_kv_heads: Hkv.
            head_dim: D.
            head_dim_v: Dv; default D.
            page_size: P.
            max_seq_len: `block_tables.shape[1] * page_size` of the calls.
            q_len: as in the calls.
            cu_seqlens_q: as in the calls.
            window: as in the calls.
            kv_dtype: dtype of the caches; None means that of q.
            batch_invariant: as in the calls.
            out: a plan of the same facts, made by the same backend, to refresh in place (capturable in a CUDA graph).

        Returns:
            The plan; `out` itself if given.

        Raises:
            ArgumentError: an argument is outside this contract, or `out` has other facts.
        """


def _plan_decode_signature(
    seq_lens,
    *,
    num_heads,
    num_kv_heads,
    head_dim,
    head_dim_v=None,
    page_size,
    max_seq_len,
    q_len=1,
    cu_seqlens_q=None,
    window=None,
    kv_dtype=None,
    batch_invariant=False,
    out=None,
):
    return (
        seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device, num_heads, num_kv_heads, head_dim, head_dim_v, page_size,
        max_seq_len, q_len, facts(cu_seqlens_q), window, kv_dtype, batch_invariant, out if out is None else out.token,
        types(num_heads, num_kv_heads, head_dim, head_dim_v, page_size, max_seq_len, q_len, window, batch_invariant),
    )  # fmt: skip


FLASH_DECODE = Op(
    "flash_decode",
    FlashDecode,
    _flash_decode_signature,
    check=checks.check_flash_decode,
    meta=checks.meta_flash_decode,
    check_values=values.check_flash_decode_values,
)
FLASH_PREFILL = Op(
    "flash_prefill",
    FlashPrefill,
    _flash_prefill_signature,
    check=checks.check_flash_prefill,
    meta=checks.meta_flash_prefill,
    check_values=values.check_flash_prefill_values,
)
MERGE_STATES = Op(
    "merge_states",
    MergeStates,
    _merge_states_signature,
    check=checks.check_merge_states,
    meta=checks.meta_merge_states,
)
PLAN_DECODE = Op(
    "plan_decode",
    PlanDecode,
    _plan_decode_signature,
    check=checks.check_plan_decode,
    meta=checks.meta_plan_decode,
    check_values=values.check_plan_decode_values,
)
