"""From a case to the arguments of a call: random data, permuted pages, and poison wherever no call may look."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.conformance.caches import CachePair, filled, make_caches, poison_value, put
from hal.conformance.cases import DTYPES, Attention
from hal.conformance.quantised import QMAX, nearest_codes
from hal.ops.checks import QUANTISED
from hal.ops.layouts import CacheFacts, token_scale_shape

__all__ = ["HUGE_ID", "Built", "Paged", "build_decode", "build_prefill", "strided_slice"]

HUGE_ID = 2**30


@dataclass
class Built:
    """The arguments of a call by name, and the buffers around output views, whose other elements must stay as they are."""

    args: dict[str, Any]
    buffers: dict[str, Tensor] = field(default_factory=dict)


def strided_slice(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: float = math.nan) -> tuple[Tensor, Tensor]:
    """Return a view of `shape` with gaps in every dimension but the last, and the buffer that it lies in."""
    buffer = filled((*(n + 2 for n in shape[:-1]), shape[-1] + 8), fill, dtype, device)
    view = buffer
    for axis, size in enumerate(shape):
        view = view.narrow(axis, 0 if axis == len(shape) - 1 else 1, size)
    return view, buffer


def blocks(case: Attention) -> list[int]:
    """Query tokens of each sequence."""
    return [case.q_len] * len(case.lengths) if isinstance(case.q_len, int) else list(case.q_len)


def _first_key(case: Attention, length: int, block: int) -> int:
    return 0 if case.window is None else max(0, length - block - case.window + 1)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _query(case: Attention, generator: torch.Generator, tokens: int, device: torch.device) -> Tensor:
    heads, dim, dtype = case.heads[0], case.dims[0], DTYPES[case.dtype]
    data = _normal(generator, tokens, heads, dim)
    if case.probe:
        data = torch.zeros_like(data)
    if case.extreme:
        data = torch.full_like(data, 10.0)
    data = data.to(device, dtype)
    if case.q_storage == "packed_qkv":
        buffer = filled((tokens, (heads + 2 * case.heads[1]) * dim), math.nan, dtype, device)
        view = buffer[:, : heads * dim].unflatten(1, (heads, dim))
    elif case.q_storage == "heads_first":
        view = torch.empty(heads, tokens, dim, dtype=dtype, device=device).transpose(0, 1)
    else:
        return data
    view.copy_(data)
    return view


def _keys(case: Attention, generator: torch.Generator, length: int, pages: list[int]) -> tuple[Tensor, Tensor]:
    """Float K and V rows of one sequence, (S, Hkv, D)."""
    kv_heads, (dim, dim_v) = case.heads[1], case.dims
    keys, values = _normal(generator, length, kv_heads, dim), _normal(generator, length, kv_heads, dim_v)
    if case.extreme:
        keys = torch.tensor([500.0, 1000.0, -1000.0])[torch.arange(length) % 3][:, None, None].expand_as(keys) / dim
    if case.probe == "head":
        values = torch.arange(float(kv_heads))[None, :, None].expand_as(values)
    elif case.probe == "position":
        values = torch.arange(float(length))[:, None, None].expand_as(values)
    elif case.probe == "page":
        values = torch.tensor([float(pages[j // case.page]) for j in range(length)])[:, None, None].expand_as(values)
    return keys, values


def _store(rows: Tensor, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """Rows in the dtype of the cache: stored = x / scale."""
    if dtype not in QUANTISED:
        return rows.to(dtype)
    divided = rows.double() / (1.0 if scale is None else scale)
    return nearest_codes(divided, dtype).view(dtype)


def _scale(case: Attention, kind: str | None, factor: float, generator: torch.Generator) -> float | Tensor | None:
    """A float or a CPU tensor; per-token scales are made with their rows."""
    base = factor * 4.0 / QMAX[DTYPES[case.kv]] if case.kv == "int8" else factor
    heads = torch.rand(case.heads[1], generator=generator) * base + base
    tensors = {"0d": torch.tensor(base), "1": torch.tensor([base]), "head": heads}
    return base if kind == "float" else tensors.get(kind or "")


def _token_scales(case: Attention, which: str, rows: Tensor) -> Tensor:
    """Scales per token and head, (S, Hkv): unequal for K and V."""
    limit = 127.0 if case.kv == "int8" else 16.0
    return (rows.abs().amax(dim=-1).clamp_min(1e-3) / limit * (1.0 if which == "k" else 1.25)).float()


def _tree(case: Attention, lengths: list[int], generator: torch.Generator, device: torch.device, tokens: int) -> Tensor:
    """Ancestors-or-self of a random tree per block; columns beyond a block are all true, and must be ignored."""
    wide = max([*lengths, 1])
    mask = torch.ones(tokens, wide + (3 if case.tree == "wide" else 0), dtype=torch.bool)
    row = 0
    for n in lengths:
        block = torch.zeros(n, n, dtype=torch.bool)
        for i in range(n):
            if i:
                parent = {1: 0, 2: 0, 3: 1, 4: 2}.get(i, i - 1) if case.tree != "random" else int(torch.randint(i, (1,), generator=generator))
                block[i] = block[parent]
            block[i, i] = True
        if case.tree == "upper":
            block = block.T.clone()
        mask[row : row + n, :n] = block
        row += n
    return mask.to(device)


def _extras(
    case: Attention, generator: torch.Generator, sizes: list[int], tokens: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Optional arguments that decode and prefill share, and the buffers around `out` and `lse`."""
    heads, dtype = case.heads[0], DTYPES[case.dtype]
    extras: dict[str, Any] = {"return_lse": True, "softcap": case.softcap, "window": case.window, "scale": case.scale}
    if case.alibi:
        extras["alibi_slopes"] = (2.0 ** -torch.arange(1.0, heads + 1)).to(device)
    if case.sinks:
        extras["sinks"] = torch.linspace(-2.0, 4.0, heads).to(device)
    if case.tree:
        extras["tree_mask"] = _tree(case, sizes, generator, device, tokens)
    if case.batch_invariant:
        extras["batch_invariant"] = True
    out_shape, out_dtype = (tokens, heads, case.dims[1]), torch.float32 if case.out == "fp32" else dtype
    buffers: dict[str, Tensor] = {}
    if case.out == "strided":
        extras["out"], buffers["out"] = strided_slice(out_shape, out_dtype, device)
        extras["lse"], buffers["lse"] = strided_slice((tokens, heads), torch.float32, device)
    elif case.out != "new":
        extras["out"] = filled(out_shape, math.nan, out_dtype, device)
        extras["lse"] = filled((tokens, heads), math.nan, torch.float32, device)
    return extras, buffers


