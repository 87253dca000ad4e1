"""Plain attention on a CPU through PyTorch's `scaled_dot_product_attention` on views of the keys.

It serves calls without extras. Keys are read where they are if the pages of a sequence follow one another in the cache
(as an engine lays them out that allocates per sequence) or if keys are packed; other sequences are copied one by one
(`reference_places`). Every view holds exactly the keys that its rows see, so that nothing else is read.
Extra memory: the copies, and 2^20 mask entries (PyTorch holds them once more in fp32, 5 MiB in all) where a mask is
needed: blocks of several rows that have a past or a window.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hal.backends.reference_limits import on_host
from hal.backends.reference_places import MOST_KEYS, Piece, Places, find

__all__ = ["decode", "decode_step", "plain", "prefill"]

#: Whether this torch attends to grouped heads by itself.
_GROUPED = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 5)
#: Query rows that share one mask, and the entries of that mask.
_TILE_ROWS, _MASK_ENTRIES = 256, 2**20


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    softcap: float,
    extras: tuple[object, ...],
    out: Tensor | None,
    return_lse: bool,
    batch_invariant: bool,
) -> bool:
    """Whether this module may serve a call: facts of the arguments, not of the values in them."""
    return (
        on_host(q)
        and q.shape[0] > 0
        and layout == "NHD"
        and k.dtype == q.dtype
        and not (softcap or return_lse or batch_invariant)
        and all(x is None for x in extras)
        and (out is None or out.dtype == q.dtype)
        and k.shape[3] == v.shape[3]
    )


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    q_len: int,
    cu_seqlens_q: Tensor | None,
    scale: float | None,
    window: int | None,
    out: Tensor | None,
) -> Tensor | None:
    """Serve a plain `flash_decode` call, or return None if it is for the general path."""
    if cu_seqlens_q is not None or q_len > 1:
        offsets = range(0, q.shape[0] + 1, q_len) if cu_seqlens_q is None else cu_seqlens_q.tolist()
        lengths = _lengths(seq_lens, block_tables.shape[1] * k_cache.shape[1])
        return _blocks(q, k_cache, v_cache, lengths, block_tables, offsets, scale, window, True, out)
    lengths = _lengths(seq_lens, block_tables.shape[1] * k_cache.shape[1])
    lows = [0] * len(lengths) if window is None else [max(0, s - window) for s in lengths]
    places = find(k_cache, v_cache, block_tables, lows, lengths)
    if places is None:
        return None
    result = _decode_one_by_one(q, places, lows, lengths, scale)
    return result if out is None else out.copy_(result)


def decode_step(q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, block_tables: Tensor, scale: float | None) -> Tensor | None:
    """Serve the common decode step, one token of each sequence and no option, in as few calls as possible.

    Python costs more than the attention of a short context. None unless the sequences are of one length and their
    pages follow one another at even distances in NHD caches, as an engine lays them out that allocates per sequence.
    """
    if not (q.is_cpu and k_cache.dtype == q.dtype and k_cache.is_contiguous() and v_cache.is_contiguous() and q.shape[0]):
        return None
    lengths = seq_lens.tolist()
    pages, page_size, kv_heads, dim = k_cache.shape
    sequences, count, width = len(lengths), lengths[0], block_tables.shape[1]
    if not 0 < count <= min(width * page_size, MOST_KEYS) or lengths.count(count) != sequences or v_cache.shape[3] != dim:
        return None
    columns = -(-count // page_size)
    rows = (block_tables if width <= 2 * columns else block_tables[:, :columns]).tolist()
    first = rows[0][0]
    step = rows[1][0] - first if sequences > 1 else columns
    if first < 0 or step < columns or first + (sequences - 1) * step + columns > pages:
        return None
    for page, row in enumerate(rows):
        if row[:columns] != list(range(first + page * step, first + page * step + columns)):
            return None
    by_slot = kv_heads * dim
    shape, strides = (sequences, kv_heads, count, dim), (step * page_size * by_slot, dim, by_slot, 1)
    key = k_cache.as_strided(shape, strides, k_cache.storage_offset() + first * page_size * by_slot)
    value = v_cache.as_strided(shape, strides, v_cache.storage_offset() + first * page_size * by_slot)
    # The query heads of a group take the place of query rows: each key is read once.
    return scaled_dot_product_attention(q.view(sequences, kv_heads, -1, dim), key, value, scale=scale).reshape(q.shape)


def _window(cache: Tensor, slot: int, count: int, sequences: int, step: int) -> Tensor:
    """View `count` slots of each sequence, `step` slots apart, as (B, Hkv, count, D)."""
    _, by_slot, by_head, by_dim = _strides(cache)
    shape = (sequences, cache.shape[2], count, cache.shape[3])
    return cache.as_strided(shape, (step * by_slot, by_head, by_slot, by_dim), cache.storage_offset() + slot * by_slot)


def _strides(cache: Tensor) -> tuple[int, ...]:
    """Strides with that of the slots in place 1 also where pages have a single slot."""
    by_page, by_slot, by_head, by_dim = cache.stride()
    return by_page, by_page if cache.shape[1] == 1 else by_slot, by_head, by_dim


def _decode_one_by_one(q: Tensor, places: Places, lows: list[int], lengths: list[int], scale: float | None) -> Tensor:
    """One call per piece of a sequence."""
    kv_heads, parts = places.k.shape[2], []
    for index, (low, length) in enumerate(zip(lows, lengths, strict=True)):
        query = q[index : index + 1]
        if low == length:
            parts.append(torch.zeros_like(query))
            continue
        for piece in places.pieces(index):
            key, value = (_window(cache, piece.origin + low, length - low, 1, 0) for cache in (piece.k, piece.v))
            # The query heads of a group take the place of query rows: each key is read once.
            rows = piece.rows_of(query, kv_heads).unflatten(1, (key.shape[1], -1))
            parts.append(scaled_dot_product_attention(rows, key, value, scale=scale).flatten(1, 2))
    return torch.cat(parts, dim=1).view(q.shape)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    tables: Tensor,
    cu_seqlens_q: Tensor,
    most_keys: int,
    scale: float | None,
    window: int | None,
    causal: bool,
    out: Tensor | None,
) -> Tensor | None:
    """Serve a plain `flash_prefill` call, or return None if it is for the general path."""
    return _blocks(q, k, v, _lengths(seq_lens, most_keys), tables, cu_seqlens_q.tolist(), scale, window, causal, out)


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    tables: Tensor,
    offsets: range | list[int],
    scale: float | None,
    window: int | None,
    causal: bool,
    out: Tensor | None,
) -> Tensor | None:
    """One call per tile of rows of each piece of a block; None also for offsets that no checked call has."""
    if scale is not None and scale <= 0.0:
        return None  # PyTorch masks before it scales: a masked score of -inf would become NaN or +inf
    counts = [end - start for start, end in itertools.pairwise(offsets)]
    if min(counts, default=0) < 0 or not 0 <= offsets[0] <= offsets[-1] <= q.shape[0]:
        return None
    lows = [0 if window is None else max(0, s - n - window + 1) for s, n in zip(lengths, counts, strict=True)]
    places = find(k, v, tables, lows, lengths)
    if places is None:
        return None
    if _GROUPED and window is None and out is None and counts and lengths == counts and sum(counts) == q.shape[0]:
        fresh = _fresh_prompts(q, k, v, counts, places.origins, scale, causal)
        if fresh is not None:
            return fresh
    result = torch.zeros_like(q, memory_format=torch.contiguous_format)  # not `out`, which may be q
    for index, (start, n, length) in enumerate(zip(offsets[:-1], counts, lengths, strict=True)):
        if n and length:
            for piece in places.pieces(index):
                rows, part = (piece.rows_of(x[start : start + n], k.shape[2]) for x in (q, result))
                _attend_block(rows, piece, part, length, scale, window, causal)
    return result if out is None else out.copy_(result)


def _fresh_prompts(
    q: Tensor, k: Tensor, v: Tensor, counts: list[int], origins: Sequence[int | None], scale: float | None, causal: bool
) -> Tensor | None:
    """Attend prompts of one length without a past, evenly spaced in the cache, in one call; None for others."""
    sequences, n = len(counts), counts[0]
    slots = [origin for origin in origins if origin is not None]
    step = slots[1] - slots[0] if len(slots) > 1 else 0
    if not n or counts.count(n) != sequences or step < 0 or slots != [slots[0] + i * step for i in range(sequences)]:
        return None
    key, value = (_window(cache, slots[0], n, sequences, step) for cache in (k, v))
    query = q.view(sequences, n, *q.shape[1:]).transpose(1, 2)
    result = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)
    return result.transpose(1, 2).reshape(q.shape)


def _attend_block(q: Tensor, piece: Piece, out: Tensor, length: int, scale: float | None, window: int | None, causal: bool) -> None:
    """Write the attention of a block (n, H, D) over the keys `0 .. length - 1` of a piece of its sequence."""
    n, kv_heads = q.shape[0], piece.k.shape[2]
    base = length - n
    maskless = window is None and (base <= 0 or not causal)  # no past to shift the diagonal: one call
    size = n if maskless else max(1, min(_TILE_ROWS, _MASK_ENTRIES // length))
    first = max(0, -base) if causal else 0  # rows before it stand before key 0 and see nothing
    for start in range(first, n, size):
        end = min(start + size, n)
        low = 0 if window is None else max(0, base + start - window + 1)
        high = min(length, base + end) if causal else length
        mask = None if maskless or end == start + 1 else _mask(base, start, end, low, high, window, causal)
        # Batch = kv heads, heads = their query heads: views with stride 0, no repeated keys.
        query = q[start:end].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        key, value = (
            _window(cache, piece.origin + low, high - low, 1, 0).transpose(0, 1).expand(-1, query.shape[1], -1, -1) for cache in (piece.k, piece.v)
        )
        part = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal and maskless, scale=scale)
        out[start:end].unflatten(1, (kv_heads, -1)).copy_(part.permute(2, 0, 1, 3))


def _mask(base: int, start: int, end: int, low: int, high: int, window: int | None, causal: bool) -> Tensor:
    """Which of the keys `low .. high - 1` the rows `start .. end - 1` see, bool."""
    position, key = torch.arange(base + start, base + end)[:, None], torch.arange(low, high)
    visible = position >= key if causal else None
    if window is None:
        assert visible is not None
        return visible
    recent = key > position - window
    return recent if visible is None else recent.logical_and_(visible)


def _lengths(seq_lens: Tensor, most: int) -> list[int]:
    return [min(max(s, 0), most) for s in seq_lens.tolist()]
