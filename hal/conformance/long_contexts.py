"""Long contexts: caches filled on the device in a few operations, and the same float64 judge in whole tensors.

`inputs.py` and `oracle.py` go slot by slot, which is easy to trust but slow; a test compares this module with them. NHD only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.conformance.caches import CachePair, filled, poison_value
from hal.conformance.cases import DTYPES, Attention
from hal.conformance.inputs import HUGE_ID, Built, Paged, build_decode
from hal.conformance.subject import Subject
from hal.ops import OPS

__all__ = ["attention", "build_long", "judge"]

#: Scales of quantised long caches: V's differs from K's.
_SCALES = {"k": 0.25, "v": 0.5}
_PADDING = {"minus_one": -1, "huge": HUGE_ID, "tight": 0, "clean": 0}


def _bytes(cache: Tensor) -> Tensor:
    """The cache itself, or its bytes: torch indexes fp8 only as integers."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    rows = torch.randn(shape, generator=generator, device=generator.device)
    return (rows * 16).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else rows.to(dtype)


def _poison(cache: Tensor, at: tuple[Tensor, ...]) -> None:
    value = filled((1,), poison_value(cache.dtype), cache.dtype, cache.device)
    _bytes(cache)[at] = _bytes(value)[0]


def paged(case: Attention, generator: torch.Generator, sizes: list[int], device: torch.device) -> Paged:
    """Fill the caches of a case: random content, pages in random order, poison in spare pages and behind the last key.

    Pages wholly outside a window keep their content and their entries.
    """
    assert case.layout == "NHD"
    assert case.storage == "compact"
    own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
    dtype, heads = DTYPES[case.kv or case.dtype], case.heads[1]
    needed = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(needed) + case.spare_pages, generator=own, device=device)
    k = _random((len(order), case.page, heads, case.dims[0]), dtype, own)
    v = k[..., : case.dims[1]] if case.mla else _random((len(order), case.page, heads, case.dims[1]), dtype, own)
    width = max([*needed, 0]) + (0 if case.table == "tight" else case.spare_columns)
    table = torch.full((len(needed), width), _PADDING[case.table], dtype=torch.int32, device=device)
    for b, ids in enumerate(order.split([*needed, case.spare_pages])[:-1]):
        table[b, : len(ids)] = ids
    for cache in (k,) if case.mla else (k, v):
        if case.spare_pages:
            _poison(cache, (order[-case.spare_pages :],))
        for b, length in enumerate(case.lengths):
            if length % case.page:
                offsets = torch.arange(length % case.page, case.page, device=device)
                _poison(cache, (table[b, needed[b] - 1].long().expand(len(offsets)), offsets))
    scales = [_SCALES[which] if case.kv and kind else None for which, kind in (("k", case.k_scale), ("v", case.v_scale))]
    return Paged(CachePair(k, v, (k,) if case.mla else (k, v)), table, *scales)


def build_long(case: Attention, generator: torch.Generator, device: torch.device) -> Built:
    """Return the arguments of the `flash_decode` call that a case describes; of scales, only floats."""
    return build_decode(case, generator, device, paged)


def _rows(cache: Tensor, pages: Tensor, length: int, scale: float | None) -> Tensor:
    """(S, Hkv, D) float64 of a sequence."""
    rows = _bytes(cache)[pages.long()].view(cache.dtype).flatten(0, 1)[:length]
    return rows.float().double() * (1.0 if scale is None else scale)


def attention(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return float64 (out, lse) of a `flash_decode` call on NHD caches without a tree mask, given all its arguments by name."""
    assert a["kv_layout"] == "NHD"
    assert a["tree_mask"] is None
    q, k, v = a["q"], a["k_cache"], a["v_cache"]
    counts = [a["q_len"]] * len(a["seq_lens"]) if a["cu_seqlens_q"] is None else a["cu_seqlens_q"].diff().tolist()
    out = torch.zeros(*q.shape[:2], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    first = 0
    for length, ids, count in zip(a["seq_lens"].tolist(), a["block_tables"], counts, strict=True):
        own = slice(first, first + count)
        first += count
        if not length or not count:
            continue
        pages = ids[: -(-length // k.shape[1])]
        keys, values = _rows(k, pages, length, a["k_scale"]), _rows(v, pages, length, a["v_scale"])
        j, p = torch.arange(length, device=q.device), torch.arange(length - count, length, device=q.device)[:, None]
        seen = (j <= p) if a["window"] is None else (j <= p) & (j > p - a["window"])
        seen = seen[:, None, None]  # (rows, 1, 1, keys)
        scores = torch.einsum("ihgd,jhd->ihgj", q[own].double().unflatten(1, (k.shape[2], -1)), keys)
        scores = scores * (q.shape[2] ** -0.5 if a["scale"] is None else a["scale"])
        if a["softcap"]:
            scores = a["softcap"] * torch.tanh(scores / a["softcap"])
        if a["alibi_slopes"] is not None:
            scores = scores - a["alibi_slopes"].double().view(k.shape[2], -1, 1) * (p - j)[:, None, None]
        total = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
        if a["sinks"] is not None:
            total = torch.logaddexp(total, a["sinks"].double().view(k.shape[2], -1))
        weights = torch.where(seen, torch.exp(scores - total[..., None]), 0.0)
        # A value is looked at only where some row sees its key.
        values = torch.where(seen.any(0).view(-1, 1, 1), values, 0.0)
        some = seen.any(-1).view(-1, 1)
        out[own] = torch.where(some[..., None], torch.einsum("ihgj,jhd->ihgd", weights, values).flatten(1, 2), 0.0)
        lse[own] = torch.where(some, total.flatten(1), -math.inf)
    return out, lse


def judge(subject: Subject, args: dict[str, Any], out: Tensor, lse: Tensor) -> None:
    """Compare the results of a `flash_decode` call with float64."""
    expected_out, expected_lse = attention(vars(OPS["flash_decode"].bind((), args)))
    subject.compare(args["q"].dtype, out, expected_out, lse, expected_lse)
