"""`flash_decode` and `flash_prefill` of the reference backend.

Two paths. Plain calls on a CPU run PyTorch's own attention on views of the keys (`reference_views`), which lie in the
cache or in a copy of one sequence. All others gather the keys chunk by chunk into an online softmax (`reference_core`).

Memory of the general path, whatever the size of the cache: tiles of query rows and chunks of keys are cut so that a
gathered chunk of K and V, and a tile of scores, hold at most 2^19 fp32 values each (2 MiB; 64 MiB on accelerators, which
want few launches), or one key if that alone is more. With temporaries a step takes below 8 times that. Outputs are held
once more in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.backends import reference_views as views
from hal.backends.reference_core import Rows, Scoring, attend
from hal.backends.reference_keys import Keys
from hal.backends.reference_limits import limits, on_host
from hal.ops.plan import DecodePlan

__all__ = ["flash_decode", "flash_prefill"]

#: Groups of a batch-invariant tile. Matrix products of one shape give one result; other shapes may round otherwise.
_INVARIANT_GROUPS = 8


@dataclass(frozen=True)
class _Blocks:
    """The blocks of query tokens of B sequences, int64 (B,): where each starts in q, its rows, and the keys of its sequence."""

    first: Tensor
    count: Tensor
    length: Tensor

    def of_rows(self, row: Tensor) -> Tensor:
        """Return the sequence of each row of q; padding rows count to the last one."""
        return torch.searchsorted(self.first + self.count, row, right=True).clamp_max(self.first.shape[0] - 1)

    def rows(self, sequence: Tensor, place: Tensor, tokens: int) -> Rows:
        """Return the tile of rows `place` (N, R) of the blocks `sequence` (N,)."""
        first, count, length = (x.index_select(0, sequence) for x in (self.first, self.count, self.length))
        token = first[:, None] + place
        live = (place >= 0) & (place < count[:, None]) & (token >= 0) & (token < tokens)
        return Rows(token.masked_fill(~live, tokens), place, sequence, first, length - count, length)


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
    """Attend a few query tokens per sequence to a paged cache; the contract is `hal.ops.attention.FlashDecode`."""
    if (
        q_len == 1
        and kv_layout == "NHD"
        and (cu_seqlens_q is window is alibi_slopes is sinks is tree_mask is k_scale is v_scale is out is lse is None)
        and not (softcap or return_lse or batch_invariant)
    ):
        done = views.decode_step(q, k_cache, v_cache, seq_lens, block_tables, scale)
        if done is not None:
            return done
    extras = (alibi_slopes, sinks, tree_mask, k_scale, v_scale, lse)
    if views.plain(q, k_cache, v_cache, kv_layout, softcap, extras, out, return_lse, batch_invariant):
        done = views.decode(q, k_cache, v_cache, seq_lens, block_tables, q_len, cu_seqlens_q, scale, window, out)
        if done is not None:
            return done
    sequences = seq_lens.shape[0]
    keys = Keys(k_cache, v_cache, kv_layout, block_tables, k_scale, v_scale)
    length = seq_lens.long().clamp(0, block_tables.shape[1] * keys.page_size)
    if cu_seqlens_q is None:
        first = torch.arange(0, sequences * q_len, q_len, device=q.device)
        blocks = _Blocks(first, torch.full_like(first, q_len), length)
    else:
        blocks = _packed_blocks(cu_seqlens_q, length)
    scoring = _scoring(q, blocks, scale, softcap, window, True, alibi_slopes, sinks, tree_mask)
    end = block_tables.shape[1] * keys.page_size
    if batch_invariant or cu_seqlens_q is not None:
        tiles = _row_tiles(blocks, q, keys, batch_invariant)
    elif q_len <= limits(q).rows:
        tiles = _block_tiles(blocks, q, keys, q_len)
    else:
        tiles = _long_block_tiles(blocks, q, [q_len] * sequences)
    return _run(q, keys, tiles, scoring, end, out, lse, return_lse, batch_invariant)


def flash_prefill(
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
    """Attend long blocks of query tokens to a paged cache or packed keys; the contract is `hal.ops.attention.FlashPrefill`."""
    if cu_seqlens_k is not None:  # packed keys are pages of one slot
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        k_scale, v_scale = (s.unsqueeze(1) if isinstance(s, Tensor) and s.dim() == 2 else s for s in (k_scale, v_scale))
        tables, seq_lens, end = cu_seqlens_k[:-1].long(), cu_seqlens_k.diff(), k.shape[0]
    else:
        assert block_tables is not None
        assert seq_lens is not None
        tables, end = block_tables, block_tables.shape[1] * k.shape[{"NHD": 1, "HND": 2}.get(kv_layout, 3)]
    extras = (alibi_slopes, sinks, tree_mask, k_scale, v_scale, lse)
    if views.plain(q, k, v, kv_layout, softcap, extras, out, return_lse, batch_invariant):
        done = views.prefill(q, k, v, seq_lens, tables, cu_seqlens_q, end, scale, window, causal, out)
        if done is not None:
            return done
    keys = Keys(k, v, kv_layout, tables, k_scale, v_scale)
    blocks = _packed_blocks(cu_seqlens_q, seq_lens.long().clamp(0, end))
    scoring = _scoring(q, blocks, scale, softcap, window, causal, alibi_slopes, sinks, tree_mask)
    if batch_invariant:
        tiles = _row_tiles(blocks, q, keys, True)
    else:
        longest = min(max_q_len, q.shape[0])
        counts = [min(n, longest) for n in blocks.count.tolist()] if on_host(q) else [longest] * seq_lens.shape[0]
        tiles = _long_block_tiles(blocks, q, counts)
    return _run(q, keys, tiles, scoring, end, out, lse, return_lse, batch_invariant)


def _packed_blocks(cu_seqlens_q: Tensor, length: Tensor) -> _Blocks:
    offsets = cu_seqlens_q.long()
    return _Blocks(offsets[:-1], offsets.diff().clamp_min(0), length)


def _scoring(
    q: Tensor,
    blocks: _Blocks,
    scale: float | None,
    softcap: float,
    window: int | None,
    causal: bool,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
) -> Scoring:
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if tree_mask is None or not tree_mask.numel() or not blocks.first.numel():
        return Scoring(scale, softcap, window, causal, alibi_slopes, sinks, None, None)
    counts = blocks.count[blocks.of_rows(torch.arange(q.shape[0], device=q.device))]
    in_block = torch.arange(tree_mask.shape[1], device=q.device) < counts[:, None]
    depth = ((tree_mask & in_block).sum(1) - 1).clamp_min(0)
    return Scoring(scale, softcap, window, causal, alibi_slopes, sinks, tree_mask, depth)


def _values_per_key(q: Tensor, keys: Keys, rows: int) -> int:
    """What one key of a group costs in a step: a row of K and V, or a column of scores."""
    return max(keys.num_kv_heads * (q.shape[2] + keys.head_dim_v), q.shape[1] * rows)


def _groups(q: Tensor, keys: Keys, rows: int) -> int:
    """How many groups of `rows` rows form a tile."""
    return max(1, limits(q).values // (limits(q).least_keys * _values_per_key(q, keys, rows)))


def _block_tiles(blocks: _Blocks, q: Tensor, keys: Keys, q_len: int) -> Iterator[Rows]:
    """Whole blocks of one length, as many at a time as the memory bound permits."""
    place, sequences = torch.arange(q_len, device=q.device), blocks.first.shape[0]
    size = _groups(q, keys, q_len)
    for start in range(0, sequences, size):
        sequence = torch.arange(start, min(start + size, sequences), device=q.device)
        yield blocks.rows(sequence, place.expand(sequence.shape[0], -1), q.shape[0])


def _row_tiles(blocks: _Blocks, q: Tensor, keys: Keys, invariant: bool) -> Iterator[Rows]:
    """Rows one by one, each a group of its own: for blocks of unknown length, and for rows that must not meet."""
    tokens = q.shape[0] if blocks.first.shape[0] else 0
    size = _INVARIANT_GROUPS if invariant else _groups(q, keys, 1)
    for start in range(0, tokens, size):
        end = start + size if invariant else min(start + size, tokens)
        row = torch.arange(start, end, device=q.device)
        sequence = blocks.of_rows(row)
        yield blocks.rows(sequence, (row - blocks.first[sequence])[:, None], tokens)


def _long_block_tiles(blocks: _Blocks, q: Tensor, counts: list[int]) -> Iterator[Rows]:
    """Blocks one by one, cut into tiles of rows; `counts` are upper bounds of the rows of each."""
    limit = limits(q)
    size = max(1, min(limit.rows, limit.values // (limit.least_keys * q.shape[1])))
    for index, count in enumerate(counts):
        sequence = torch.full((1,), index, device=q.device)
        for start in range(0, count, size):
            place = torch.arange(start, min(start + size, count), device=q.device)
            yield blocks.rows(sequence, place[None], q.shape[0])


def _bounds(rows: Rows, scoring: Scoring, end: int) -> tuple[int, int]:
    """First key that a row of the tile can see, and the end of them: read on the CPU, the declared maximum elsewhere."""
    if not on_host(rows.token):
        return 0, end
    tree = scoring.tree_mask is not None
    last = rows.length if tree or not scoring.causal else torch.minimum(rows.length, rows.base + rows.place[:, -1] + 1)
    if scoring.window is None:
        return 0, int(last.max())
    oldest = rows.base if tree else rows.base + rows.place[:, 0]
    return max(0, int(oldest.min()) - scoring.window + 1), int(last.max())


def _run(
    q: Tensor,
    keys: Keys,
    tiles: Iterator[Rows],
    scoring: Scoring,
    end: int,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
    invariant: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend tile by tile and write the outputs. Rows that no tile covers are empty."""
    tokens, heads, _ = q.shape
    # One row more than q: rows of a tile that do not exist are written there.
    result = torch.zeros(tokens + 1, heads, keys.head_dim_v, dtype=torch.float32, device=q.device)
    result_lse = torch.full((tokens + 1, heads), -math.inf, dtype=torch.float32, device=q.device)
    for rows in tiles if keys.k.shape[0] else ():
        groups, count = rows.token.shape
        size = max(1, min(limits(q).keys, limits(q).values // (groups * _values_per_key(q, keys, count))))
        spans = keys.spans(*_bounds(rows, scoring, end), size, whole=invariant)
        part, part_lse = attend(q, rows, keys, spans, scoring)
        result.index_copy_(0, rows.token.flatten(), part.flatten(0, 1))
        result_lse.index_copy_(0, rows.token.flatten(), part_lse.flatten(0, 1))
    result, result_lse = result[:tokens], result_lse[:tokens]
    out = result.to(q.dtype) if out is None else out.copy_(result)
    lse = result_lse if lse is None else lse.copy_(result_lse)
    return (out, lse) if return_lse else out
