"""Checks, facts and output shapes of the attention family (the contracts are in `hal.ops.attention`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.ops.checks import FLOATS, QUANTISED, Checker
from hal.ops.layouts import CacheFacts, check_caches, check_scale, token_scale_shape
from hal.ops.op import Arguments, TensorMeta
from hal.ops.plan import DecodePlan, PlanFacts

__all__ = [
    "AttentionCall",
    "MergeCall",
    "PlanCall",
    "check_flash_decode",
    "check_flash_prefill",
    "check_merge_states",
    "check_plan_decode",
    "meta_flash_decode",
    "meta_flash_prefill",
    "meta_merge_states",
    "meta_plan_decode",
]

_INDEX = (torch.int32,)
_SCALE_DTYPES = (torch.float32,)
#: Positions are int32.
_MOST_KEYS = 2**31 - 1


@dataclass(frozen=True)
class AttentionCall:
    """What a gate sees of a `flash_decode` or `flash_prefill` call.

    Attributes:
        op: name of the op.
        dtype: dtype of q.
        kv_dtype: dtype of K and V, quantised or not.
        out_dtype: dtype of the output.
        tokens: T. sequences: B. num_heads: H. num_kv_heads: Hkv. head_dim: D. head_dim_v: Dv.
        page_size: P; 0 for packed keys. max_seq_len: declared maximum of keys of a sequence.
        q_len: tokens of each block; None if they vary.
        kv_layout: layout of the caches; "PACKED" for packed keys.
        causal: False only for a non-causal prefill.
        features: the optional arguments in use: softcap, window, alibi_slopes, sinks, tree_mask, lse, plan,
            batch_invariant, k_scale, v_scale.
        k_scale, v_scale: None, "scalar", "head" or "token".
        q_strides, k_strides, v_strides: in elements.
    """

    op: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    out_dtype: torch.dtype
    tokens: int
    sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    max_seq_len: int
    q_len: int | None
    kv_layout: str
    causal: bool
    features: frozenset[str]
    k_scale: str | None
    v_scale: str | None
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]


@dataclass(frozen=True)
class MergeCall:
    """What a gate sees of a `merge_states` call."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    num_heads: int
    head_dim_v: int


@dataclass(frozen=True)
class PlanCall:
    """What a gate sees of a `plan_decode` call."""

    facts: PlanFacts


def _check_query(check: Checker, q: Tensor) -> None:
    check.tensor("q", q, dtypes=FLOATS)
    if q.dim() != 3:
        raise check.fail("q", f"has shape {tuple(q.shape)}", "(T, H, D), three dimensions", "Use q.reshape(-1, H, D).")


def _check_dims(check: Checker, q: Tensor, kv_heads: int, head_dim: int, head_dim_v: int, k_name: str, v_name: str) -> None:
    heads, dim = q.shape[1], q.shape[2]
    if head_dim != dim:
        raise check.fail(k_name, f"has head dim {head_dim}", f"the head dim of `q`, {dim}")
    _check_head_dims(check, dim, head_dim_v, "q", v_name)
    if heads < 1 or heads % kv_heads:
        raise check.fail("q", f"has {heads} heads", f"a multiple of the {kv_heads} kv heads")


def _check_head_dims(check: Checker, dim: int, dim_v: int, q_name: str, v_name: str) -> None:
    if (dim, dim_v) == (576, 512):
        return
    for argument, value in ((q_name, dim), (v_name, dim_v)):
        if value % 8 or not 16 <= value <= 256:
            raise check.fail(argument, f"has head dim {value}", "a multiple of 8 in 16..256, or 576 with 512 for V")


def _check_cu(check: Checker, argument: str, cu: Tensor, sequences: int) -> None:
    check.tensor(argument, cu, shape=(sequences + 1,), axes="(B+1,)", dtypes=_INDEX)


