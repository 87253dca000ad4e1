# mypy: allow-untyped-defs
# ruff: noqa: SIM108 (a conditional expression cannot choose between constants and values here)
"""Consumer of `decode_hopper` for units of 64 rows: the rows are the wide side of `wgmma`, two warp groups share the work.

Scores are (rows, keys) and the output (rows, head dim). Each warp group computes the scores of half the keys and holds
half of the output's columns, so that 64 rows of 512 columns fit into registers (MLA with many heads), and a tile is read
from memory once for all of them. Weights pass through shared memory, where both groups read all of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from hal.kernels.decode_hopper_merge import apply_sinks, barrier, merge_partials
from hal.kernels.decode_hopper_tiles import GROWTH, any_grown, copy_layout, load_queries, soft_cap, spread_layout, store_wide_rows, wide_seen_layout
from hal.kernels.decode_hopper_walk import TILE, load_page_ids, next_segment, piece_at, readable_keys, table_row
from hal.kernels.numerics import LOG2E

__all__ = ["consume_wide"]

_LOG2E = gl.constexpr(LOG2E)


@gluon.constexpr_function
def _product_layout(columns, warps):
    """Of a `wgmma` result (64, columns), columns shared out over the warp groups."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, min(256, columns // groups), 16])


@gluon.jit
def _start_scores(q0, q1, k0, k1, D1: gl.constexpr, SCORE: gl.constexpr):
    """Start the product of the queries (rows, dims) with a tile of keys (64, dims)."""
    fence_async_shared()
    scores = warpgroup_mma(q0, k0.permute([1, 0]), gl.zeros([64, TILE], gl.float32, SCORE), use_acc=False, is_async=True)
    if D1 > 0:
        scores = warpgroup_mma(q1, k1.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
def _start_output(p, v0, v1, acc0, acc1, DV1: gl.constexpr):
    """Start adding the product of the weights (rows, keys) with a tile of values (64, dims)."""
    acc0 = warpgroup_mma(p, v0, acc0, is_async=True)
    if DV1 > 0:
        acc1 = warpgroup_mma(p, v1, acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def _visible(page, tile, first, last, pages, position, window, KEY: gl.constexpr):
    """Which keys of a tile each row sees, (rows, keys)."""
    key = tile * TILE + gl.arange(0, TILE, KEY)
    visible = readable_keys(page, tile, first, last, pages, KEY)[None, :] & (key[None, :] <= position[:, None])
    if window is not None:
        visible = visible & (position[:, None] - key[None, :] < window)
    return visible


@gluon.jit
def _weigh(
    scores, visible, position, slope, tile, peak, spread_peak, total, acc0, acc1, score_scale, softcap, slopes_ptr, p_smem, peaks,
    DV1: gl.constexpr, SCORE: gl.constexpr, OUT0: gl.constexpr, OUT1: gl.constexpr,
):  # fmt: skip
    """Turn scores into weights in `p_smem`; returns (maximum, sum, accumulators), rescaled where the maximum has grown much."""
    KEY: gl.constexpr = gl.SliceLayout(0, SCORE)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    GROUPS: gl.constexpr = peaks.shape[2]
    if softcap is not None:
        scores = soft_cap(scores * score_scale, softcap) * _LOG2E
    else:
        scores = scores * (score_scale * _LOG2E)
    if slopes_ptr is not None:
        key = tile * TILE + gl.arange(0, TILE, KEY)
        scores -= slope[:, None] * (position[:, None] - key[None, :]).to(gl.float32)
    scores = gl.where(visible, scores, float("-inf"))
    base = gl.where(peak == float("-inf"), 0.0, peak)
    p = gl.exp2(scores - base[:, None])
    # Each warp group's own maximum: to agree on one first would cost a barrier and the wait for it.
    seen = peaks.index(tile & 1)
    seen.store(gl.max(gl.reshape(scores, [64, GROUPS, TILE // GROUPS]), 2))
    p_smem.store(p.to(p_smem.dtype))
    fence_async_shared()
    barrier()
    SPREAD: gl.constexpr = spread_layout(GROUPS, 64, True)
    if any_grown(seen.load(SPREAD), gl.expand_dims(spread_peak, 1)):
        newest = gl.convert_layout(gl.max(seen.load(wide_seen_layout(GROUPS)), 1), ROW)
        newest = gl.where(newest > peak + GROWTH, newest, peak)
        base = gl.where(newest == float("-inf"), 0.0, newest)
        alpha = gl.exp2(peak - base)
        p = gl.exp2(scores - base[:, None])
        total = total * alpha[:, None]
        acc0 = acc0 * gl.convert_layout(alpha, gl.SliceLayout(1, OUT0))[:, None]
        if DV1 > 0:
            acc1 = acc1 * gl.convert_layout(alpha, gl.SliceLayout(1, OUT1))[:, None]
        peak = newest
        spread_peak = gl.convert_layout(peak, gl.SliceLayout(1, SPREAD))
        p_smem.store(p.to(p_smem.dtype))
        fence_async_shared()
        barrier()
    return peak, spread_peak, total + p, acc0, acc1


@gluon.jit
def consume_wide(
    q_ptr, out_ptr, lse_ptr, part_ptr, counter_ptr, tables_ptr, seq_lens_ptr, cu_ptr, slopes_ptr, sinks_ptr, steps_ptr,
    sequence, row_tile, step, left, share, long_steps, short, long, piece, pieces, kv_head, score_scale, value_scale, softcap, window,
    tokens, sequences, q_len, pages, max_keys, slots, num_kv_heads, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_bt,
    k0_ring, k1_ring, v0_ring, v1_ring, k0_wide, k1_wide, v0_wide, v1_wide, q0_smem, q1_smem, p_smem, peaks, full, empty,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, DV0: gl.constexpr, DV1: gl.constexpr,
    G: gl.constexpr, TOKEN_ROWS: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_IN_K: gl.constexpr,
    MERGE_ROWS: gl.constexpr, MERGE_BATCH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles of the piece as they arrive; write results and partials."""
    DOT: gl.constexpr = p_smem.dtype
    QUERY: gl.constexpr = copy_layout(D0, 2, WARPS)
    SCORE: gl.constexpr = _product_layout(64, WARPS)
    OUT0: gl.constexpr = _product_layout(DV0, WARPS)
    OUT1: gl.constexpr = _product_layout(DV1 if DV1 > 0 else 64, WARPS)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORE)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    PRODUCTS: gl.constexpr = 2 if D1 > 0 else 1  # that make up the scores of a tile
    # The next scores run behind this tile's output, so that the matrix unit has work while the slot is given back; with two
    # slots in all (MLA) the copying warps need it sooner.
    AHEAD: gl.constexpr = not V_IN_K
    slot = 0
    phase = 0
    begin = gl.minimum(piece, long) * share + gl.maximum(piece - long, 0) * short  # place of the segment in the list of steps
    while left > 0:
        sequence, row_start, queries, keys, first, last, tile, tiles, taken, planned, next_row_tile, next_sequence = next_segment(
            sequence, row_tile, step, left, steps_ptr, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M
        )
        whole = taken == planned
        first_piece = piece
        parts = 1
        if not whole:
            first_piece = piece_at(begin - step, share, long_steps, short, long)
            parts = piece_at(begin - step + planned - 1, share, long_steps, short, long) - first_piece + 1
        table, room = table_row(tables_ptr, sequence, sequences, stride_bt, max_keys)
        next_page = load_page_ids(table, tile, room, P, KEY)
        q0, q1 = load_queries(q_ptr, row_tile, row_start, queries, kv_head, stride_qt, stride_qh, D, D0, D1, G, TOKEN_ROWS, BLOCK_M, QUERY)
        q0_smem.store(q0.to(DOT))
        if D1 > 0:
            q1_smem.store(q1.to(DOT))
        fence_async_shared()
        barrier()
        row = row_tile * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
        row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
        token = (row_start + row // TOKEN_ROWS).to(gl.int64)
        head = kv_head * G + row % TOKEN_ROWS
        position = gl.where(row_ok, keys - queries + row // TOKEN_ROWS, -1)
        slope = gl.full([BLOCK_M], 0.0, gl.float32, ROW)
        if slopes_ptr is not None:
            slope = gl.load(slopes_ptr + head, mask=row_ok, other=0.0) * _LOG2E
        peak = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
        spread_peak = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, spread_layout(WARPS // 4, 64, True)))
        total = gl.zeros([BLOCK_M, TILE], gl.float32, SCORE)
        acc0 = gl.zeros([BLOCK_M, DV0], gl.float32, OUT0)
        acc1 = gl.zeros([BLOCK_M, DV1 if DV1 > 0 else 64], gl.float32, OUT1)

        mbarrier.wait(full.index(slot), phase)
        scores = _start_scores(q0_smem, q1_smem, k0_ring.index(slot), k1_ring.index(slot), D1, SCORE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for at in range(tile, tile + tiles - 1):
            page = next_page
            next_page = load_page_ids(table, at + 1, room, P, KEY)
            visible = _visible(page, at, first, last, pages, position, window, KEY)
            peak, spread_peak, total, acc0, acc1 = _weigh(
                scores, visible, position, slope, at, peak, spread_peak, total, acc0, acc1,
                score_scale, softcap, slopes_ptr, p_smem, peaks, DV1, SCORE, OUT0, OUT1,
            )  # fmt: skip
            acc0, acc1 = _start_output(p_smem, k0_ring.index(slot) if V_IN_K else v0_ring.index(slot), v1_ring.index(slot), acc0, acc1, DV1)
            done = slot
            if not AHEAD:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                barrier()
                mbarrier.arrive(empty.index(done), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
            mbarrier.wait(full.index(slot), phase)
            scores = _start_scores(q0_smem, q1_smem, k0_ring.index(slot), k1_ring.index(slot), D1, SCORE)
            if AHEAD:
                acc0, acc1 = warpgroup_mma_wait(PRODUCTS, deps=[acc0, acc1])
                barrier()
                mbarrier.arrive(empty.index(done), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
        at = tile + tiles - 1
        visible = _visible(next_page, at, first, last, pages, position, window, KEY)
        peak, spread_peak, total, acc0, acc1 = _weigh(
            scores, visible, position, slope, at, peak, spread_peak, total, acc0, acc1,
            score_scale, softcap, slopes_ptr, p_smem, peaks, DV1, SCORE, OUT0, OUT1,
        )  # fmt: skip
        acc0, acc1 = _start_output(p_smem, k0_ring.index(slot) if V_IN_K else v0_ring.index(slot), v1_ring.index(slot), acc0, acc1, DV1)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1

        amount = gl.sum(total, 1)
        divisor = gl.where(amount == 0.0, 1.0, amount)
        lse = gl.where(amount == 0.0, float("-inf"), peak + gl.log2(divisor))
        lses = part_ptr + slots.to(gl.int64) * num_kv_heads * (BLOCK_M * DV)
        if whole:
            factor, result = apply_sinks(lse, sinks_ptr, head, row_ok)
            if lse_ptr is not None:
                gl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)
            factor = factor * value_scale / divisor
            rows = token * stride_ot + head * stride_oh
            store_wide_rows(out_ptr, rows, row_ok, acc0, factor, DV, 0, DV0, OUT0)
            if DV1 > 0:
                store_wide_rows(out_ptr, rows, row_ok, acc1, factor, DV, DV0, DV1, OUT1)
        else:
            factor = 1.0 / divisor
            place = 2 * piece + (step == 0).to(gl.int32)
            part = place.to(gl.int64) * num_kv_heads + kv_head
            part_row = gl.arange(0, BLOCK_M, ROW)
            rows = (part_row * DV).to(gl.int64)
            outs = part_ptr + part * (BLOCK_M * DV)
            store_wide_rows(outs, rows, row_ok, acc0, factor, DV, 0, DV0, OUT0)
            if DV1 > 0:
                store_wide_rows(outs, rows, row_ok, acc1, factor, DV, DV0, DV1, OUT1)
            gl.store(lses + part * BLOCK_M + part_row, lse, mask=row_ok)
            if MERGE_ROWS > 0:
                merge_partials(
                    out_ptr, lse_ptr, part_ptr, lses, counter_ptr, sinks_ptr, value_scale,
                    first_piece, parts, piece, pieces, kv_head, num_kv_heads, row_tile, row_start, queries, stride_ot, stride_oh, stride_lt,
                    DV, G, TOKEN_ROWS, BLOCK_M, MERGE_ROWS, MERGE_BATCH, WARPS,
                )  # fmt: skip
        begin += taken
        left -= taken
        sequence = next_sequence
        row_tile = next_row_tile
        step = step * 0
