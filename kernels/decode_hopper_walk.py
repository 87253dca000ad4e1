# mypy: allow-untyped-defs
# ruff: noqa: SIM108 (a conditional expression cannot choose between constants and values here)
"""The way of a program through its piece on NVIDIA Hopper: units, their tiles of keys, and the pages that hold them.

Producer and consumer of `decode_hopper` both take it, each for itself, so that nothing but tiles passes between them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hal.kernels.tuning import STEP

__all__ = ["TILE", "load_page_ids", "next_segment", "piece_at", "readable_keys", "table_row"]

#: Keys of a tile and of a step: the rows of one `wgmma`.
TILE = gl.constexpr(STEP)


@gluon.jit
def _block(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, max_keys):
    """(first token, query tokens, keys) of a sequence; the one after the last holds the padding rows and sees no key."""
    if cu_ptr is None:
        row_start = sequence * q_len
        queries = q_len
    else:
        row_start = gl.minimum(gl.maximum(gl.load(cu_ptr + gl.minimum(sequence, sequences)), 0), tokens)
        row_end = gl.load(cu_ptr + gl.minimum(sequence + 1, sequences))
        if sequence >= sequences:
            row_end = tokens
        queries = gl.minimum(gl.maximum(row_end, row_start), tokens) - row_start
    keys = 0
    if sequence < sequences:
        keys = gl.minimum(gl.maximum(gl.load(seq_lens_ptr + sequence), 0), max_keys)
    return row_start, queries, keys


@gluon.jit
def next_segment(
    sequence, row_tile, step, left, steps_ptr, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys,
    TOKEN_ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The part of a unit that belongs to the piece, from `step` on.

    Returns (sequence, first token, query tokens, keys, first key, end key, first tile, tiles, steps taken, steps of the
    unit, row tile and sequence after it). Sequences without rows are passed over.
    """
    row_start, queries, keys = _block(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, max_keys)
    if cu_ptr is not None:
        while (queries == 0) & (sequence < sequences):
            sequence += 1
            row_start, queries, keys = _block(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, max_keys)
    planned = gl.load(steps_ptr + sequence)
    block_start = keys - queries
    first = 0
    if window is not None:
        first = gl.minimum(gl.maximum(block_start - window + 1, 0), keys)
    steps = gl.maximum((keys + TILE - 1) // TILE - first // TILE, 1)
    stop = gl.minimum(planned, step + left)
    begin = step
    end = stop
    if planned != steps:  # the lengths have changed since the plan was made
        begin = (step.to(gl.int64) * steps // planned).to(gl.int32)
        end = (stop.to(gl.int64) * steps // planned).to(gl.int32)
    begin += first // TILE
    end += first // TILE
    # No row of this tile sees beyond its own last token.
    last = gl.minimum(gl.maximum(block_start + (row_tile * BLOCK_M + BLOCK_M - 1) // TOKEN_ROWS + 1, 0), keys)
    last = gl.minimum(last, end * TILE)
    more = (row_tile + 1) * BLOCK_M < queries * TOKEN_ROWS
    next_row_tile = gl.where(more, row_tile + 1, 0)
    next_sequence = gl.where(more, sequence, sequence + 1)
    return sequence, row_start, queries, keys, first, last, begin, gl.maximum(end - begin, 1), stop - step, planned, next_row_tile, next_sequence


@gluon.jit
def table_row(tables_ptr, sequence, sequences, stride_bt, max_keys):
    """A sequence's row of the block table, and the keys that it has room for: none behind the last sequence."""
    return tables_ptr + sequence.to(gl.int64) * stride_bt, gl.where(sequence < sequences, max_keys, 0)


@gluon.jit
def load_page_ids(table, tile, room, P: gl.constexpr, LAYOUT: gl.constexpr):
    """Page ids of the keys of a tile, as the table has them; -1 beyond its width."""
    key = tile * TILE + gl.arange(0, TILE, LAYOUT)
    if P % TILE == 0:
        page = gl.load(table + tile // (P // TILE), mask=tile * TILE < room, other=-1)
        return gl.where(key < room, page, -1)
    else:
        return gl.load(table + key.to(gl.uint32) // P, mask=key < room, other=-1)


@gluon.jit
def readable_keys(page, tile, first, last, pages, LAYOUT: gl.constexpr):
    """Which keys of a tile may be read: inside [first, last), on a page of the cache."""
    key = tile * TILE + gl.arange(0, TILE, LAYOUT)
    return (page.to(gl.uint32) < pages.to(gl.uint32)) & (key >= first) & (key < last)


@gluon.jit
def piece_at(place, share, long_steps, short, long):
    """The piece that holds a place in the list of steps."""
    piece = place
    if place < long_steps:
        piece = place // share
    else:
        piece = long + (place - long_steps) // short
    return piece
