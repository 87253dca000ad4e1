# mypy: allow-untyped-defs
"""The two small kernels beside the main one of `flash_decode`: the merge of cut units, and the depths of a draft tree.

Many partials of a row are merged at a time where rows are few, and several rows where they are many. Bases are added to
the scalar pointer and never to the two-dimensional offsets: Triton 3.5.0 to 3.6.0 miscompile that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.decode_partition import HEADER, RECORD
from hal.kernels.launch import pdl_begin, pdl_release, pdl_wait
from hal.kernels.numerics import finish, merge_weights, normalise

__all__ = ["depth_kernel", "reduce_kernel", "reduce_shape"]

#: Elements of one block of the reduction: whole rows of as many partials as fit.
_BLOCK = 4096
#: Programs that the reduction of units of few rows is spread over; most find nothing to do.
_PROGRAMS = 2112
_ROWS = tl.constexpr(16)
_COLUMNS = tl.constexpr(32)


def reduce_shape(rows: int, block_m: int, head_dim_v: int, boundaries: int, *, invariant: bool) -> tuple[int, int, int]:
    """(slices, rows at a time, partials at a time) of the merge.

    Args:
        rows: of a unit that may hold a query.
        block_m: rows of a unit, padded.
        head_dim_v: Dv.
        boundaries: of pieces, over all kv heads.
        invariant: batch-invariant call, whose partials are merged one after the other.
    """
    fit = max(1, _BLOCK >> (head_dim_v - 1).bit_length())
    if invariant or block_m <= 16:
        return max(1, min(rows, _PROGRAMS // boundaries)), 1, fit
    together = max(1, fit // 4)
    return -(-rows // together), together, fit // together


@triton.jit(do_not_specialize=["tokens", "sequences", "q_len", "pieces", "slots", "num_kv_heads", "rows", "slices"])
def reduce_kernel(
    out_ptr, lse_ptr, part_ptr, plan_ptr, cu_ptr, sinks_ptr, v_scale_ptr, value_scale,
    tokens, sequences, q_len, pieces, slots, num_kv_heads, rows, slices,
    stride_ot, stride_oh, stride_lt, stride_vsh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, G: tl.constexpr, TOKEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    INVARIANT: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, V_TOKEN_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partials of the unit that the begin of a piece cuts first, ROWS rows at a time.

    Program ids run over (piece 1.., kv head, slice); a slice takes every `slices`-th block of rows of the unit. Programs without
    such a unit return at once, before the main kernel is done: the plan was complete before that began, and program 0
    waits for it in their place.
    """
    pdl_release(PDL)
    first_row = tl.program_id(0) % slices
    kv_head = ((tl.program_id(0) // slices) % num_kv_heads).to(tl.int64)
    piece = 1 + tl.program_id(0) // slices // num_kv_heads
    # Past L1: the wait that would drop its old lines comes later.
    share = tl.load(plan_ptr, cache_modifier=".cg")
    short = tl.load(plan_ptr + 2, cache_modifier=".cg")
    long = tl.load(plan_ptr + 3, cache_modifier=".cg")
    record = plan_ptr + HEADER + piece * RECORD
    sequence = tl.load(record, cache_modifier=".cg")
    row_tile = tl.load(record + 1, cache_modifier=".cg")
    step = tl.load(record + 2, cache_modifier=".cg")
    left = tl.load(record + 3, cache_modifier=".cg")
    # The unit begins in the piece before this one: else an earlier program merges it.
    before = tl.where(piece <= long, share, short)
    needed = (left > 0) & (step > 0) & (step <= before)
    if needed | (tl.program_id(0) == 0):
        pdl_wait(PDL)
    if not needed:
        return
    steps = tl.load(plan_ptr + HEADER + pieces * RECORD + sequence)
    if cu_ptr is None:
        row_start = sequence * q_len
        queries = q_len
    else:
        row_start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), tokens)
        row_end = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
        queries = tl.minimum(tl.maximum(row_end, row_start), tokens) - row_start
    # From the begin of this piece: the rest of the long pieces, then short ones.
    rest = steps - step
    in_long = tl.maximum(long - piece, 0)
    parts = 1 + tl.where(rest <= in_long * share, tl.cdiv(rest, share), in_long + tl.cdiv(rest - in_long * share, short))
    if v_scale_ptr is not None and not V_TOKEN_SCALE:
        value_scale *= tl.load(v_scale_ptr + kv_head * stride_vsh)
    stride_part = num_kv_heads.to(tl.int64) * (BLOCK_M * DV)
    stride_lse = num_kv_heads.to(tl.int64) * BLOCK_M

    d = tl.arange(0, DV_PAD)
    for begin_row in range(first_row * ROWS, rows, slices * ROWS):
        part_row = begin_row + tl.arange(0, ROWS)
        row = row_tile * BLOCK_M + part_row
        ok = (part_row < rows) & (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
        inside = part_row[:, None] * DV + d[None, :]
        mask = ok[:, None] & (d < DV)[None, :]
        outs = part_ptr + kv_head * (BLOCK_M * DV)
        lses = part_ptr + slots.to(tl.int64) * stride_part + kv_head * BLOCK_M
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DV_PAD), tl.float32)
        if INVARIANT:
            # In order, as a unit that is not cut merges its chunks.
            slot = (piece * share - step).to(tl.int64)
            for _ in range(0, steps):
                values = tl.load(outs + slot * stride_part + inside, mask=mask, other=0.0)
                part_lse = tl.load(lses + slot * stride_lse + part_row, mask=ok, other=float("-inf"))
                peak, old, new = merge_weights(peak, part_lse)
                total = total * old + new
                acc = acc * old[:, None] + values * new[:, None]
                slot += 1
        else:
            for begin in range(0, parts, PARTS):
                part = begin + tl.arange(0, PARTS)
                # Part 0 is what the piece before left unfinished, the others are what each piece begins with.
                slot = (2 * (piece - 1 + part) + (part == 0).to(tl.int32)).to(tl.int64)
                there = (part < parts)[:, None] & ok[None, :]
                part_lse = tl.load(lses + (slot * stride_lse)[:, None] + part_row[None, :], mask=there, other=float("-inf"))
                places = (slot * stride_part)[:, None, None] + inside[None, :, :]
                values = tl.load(outs + places, mask=(part < parts)[:, None, None] & mask[None, :, :], other=0.0)
                new_peak = tl.maximum(peak, tl.max(part_lse, 0))
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                old = tl.exp2(peak - base)
                weight = tl.exp2(part_lse - base[None, :])
                total = total * old + tl.sum(weight, 0)
                acc = acc * old[:, None] + tl.sum(values * weight[:, :, None], 0)
                peak = new_peak
        divisor, lse = normalise(peak, total)
        acc = tl.div_rn(acc, tl.broadcast_to(divisor[:, None], acc.shape))
        head = kv_head * G + row % TOKEN_ROWS
        token = (row_start + row // TOKEN_ROWS).to(tl.int64)
        factor, result = finish(lse, sinks_ptr, head, ok)
        targets = (token * stride_ot + head * stride_oh)[:, None] + d[None, :]
        tl.store(out_ptr + targets, (acc * (factor * value_scale)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + token * stride_lt + head, result, mask=ok)


@triton.jit(do_not_specialize=["tokens", "q_len", "stride_tree", "tree_cols"])
def depth_kernel(depth_ptr, tree_ptr, cu_ptr, tokens, q_len, stride_tree, tree_cols, PDL: tl.constexpr):
    """Depth of every draft token: true entries of its row within its block minus 1, not below 0. One program a sequence."""
    pdl_begin(PDL)
    sequence = tl.program_id(0)
    if cu_ptr is None:
        row_start = sequence * q_len
        queries = q_len
    else:
        row_start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), tokens)
        queries = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence + 1), row_start), tokens) - row_start
    columns = tl.minimum(queries, tree_cols)
    for begin in range(0, queries, _ROWS):
        query = begin + tl.arange(0, _ROWS)
        token = (row_start + query).to(tl.int64)
        count = tl.zeros((_ROWS,), tl.int32)
        for first in range(0, columns, _COLUMNS):
            column = first + tl.arange(0, _COLUMNS)
            mask = (query < queries)[:, None] & (column < columns)[None, :]
            seen = tl.load(tree_ptr + token[:, None] * stride_tree + column[None, :], mask=mask, other=0)
            count += tl.sum((seen != 0).to(tl.int32), 1)
        tl.store(depth_ptr + token, tl.maximum(count - 1, 0), mask=query < queries)
