"""The ops in naive float64: slow, independent of every backend, and the judge of them all.

Each function takes the arguments of its op. Order of operations: scale, softcap, bias, mask, softmax with sink, `@ v`.
Keys are gathered one by one through the table; a row only ever looks at the keys that it sees, so poison cannot leak in.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["flash_decode", "flash_prefill", "gather", "merge_states", "page_size", "write_view"]

#: Bytes-wide dtypes that torch indexes only as integers.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def page_size(cache: Tensor, layout: str) -> int:
    """Return P of a K cache."""
    return cache.shape[{"NHD": 1, "HND": 2}.get(layout, 3)]


def write_view(cache: Tensor, layout: str, which: str, page: int, offset: int) -> Tensor:
    """Return the elements of one slot, (Hkv, D) or for a split K (Hkv, D/x, x), as a view of the cache."""
    if layout == "NHD":
        return cache[page, offset]
    if layout == "HND" or (layout == "HND_SPLIT" and which == "v"):
        return cache[page, :, offset]
    return cache[page, :, :, offset]


def gather(cache: Tensor, layout: str, which: str, pages: list[int], scale: float | Tensor | None = None) -> Tensor:
    """Return float64 (S, Hkv, D) of the slots of `pages` in order, dequantised; an id outside the cache gives NaN rows."""
    raw = cache.view(torch.uint8) if cache.dtype in _FP8 else cache
    size = _slots(cache, layout, which)
    rows: list[Tensor | None] = []
    for page in pages:
        for offset in range(size):
            if not 0 <= page < cache.shape[0]:
                rows.append(None)
                continue
            row = write_view(raw, layout, which, page, offset)
            row = row.contiguous().view(cache.dtype) if cache.dtype in _FP8 else row
            heads = row.shape[0]
            row = row.double().reshape(heads, -1)
            rows.append(row * _slot_scale(scale, layout, page, offset, heads))
    width = next((r for r in rows if r is not None), torch.zeros(_heads(cache, layout), 1))
    blank = torch.full(tuple(width.shape), math.nan, dtype=torch.float64, device=cache.device)
    return torch.stack([blank if r is None else r for r in rows]) if rows else blank.new_zeros((0, *blank.shape))


def _slots(cache: Tensor, layout: str, which: str) -> int:
    if layout == "SPLIT_V0" and which == "v":
        return cache.shape[3]
    if layout == "HND_SPLIT" and which == "v":
        return cache.shape[2]
    return page_size(cache, layout)


def _heads(cache: Tensor, layout: str) -> int:
    return cache.shape[2 if layout == "NHD" else 1]


def _slot_scale(scale: float | Tensor | None, layout: str, page: int, offset: int, heads: int) -> Any:
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        return float(scale)
    if scale.dim() <= 1:
        return scale.double().reshape(-1, 1)
    row = scale[page, offset] if layout == "NHD" else scale[page, :, offset]
    return row.double().reshape(heads, 1)


def _visible(position: int, length: int, window: int | None, causal: bool) -> list[int]:
    first = 0 if window is None else max(0, position - window + 1)
    last = position if causal else length - 1
    return list(range(first, min(last, length - 1) + 1))


def _block(q: Tensor, keys: Tensor, values: Tensor, valid: list[bool], a: dict[str, Any], tree: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of one block of query tokens against the keys of its sequence."""
    n, heads, dim = q.shape
    length, group = keys.shape[0], heads // keys.shape[1]
    scale = dim**-0.5 if a["scale"] is None else a["scale"]
    out = torch.zeros(n, heads, values.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((n, heads), -math.inf, dtype=torch.float64, device=q.device)
    depth = None if tree is None else [max(0, int(tree[i, :n].sum()) - 1) for i in range(n)]
    start = length - n
    for i in range(n):
        position = start + (i if depth is None else depth[i])
        where = {j: j if depth is None or j < start else start + depth[j - start] for j in range(max(0, length))}
        if tree is None:
            seen = _visible(position, length, a["window"], a["causal"])
        else:
            seen = [j for j in range(length) if j < start or bool(tree[i, j - start])]
            if a["window"] is not None:
                seen = [j for j in seen if where[j] >= position - a["window"] + 1]
        seen = [j for j in seen if valid[j]]
        if not seen:
            continue
        at = torch.tensor(seen, device=q.device)
        scores = torch.einsum("hgd,nhd->hgn", q[i].double().unflatten(0, (-1, group)), keys[at]).flatten(0, 1) * scale
        if a["softcap"]:
            scores = a["softcap"] * torch.tanh(scores / a["softcap"])
        if a["alibi_slopes"] is not None:
            distance = torch.tensor([abs(position - where[j]) if not a["causal"] else position - where[j] for j in seen], device=q.device)
            scores = scores - a["alibi_slopes"].double()[:, None] * distance.double()
        top = scores.amax(dim=1, keepdim=True)
        if a["sinks"] is not None:
            top = torch.maximum(top, a["sinks"].double()[:, None])
        weights = torch.exp(scores - top)
        total = weights.sum(dim=1, keepdim=True)
        if a["sinks"] is not None:
            total = total + torch.exp(a["sinks"].double()[:, None] - top)
        out[i] = torch.einsum("hgn,nhd->hgd", (weights / total).unflatten(0, (-1, group)), values[at]).flatten(0, 1)
        lse[i] = (top + total.log()).squeeze(1)
    return out, lse


def _paged(a: dict[str, Any], b: int, k_name: str, v_name: str) -> tuple[Tensor, Tensor, list[bool]]:
    """Keys, values and validity of sequence b; a length below 0 acts as 0, one beyond the table as the table's."""
    size = page_size(a[k_name], a["kv_layout"])
    table = a["block_tables"][b].tolist()
    length = min(max(0, int(a["seq_lens"][b])), len(table) * size)
    pages = table[: -(-length // size)]
    keys = gather(a[k_name], a["kv_layout"], "k", pages, a["k_scale"])[:length]
    values = gather(a[v_name], a["kv_layout"], "v", pages, a["v_scale"])[:length]
    count = a[k_name].shape[0]
    return keys, values, [0 <= pages[j // size] < count for j in range(length)]


def _packed(a: dict[str, Any], b: int) -> tuple[Tensor, Tensor, list[bool]]:
    first, last = int(a["cu_seqlens_k"][b]), int(a["cu_seqlens_k"][b + 1])
    keys, values = (
        _dequantise_rows(a[name][first:last], scale if not isinstance(scale, Tensor) or scale.dim() < 2 else scale[first:last])
        for name, scale in (("k", a["k_scale"]), ("v", a["v_scale"]))
    )
    return keys, values, [True] * (last - first)


def _dequantise_rows(rows: Tensor, scale: float | Tensor | None) -> Tensor:
    values = rows.double()
    if scale is None:
        return values
    return values * (scale.double().unsqueeze(-1) if isinstance(scale, Tensor) and scale.dim() else scale)


def _attention(a: dict[str, Any], cu: list[int], paged: tuple[str, str] | None) -> tuple[Tensor, Tensor]:
    q = a["q"]
    head_dim_v = _head_dim_v(a, paged)
    out = torch.zeros(q.shape[0], q.shape[1], head_dim_v, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    for b in range(len(cu) - 1):
        first, last = cu[b], cu[b + 1]
        if first == last:
            continue
        keys, values, valid = _paged(a, b, *paged) if paged else _packed(a, b)
        tree = None if a["tree_mask"] is None else a["tree_mask"][first:last]
        if keys.shape[0]:
            out[first:last], lse[first:last] = _block(q[first:last], keys, values, valid, a, tree)
    return out, lse


def _head_dim_v(a: dict[str, Any], paged: tuple[str, str] | None) -> int:
    if paged is None:
        return a["v"].shape[2]
    return a[paged[1]].shape[2 if a["kv_layout"] == "SPLIT_V0" else 3]


def flash_decode(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return float64 (out, lse) of a `flash_decode` call, given all its arguments by name."""
    cu = [b * a["q_len"] for b in range(a["seq_lens"].shape[0] + 1)] if a["cu_seqlens_q"] is None else a["cu_seqlens_q"].tolist()
    return _attention({**a, "causal": True}, cu, ("k_cache", "v_cache"))


def flash_prefill(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return float64 (out, lse) of a `flash_prefill` call, given all its arguments by name."""
    return _attention(a, a["cu_seqlens_q"].tolist(), ("k", "v") if a["block_tables"] is not None else None)


def merge_states(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return float64 (out, lse) of a `merge_states` call, given all its arguments by name."""
    tokens, heads, _ = a["out_a"].shape
    out = torch.zeros_like(a["out_a"], dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=out.device)
    for t in range(tokens):
        for h in range(heads):
            parts = [(float(a[f"lse_{s}"][t, h]), a[f"out_{s}"][t, h].double()) for s in "ab"]
            parts = [(weight, value) for weight, value in parts if math.isfinite(weight)]
            if not parts:
                continue
            logs = [weight for weight, _ in parts] + ([] if a["sinks"] is None else [float(a["sinks"][h])])
            top = max(logs)
            total = sum(math.exp(x - top) for x in logs)
            out[t, h] = sum((math.exp(weight - top) / total * value for weight, value in parts), torch.zeros_like(out[t, h]))
            lse[t, h] = top + math.log(total)
    return out, lse