def _check_extras(check: Checker, a: Arguments, tokens: int, heads: int, head_dim_v: int, longest: int | None) -> frozenset[str]:
    """Check the keywords that decode and prefill share, and return the features in use."""
    used: set[str] = set()
    check.no_grad(alibi_slopes=a.alibi_slopes, sinks=a.sinks, k_scale=a.k_scale, v_scale=a.v_scale, lse=a.lse)
    if a.scale is not None:
        check.number("scale", a.scale)
    if check.number("softcap", a.softcap, least=0.0):
        used.add("softcap")
    if a.window is not None:
        check.integer("window", a.window, least=1, most=_MOST_KEYS)
        used.add("window")
    for name in ("alibi_slopes", "sinks"):
        if getattr(a, name) is not None:
            check.tensor(name, getattr(a, name), shape=(heads,), axes="(H,)", dtypes=_SCALE_DTYPES)
            used.add(name)
    if a.tree_mask is not None:
        check.tensor("tree_mask", a.tree_mask, shape=(tokens, None), axes="(T, Q)", dtypes=(torch.bool,))
        if longest is not None and a.tree_mask.shape[1] < longest:
            raise check.fail("tree_mask", f"has {a.tree_mask.shape[1]} columns", f"at least the longest block, {longest}")
        used.add("tree_mask")
    check.output("out", a.out, shape=(tokens, heads, head_dim_v), axes="(T, H, Dv)", dtypes=tuple({a.q.dtype, torch.float32}))
    check.output("lse", a.lse, shape=(tokens, heads), axes="(T, H)", dtypes=(torch.float32,))
    if check.flag("return_lse", a.return_lse) or a.lse is not None:
        used.add("lse")
    if check.flag("batch_invariant", a.batch_invariant):
        used.add("batch_invariant")
    return frozenset(used)


def _scales(check: Checker, a: Arguments, dtype: torch.dtype, kv_heads: int, token_shape: tuple[int, ...]) -> tuple[str | None, str | None]:
    return (
        check_scale(check, "k_scale", a.k_scale, dtype, kv_heads, token_shape),
        check_scale(check, "v_scale", a.v_scale, dtype, kv_heads, token_shape),
    )


def check_flash_decode(a: Arguments) -> AttentionCall:
    """Check a `flash_decode` call and return what gates look at."""
    check = Checker("flash_decode", a.q.device)
    _check_query(check, a.q)
    check.no_grad(q=a.q, k_cache=a.k_cache, v_cache=a.v_cache)
    caches = check_caches(check, a.k_cache, a.v_cache, a.kv_layout, a.q.dtype)
    _check_dims(check, a.q, caches.num_kv_heads, caches.head_dim, caches.head_dim_v, "k_cache", "v_cache")
    tokens, heads = a.q.shape[0], a.q.shape[1]
    check.tensor("seq_lens", a.seq_lens, shape=(None,), axes="(B,)", dtypes=_INDEX)
    sequences = a.seq_lens.shape[0]
    check.tensor("block_tables", a.block_tables, shape=(sequences, None), axes="(B, max_pages)", dtypes=_INDEX)
    q_len: int | None = check.integer("q_len", a.q_len, least=1)
    if a.cu_seqlens_q is None:
        if tokens != sequences * q_len:
            raise check.fail("q", f"has {tokens} rows", f"B * q_len = {sequences} * {q_len} rows", "Pass q_len or cu_seqlens_q.")
    else:
        q_len = None
        _check_cu(check, "cu_seqlens_q", a.cu_seqlens_q, sequences)
    used = _check_extras(check, a, tokens, heads, caches.head_dim_v, q_len)
    kinds = _scales(check, a, a.k_cache.dtype, caches.num_kv_heads, token_scale_shape(a.kv_layout, caches))
    max_seq_len = a.block_tables.shape[1] * caches.page_size
    if a.plan is not None:
        _check_plan(check, a, caches, max_seq_len)
        used |= {"plan"}
    return _call("flash_decode", a, tokens, sequences, caches, a.k_cache, a.v_cache, max_seq_len, q_len, a.kv_layout, True, used, kinds)


def _call(
    op: str,
    a: Arguments,
    tokens: int,
    sequences: int,
    caches: CacheFacts,
    k: Tensor,
    v: Tensor,
    max_seq_len: int,
    q_len: int | None,
    layout: str,
    causal: bool,
    used: frozenset[str],
    kinds: tuple[str | None, str | None],
) -> AttentionCall:
    used |= {name for name, kind in zip(("k_scale", "v_scale"), kinds, strict=True) if kind}
    return AttentionCall(
        op=op,
        dtype=a.q.dtype,
        kv_dtype=k.dtype,
        out_dtype=a.q.dtype if a.out is None else a.out.dtype,
        tokens=tokens,
        sequences=sequences,
        num_heads=a.q.shape[1],
        num_kv_heads=caches.num_kv_heads,
        head_dim=caches.head_dim,
        head_dim_v=caches.head_dim_v,
        page_size=caches.page_size,
        max_seq_len=max_seq_len,
        q_len=q_len,
        kv_layout=layout,
        causal=causal,
        features=used,
        k_scale=kinds[0],
        v_scale=kinds[1],
        q_strides=a.q.stride(),
        k_strides=k.stride(),
        v_strides=v.stride(),
    )