@dataclass
class Paged:
    """Caches, the table of their pages, and their scales."""

    pair: CachePair
    table: Tensor
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None


def paged(case: Attention, generator: torch.Generator, sizes: list[int], device: torch.device) -> Paged:
    """Fill the caches of a case slot by slot; `sizes` are its query tokens by sequence."""
    dtype = DTYPES[case.kv or case.dtype]
    needed = [-(-length // case.page) for length in case.lengths]
    pages = sum(needed) + case.spare_pages
    order = torch.randperm(pages, generator=generator).tolist()
    fill = {"nan": poison_value(dtype), "large": 100.0, "zero": 0.0}[case.poison]
    pair = make_caches(case.layout, pages, case.page, case.heads[1], case.dims, dtype, device, case.storage, fill)
    if case.mla:
        pair = CachePair(pair.k, pair.k[..., : case.dims[1]], pair.buffers[:1])
    padding = {"minus_one": -1, "huge": HUGE_ID, "tight": 0, "clean": 0}[case.table]
    width = max([*needed, 0]) + (0 if case.table == "tight" else case.spare_columns)
    table = torch.full((len(needed), width), padding, dtype=torch.int32)
    facts = CacheFacts(pages, case.page, case.heads[1], *case.dims, 0)
    shape = token_scale_shape(case.layout, facts)
    scales: dict[str, Any] = {w: _scale(case, kind, f, generator) for w, kind, f in (("k", case.k_scale, 0.25), ("v", case.v_scale, 0.5))}
    for which, kind in (("k", case.k_scale), ("v", case.v_scale)):
        if kind == "token":
            scales[which] = filled(shape, math.nan, torch.float32, device)
        elif kind == "token_padded":
            scales[which] = filled((shape[0], shape[1] + 2, shape[2]), math.nan, torch.float32, device)[:, : shape[1]]
    for b, length in enumerate(case.lengths):
        mine = [order.pop() for _ in range(needed[b])]
        keys, values = _keys(case, generator, length, mine)
        first = _first_key(case, length, sizes[b])
        for index, page in enumerate(mine):
            outside = (index + 1) * case.page <= first
            table[b, index] = padding if outside and case.table != "tight" else page
        slots = torch.tensor([mine[j // case.page] * case.page + j % case.page for j in range(first, length)], dtype=torch.int64)
        for which, cache, rows in (("k", pair.k, keys[first:]), ("v", pair.v, values[first:])):
            if case.mla and which == "v":
                continue
            scale = scales[which]
            kind = case.k_scale if which == "k" else case.v_scale
            if kind in ("token", "token_padded"):
                row_scale = _token_scales(case, which, rows)
                at = (slots // case.page, slots % case.page) if case.layout == "NHD" else (slots // case.page, slice(None), slots % case.page)
                scale[at] = row_scale.to(device)
                divisor: Any = row_scale.unsqueeze(-1)
            else:
                divisor = scale.unsqueeze(-1) if isinstance(scale, Tensor) and scale.dim() else scale
            put(cache, case.layout, which, slots.to(device), _store(rows, divisor, dtype).to(device))
    moved = {w: s.to(device) if isinstance(s, Tensor) else s for w, s in scales.items()}
    return Paged(pair, table.to(device), moved["k"], moved["v"])


def _offsets(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device)


def build_decode(case: Attention, generator: torch.Generator, device: torch.device, fill: Callable[..., Paged] = paged) -> Built:
    """Return the arguments of the `flash_decode` call that a case describes, its caches filled by `fill`."""
    sizes = blocks(case)
    tokens = sum(sizes) + case.padding
    pages = fill(case, generator, sizes, device)
    extras, buffers = _extras(case, generator, sizes, tokens, device)
    args = {
        "q": _query(case, generator, tokens, device),
        "k_cache": pages.pair.k,
        "v_cache": pages.pair.v,
        "seq_lens": torch.tensor(case.lengths, dtype=torch.int32, device=device),
        "block_tables": pages.table,
        "kv_layout": case.layout,
        "k_scale": pages.k_scale,
        "v_scale": pages.v_scale,
        **extras,
    }
    if isinstance(case.q_len, int):
        args["q_len"] = case.q_len
    else:
        args["cu_seqlens_q"] = _offsets(sizes, device)
    return Built(args, buffers)


def build_prefill(case: Attention, generator: torch.Generator, device: torch.device) -> Built:
    """Return the arguments of the `flash_prefill` call that a case describes: paged, or packed if the case says so."""
    sizes = blocks(case)
    tokens = sum(sizes) + case.padding
    extras, buffers = _extras(case, generator, sizes, tokens, device)
    args = {
        "q": _query(case, generator, tokens, device),
        "cu_seqlens_q": _offsets(sizes, device),
        "max_q_len": max([*sizes, 0]),
        "causal": case.causal,
        **extras,
    }
    if not case.packed:
        pages = paged(case, generator, sizes, device)
        args |= {"k": pages.pair.k, "v": pages.pair.v, "kv_layout": case.layout, "k_scale": pages.k_scale, "v_scale": pages.v_scale}
        args |= {"seq_lens": torch.tensor(case.lengths, dtype=torch.int32, device=device), "block_tables": pages.table}
        return Built(args, buffers)
    return Built(args | _packed(case, generator, sizes, device), buffers)


def _packed(case: Attention, generator: torch.Generator, sizes: list[int], device: torch.device) -> dict[str, Any]:
    """Packed keys by name; rows that no query row sees, and two rows behind the last sequence, are poisoned."""
    dtype, total = DTYPES[case.kv or case.dtype], sum(case.lengths)
    poison = poison_value(dtype) if case.poison == "nan" else 0.0
    args: dict[str, Any] = {"cu_seqlens_k": _offsets(list(case.lengths), device)}
    rows = [_keys(case, generator, length, []) for length in case.lengths]
    for which, kind, factor, index in (("k", case.k_scale, 0.25, 0), ("v", case.v_scale, 0.5, 1)):
        data = torch.cat([r[index] for r in rows]) if rows else torch.zeros(0, case.heads[1], case.dims[index])
        scale: Any = _scale(case, kind, factor, generator)
        if kind in ("token", "token_padded"):
            scale = torch.ones(total + 2, case.heads[1])
            scale[:total] = _token_scales(case, which, data)
        divisor = (scale[:total] if scale.dim() == 2 else scale).unsqueeze(-1) if isinstance(scale, Tensor) and scale.dim() else scale
        stored = filled((total + 2, case.heads[1], case.dims[index]), poison, dtype, torch.device("cpu"))
        width = torch.uint8 if dtype.itemsize == 1 else dtype
        stored.view(width)[:total] = _store(data, divisor, dtype).view(width)
        start = 0
        for length, block in zip(case.lengths, sizes, strict=True):
            unseen = min(length, _first_key(case, length, block))
            stored.view(width)[start : start + unseen] = filled((1,), poison, dtype, torch.device("cpu")).view(width)
            start += length
        args[which] = stored.to(device)
        args[f"{which}_scale"] = scale.to(device) if isinstance(scale, Tensor) else scale
    return args
