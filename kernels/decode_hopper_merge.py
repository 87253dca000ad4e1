# mypy: allow-untyped-defs
"""Merge of cut units inside `decode_hopper`: by whichever program writes the last partial."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hal.kernels.numerics import LN2, LOG2E

__all__ = ["apply_sinks", "barrier", "merge_partials", "merge_shape"]

_LOG2E = gl.constexpr(LOG2E)
_LN2 = gl.constexpr(LN2)
# Renamed between Triton 3.6 and 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def merge_shape(rows: int, head_dim_v: int, registers: int) -> tuple[int, int]:
    """(rows, partials at a time) of the merge inside the kernel; (0, 0) where the rows are too many for one program.

    Args:
        rows: of a unit that hold a query.
        head_dim_v: Dv.
        registers: of a thread, for the partials.
    """
    rows = 1 << (rows - 1).bit_length()
    size = max(rows, 4) * max(128, 1 << (head_dim_v - 1).bit_length())  # what 4 warps hold of one partial
    return (rows, registers * 128 // size) if size <= registers * 128 else (0, 0)


@gluon.jit
def _gather(
    part_ptr, lses, first_slot, begin, count, every, num_kv_heads, kv_head,
    ROWS: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, BATCH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Merge `count` partials of a unit: parts begin, begin + every, ...; part 0 lies in `first_slot`, part i two slots a piece on.

    Returns the base-2 log-sum-exp (ROWS,) and the normalised output (ROWS, DV padded to a power of two). Read past L1,
    which may hold what these places held before.
    """
    WIDTH: gl.constexpr = 1 << (DV - 1).bit_length()
    PARTS: gl.constexpr = gl.BlockedLayout([BATCH, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    LSE: gl.constexpr = gl.SliceLayout(2, PARTS)
    ROW: gl.constexpr = gl.SliceLayout(0, LSE)
    OUT: gl.constexpr = gl.SliceLayout(0, PARTS)
    row = gl.arange(0, ROWS, ROW)
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, OUT)), 0), 0)
    peak = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
    for at in range(0, count, BATCH):
        index = at + gl.arange(0, BATCH, gl.SliceLayout(1, LSE))
        part = begin + index * every
        place = (first_slot + 2 * part - gl.where(part > 0, 1, 0)).to(gl.int64) * num_kv_heads + kv_head
        places = place[:, None] * BLOCK_M + row[None, :]
        ok = (index < count)[:, None] & (row >= 0)[None, :]
        part_lse = gl.load(lses + places, mask=ok, other=float("-inf"), cache_modifier=".cg")
        values = gl.load(
            part_ptr + (gl.expand_dims(places * DV, 2) + column), mask=gl.expand_dims(ok, 2) & (column < DV), other=0.0, cache_modifier=".cg"
        )
        new_peak = gl.maximum(peak, gl.max(part_lse, 0))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        old = gl.exp2(peak - base)
        weight = gl.exp2(part_lse - base[None, :])
        total = total * old + gl.sum(weight, 0)
        acc = acc * gl.expand_dims(gl.convert_layout(old, gl.SliceLayout(1, OUT)), 1) + gl.sum(values * gl.expand_dims(weight, 2), 0)
        peak = new_peak
    divisor = gl.where(total == 0.0, 1.0, total)
    lse = gl.convert_layout(gl.where(total == 0.0, float("-inf"), peak + gl.log2(divisor)), gl.SliceLayout(1, OUT))
    return lse, acc / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(1, OUT)), 1)


@gluon.jit
def apply_sinks(lse, sinks_ptr, head, row_ok):
    """Factor of a normalised output and natural log-sum-exp, with the sinks; a row that saw no key stays empty."""
    factor = gl.full(lse.shape, 1.0, gl.float32, lse.type.layout)
    result = lse * _LN2
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")) * _LOG2E
        is_empty = lse == float("-inf")
        top = gl.where(is_empty, 0.0, gl.maximum(lse, sink))
        own = gl.exp2(lse - top)
        both = own + gl.exp2(gl.where(is_empty, 0.0, sink) - top)
        factor = gl.where(is_empty, 0.0, own / both)
        result = gl.where(is_empty, float("-inf"), (top + gl.log2(both)) * _LN2)
    return factor, result


@gluon.jit
def merge_partials(
    out_ptr, lse_ptr, part_ptr, lses, counter_ptr, sinks_ptr, value_scale,
    first_piece, parts, piece, pieces, kv_head, num_kv_heads, row_tile, row_start, queries, stride_ot, stride_oh, stride_lt,
    DV: gl.constexpr, G: gl.constexpr, TOKEN_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, BATCH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Count this piece's partial of a cut unit as written; whoever writes the last one merges them all.

    In groups of neighbouring partials, then the groups, so that a unit of hundreds is not merged by one program
    alone. Whoever completes a count puts it back to zero. The order of arithmetic does not depend on who that is.
    """
    GROUP: gl.constexpr = 2 * BATCH if BATCH > 4 else 8
    WIDTH: gl.constexpr = 1 << (DV - 1).bit_length()
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([BATCH, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0]))
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    groups = (parts + GROUP - 1) // GROUP
    group_first = (piece - first_piece) // GROUP * GROUP
    group_count = gl.minimum(GROUP, parts - group_first)
    first_slot = 2 * first_piece + 1
    group_slot = first_slot + 2 * group_first - gl.where(group_first > 0, 1, 0)
    group_counter = counter_ptr + group_slot * num_kv_heads + kv_head
    barrier()
    if gl.atomic_add(group_counter, 1, sem="acq_rel", scope="gpu") == group_count - 1:
        gl.store(group_counter, 0)
        lse, out = _gather(part_ptr, lses, first_slot, group_first, group_count, 1, num_kv_heads, kv_head, ROWS, DV, BLOCK_M, BATCH, WARPS)
        complete = groups == 1
        row = gl.arange(0, ROWS, ROW)
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
        if groups > 1:
            part = group_slot.to(gl.int64) * num_kv_heads + kv_head
            offsets = (row * DV)[:, None] + column[None, :]
            gl.store(part_ptr + part * (BLOCK_M * DV) + offsets, out, mask=(column < DV)[None, :] & (row >= 0)[:, None])
            gl.store(lses + part * BLOCK_M + row, lse)
            counter = counter_ptr + (2 * pieces + first_piece) * num_kv_heads + kv_head
            barrier()
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == groups - 1:
                gl.store(counter, 0)
                lse, out = _gather(part_ptr, lses, first_slot, 0, groups, GROUP, num_kv_heads, kv_head, ROWS, DV, BLOCK_M, BATCH, WARPS)
                complete = groups > 1
        if complete:
            row += row_tile * BLOCK_M
            row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
            token = (row_start + row // TOKEN_ROWS).to(gl.int64)
            head = kv_head * G + row % TOKEN_ROWS
            factor, result = apply_sinks(lse, sinks_ptr, head, row_ok)
            if lse_ptr is not None:
                gl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)
            out = out * (factor * value_scale)[:, None]
            places = (token * stride_ot + head * stride_oh)[:, None] + column[None, :]
            gl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (column < DV)[None, :])