def _check_plan(check: Checker, a: Arguments, caches: CacheFacts, max_seq_len: int) -> None:
    if not isinstance(a.plan, DecodePlan):
        raise check.fail("plan", f"is {type(a.plan).__name__}", "the result of plan_decode, or None")
    made, now = (
        a.plan.facts,
        PlanFacts.of(
            a.seq_lens,
            num_heads=a.q.shape[1],
            num_kv_heads=caches.num_kv_heads,
            head_dim=caches.head_dim,
            head_dim_v=caches.head_dim_v,
            page_size=caches.page_size,
            max_seq_len=max_seq_len,
            q_len=a.q_len,
            cu_seqlens_q=a.cu_seqlens_q,
            window=a.window,
            kv_dtype=a.k_cache.dtype,
            batch_invariant=a.batch_invariant,
        ),
    )
    if made != now:
        differing = [f"{k}={v!r} (the call has {getattr(now, k)!r})" for k, v in vars(made).items() if getattr(now, k) != v]
        raise check.fail("plan", "was made for " + ", ".join(differing), "a plan of the same facts", "Call plan_decode again.")


def check_flash_prefill(a: Arguments) -> AttentionCall:
    """Check a `flash_prefill` call and return what gates look at."""
    check = Checker("flash_prefill", a.q.device)
    _check_query(check, a.q)
    check.no_grad(q=a.q, k=a.k, v=a.v)
    check.tensor("cu_seqlens_q", a.cu_seqlens_q, shape=(None,), axes="(B+1,)", dtypes=_INDEX)
    sequences = a.cu_seqlens_q.shape[0] - 1
    if sequences < 0:
        raise check.fail("cu_seqlens_q", "is empty", "B+1 offsets, the first 0")
    check.integer("max_q_len", a.max_q_len, least=0)
    check.flag("causal", a.causal)
    if not a.causal and a.tree_mask is not None:
        raise check.fail("tree_mask", "is given", "None with causal=False: a tree mask replaces causality")
    if (a.block_tables is None) == (a.cu_seqlens_k is None):
        found = "are both given" if a.block_tables is not None else "are both None"
        raise check.fail("block_tables", f"and `cu_seqlens_k` {found}", "exactly one: paged caches or packed keys")
    if a.block_tables is not None:
        caches = check_caches(check, a.k, a.v, a.kv_layout, a.q.dtype, "k", "v")
        if a.seq_lens is None:
            raise check.fail("seq_lens", "is None", "(B,) int32 with block_tables")
        check.tensor("seq_lens", a.seq_lens, shape=(sequences,), axes="(B,)", dtypes=_INDEX)
        check.tensor("block_tables", a.block_tables, shape=(sequences, None), axes="(B, max_pages)", dtypes=_INDEX)
        token_shape: tuple[int, ...] = token_scale_shape(a.kv_layout, caches)
        layout, max_seq_len = a.kv_layout, a.block_tables.shape[1] * caches.page_size
    else:
        caches, token_shape = _check_packed(check, a, sequences)
        layout, max_seq_len = "PACKED", a.k.shape[0]
    _check_dims(check, a.q, caches.num_kv_heads, caches.head_dim, caches.head_dim_v, "k", "v")
    tokens, heads = a.q.shape[0], a.q.shape[1]
    used = _check_extras(check, a, tokens, heads, caches.head_dim_v, a.max_q_len)
    kinds = _scales(check, a, a.k.dtype, caches.num_kv_heads, token_shape)
    return _call("flash_prefill", a, tokens, sequences, caches, a.k, a.v, max_seq_len, None, layout, a.causal, used, kinds)


def _check_packed(check: Checker, a: Arguments, sequences: int) -> tuple[CacheFacts, tuple[int, ...]]:
    allowed = (a.q.dtype, *QUANTISED)
    check.tensor("k", a.k, shape=(None, None, None), axes="(Tk, Hkv, D)", dtypes=allowed)
    check.tensor("v", a.v, shape=(a.k.shape[0], a.k.shape[1], None), axes="(Tk, Hkv, Dv)", dtypes=(a.k.dtype,))
    if a.k.shape[1] < 1:
        raise check.fail("k", f"has shape {tuple(a.k.shape)}", "at least one kv head")
    if a.seq_lens is not None:
        raise check.fail("seq_lens", "is given", "None with packed keys: cu_seqlens_k has the lengths")
    if a.kv_layout != "NHD":
        raise check.fail("kv_layout", f"is {a.kv_layout!r}", "'NHD' with packed keys")
    _check_cu(check, "cu_seqlens_k", a.cu_seqlens_k, sequences)
    return CacheFacts(0, 0, a.k.shape[1], a.k.shape[2], a.v.shape[2], 0), (a.k.shape[0], a.k.shape[1])


def check_merge_states(a: Arguments) -> MergeCall:
    """Check a `merge_states` call and return what gates look at."""
    check = Checker("merge_states", a.out_a.device)
    check.tensor("out_a", a.out_a, shape=(None, None, None), axes="(T, H, Dv)", dtypes=FLOATS)
    tokens, heads, dim = a.out_a.shape
    check.tensor("out_b", a.out_b, shape=(tokens, heads, dim), axes="(T, H, Dv)", dtypes=(a.out_a.dtype,))
    for name in ("lse_a", "lse_b"):
        check.tensor(name, getattr(a, name), shape=(tokens, heads), axes="(T, H)", dtypes=_SCALE_DTYPES, last_contiguous=False)
    check.no_grad(out_a=a.out_a, lse_a=a.lse_a, out_b=a.out_b, lse_b=a.lse_b, sinks=a.sinks, lse=a.lse)
    if a.sinks is not None:
        check.tensor("sinks", a.sinks, shape=(heads,), axes="(H,)", dtypes=_SCALE_DTYPES)
    check.output("out", a.out, shape=(tokens, heads, dim), axes="(T, H, Dv)", dtypes=tuple({a.out_a.dtype, torch.float32}))
    check.output("lse", a.lse, shape=(tokens, heads), axes="(T, H)", dtypes=_SCALE_DTYPES)
    return MergeCall(a.out_a.dtype, a.out_a.dtype if a.out is None else a.out.dtype, heads, dim)


def check_plan_decode(a: Arguments) -> PlanCall:
    """Check a `plan_decode` call and return what gates look at."""
    check = Checker("plan_decode", a.seq_lens.device)
    check.tensor("seq_lens", a.seq_lens, shape=(None,), axes="(B,)", dtypes=_INDEX)
    sequences = a.seq_lens.shape[0]
    for name in ("num_heads", "num_kv_heads", "page_size"):
        check.integer(name, getattr(a, name), least=1)
    check.integer("max_seq_len", a.max_seq_len, least=0)
    check.integer("head_dim", a.head_dim, least=1)
    head_dim_v = a.head_dim if a.head_dim_v is None else check.integer("head_dim_v", a.head_dim_v, least=1)
    _check_head_dims(check, a.head_dim, head_dim_v, "head_dim", "head_dim_v")
    if a.num_heads % a.num_kv_heads:
        raise check.fail("num_heads", f"is {a.num_heads}", f"a multiple of the {a.num_kv_heads} kv heads")
    check.integer("q_len", a.q_len, least=1)
    if a.cu_seqlens_q is not None:
        _check_cu(check, "cu_seqlens_q", a.cu_seqlens_q, sequences)
    if a.window is not None:
        check.integer("window", a.window, least=1, most=_MOST_KEYS)
    if a.kv_dtype is not None and a.kv_dtype not in (*FLOATS, *QUANTISED):
        raise check.fail("kv_dtype", f"is {a.kv_dtype}", "a dtype of KV caches, or None")
    check.flag("batch_invariant", a.batch_invariant)
    facts = PlanFacts.of(**{name: value for name, value in vars(a).items() if name != "out"})
    if a.out is not None and not isinstance(a.out, DecodePlan):
        raise check.fail("out", f"is {type(a.out).__name__}", "the result of plan_decode, or None")
    if a.out is not None and a.out.facts != facts:
        raise check.fail("out", f"is a plan for {a.out.facts}", "a plan of the same facts", "Leave it out to make a new plan.")
    return PlanCall(facts)


def meta_flash_decode(a: Arguments) -> tuple[TensorMeta, ...]:
    """Outputs of `flash_decode`."""
    head_dim_v = a.v_cache.shape[2 if a.kv_layout == "SPLIT_V0" else 3]
    return _meta_attention(a, head_dim_v)


def meta_flash_prefill(a: Arguments) -> tuple[TensorMeta, ...]:
    """Outputs of `flash_prefill`."""
    return _meta_attention(a, a.v.shape[2] if a.kv_layout == "SPLIT_V0" and a.block_tables is not None else a.v.shape[-1])


def _meta_attention(a: Arguments, head_dim_v: int) -> tuple[TensorMeta, ...]:
    tokens, heads = a.q.shape[:2]
    out = TensorMeta((tokens, heads, head_dim_v), a.q.dtype if a.out is None else a.out.dtype)
    return (out, TensorMeta((tokens, heads), torch.float32)) if a.return_lse else (out,)


def meta_merge_states(a: Arguments) -> tuple[TensorMeta, ...]:
    """Outputs of `merge_states`."""
    dtype = a.out_a.dtype if a.out is None else a.out.dtype
    return TensorMeta(tuple(a.out_a.shape), dtype), TensorMeta(tuple(a.lse_a.shape), torch.float32)


def meta_plan_decode(a: Arguments) -> tuple[TensorMeta, ...]:
    """`plan_decode` returns no tensor."""
    return ()
