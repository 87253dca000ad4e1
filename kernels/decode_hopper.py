# mypy: allow-untyped-defs
# ruff: noqa: SIM108 (a conditional expression cannot choose between constants and values here)
"""Main kernel of `flash_decode` on NVIDIA Hopper, in Gluon: the same pieces, partials and mathematics as `decode_kernel`.

What it adds is that copying and computing are done by different warps. The producer walks through the tiles of 64 keys
of a piece, across the units in it, and keeps a ring of STAGES tiles in shared memory full with asynchronous 16-byte
copies; it loads page ids one tile ahead of the copies that they address. The consumer computes tile after tile and
gives each slot back. So the memory stays busy while results are written and the next unit is set up.

Scores and output are transposed, (keys, rows) and (head dim, rows): K and V^T are the wide operand of `wgmma` and come
straight from shared memory, and the rows of a group are its narrow side (16 at least).

Quantised caches are converted to fp16, which holds every fp8 and int8 value; a bf16 query is scaled by a power of two
into fp16's range, and the score takes the power back. Keys in e4m3 meet a bf16 query without that: the query is written
as a sum of two e4m3 terms, the second of which holds what the first leaves over (4 + 4 bits are what bf16 has), and
both are multiplied with the keys as they are. Values are always converted: their sum runs over the whole context, where
the short accumulator of fp8 products would show.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.kernels.decode_hopper_merge import apply_sinks, barrier, merge_partials
from hal.kernels.decode_hopper_tiles import (
    GROWTH,
    any_grown,
    convert_tile,
    copy_keys,
    copy_layout,
    key_layout,
    key_offsets,
    load_queries,
    operand_layout,
    seen_layout,
    soft_cap,
    spread_layout,
    staging_layout,
    store_rows,
    store_terms,
)
from hal.kernels.decode_hopper_walk import TILE, load_page_ids, next_segment, piece_at, readable_keys, table_row
from hal.kernels.decode_hopper_wide import consume_wide
from hal.kernels.decode_partition import HEADER, RECORD
from hal.kernels.numerics import LOG2E

__all__ = ["VARYING", "decode_hopper_kernel", "hopper_dims"]

_HEADER = gl.constexpr(int(HEADER))
_RECORD = gl.constexpr(int(RECORD))
_LOG2E = gl.constexpr(LOG2E)

#: Integers that change from call to call: no variant of the kernel may depend on their value.
VARYING = ["window", "tokens", "sequences", "q_len", "pages", "max_keys", "pieces", "slots", "num_kv_heads", "stride_bt"]


def hopper_dims(head_dim: int, head_dim_v: int, kv_bytes: int, *, v_in_k: bool) -> bool:
    """Whether the kernel serves these head dims: V^T needs 64 rows, and two stages must fit into shared memory.

    Args:
        head_dim: D.
        head_dim_v: Dv.
        kv_bytes: bytes of a K or V element.
        v_in_k: values are the leading elements of the keys.
    """
    return min(head_dim, head_dim_v) >= 64 and (max(head_dim, head_dim_v) <= 256 or (v_in_k and kv_bytes == 2))


@gluon.jit
def _produce(
    k_base, v_base, tables_ptr, seq_lens_ptr, cu_ptr, steps_ptr, sequence, row_tile, step, left,
    window, tokens, sequences, q_len, pages, max_keys, stride_kp, stride_kt, stride_vp, stride_vt, stride_bt,
    k0_ring, k1_ring, v0_ring, v1_ring, full, empty,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, DV0: gl.constexpr, DV1: gl.constexpr,
    TOKEN_ROWS: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_IN_K: gl.constexpr, LATE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of the piece into the ring; LATE: addresses are computed when a slot is free, and hold no registers until then."""
    COPY: gl.constexpr = copy_layout(D0, k_base.dtype.element_ty.primitive_bitwidth // 8, WARPS)
    KEY: gl.constexpr = gl.SliceLayout(1, COPY)
    slot = 0
    phase = 1
    # Where the piece most likely begins: these ids are on their way while the lengths are looked up.
    guess = step
    table, room = table_row(tables_ptr, sequence, sequences, stride_bt, max_keys)
    next_page = load_page_ids(table, guess, room, P, KEY)
    while left > 0:
        sequence, _, _, _, first, last, tile, tiles, taken, _, row_tile, next_sequence = next_segment(
            sequence, row_tile, step, left, steps_ptr, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M
        )
        table, room = table_row(tables_ptr, sequence, sequences, stride_bt, max_keys)
        if tile != guess:
            next_page = load_page_ids(table, tile, room, P, KEY)
        guess = -1
        for at in range(tile, tile + tiles):
            page = next_page
            next_page = load_page_ids(table, at + 1, room, P, KEY)
            ok = readable_keys(page, at, first, last, pages, KEY)
            if LATE:
                mbarrier.wait(empty.index(slot), phase)
            k_rows = key_offsets(page, at, stride_kp, stride_kt, P, KEY)
            if not V_IN_K:
                v_rows = key_offsets(page, at, stride_vp, stride_vt, P, KEY)
            if not LATE:
                mbarrier.wait(empty.index(slot), phase)
            copy_keys(k0_ring, slot, k_base, k_rows, ok, D, 0, D0, COPY)
            if D1 > 0:
                copy_keys(k1_ring, slot, k_base, k_rows, ok, D, D0, D1, COPY)
            if not V_IN_K:
                copy_keys(v0_ring, slot, v_base, v_rows, ok, DV, 0, DV0, COPY)
                if DV1 > 0:
                    copy_keys(v1_ring, slot, v_base, v_rows, ok, DV, DV0, DV1, COPY)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
        left -= taken
        sequence = next_sequence
        step = step * 0


@gluon.jit
def _consume(
    q_ptr, out_ptr, lse_ptr, part_ptr, counter_ptr, tables_ptr, seq_lens_ptr, cu_ptr, slopes_ptr, sinks_ptr, steps_ptr,
    sequence, row_tile, step, left, share, long_steps, short, long, piece, pieces, kv_head, score_scale, value_scale, softcap, window,
    tokens, sequences, q_len, pages, max_keys, slots, num_kv_heads, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_bt,
    k0_ring, k1_ring, v0_ring, v1_ring, k0_wide, k1_wide, v0_wide, v1_wide, q0_smem, q1_smem, p_smem, peaks, full, empty,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, DV0: gl.constexpr, DV1: gl.constexpr,
    G: gl.constexpr, TOKEN_ROWS: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_IN_K: gl.constexpr,
    MERGE_ROWS: gl.constexpr, MERGE_BATCH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles of the piece as they arrive; write results and partials."""
    KV: gl.constexpr = k0_ring.dtype
    CONVERT: gl.constexpr = KV.primitive_bitwidth == 8
    DOT: gl.constexpr = p_smem.dtype
    RESCALE: gl.constexpr = CONVERT and q_ptr.dtype.element_ty == gl.bfloat16
    WHOLE: gl.constexpr = q0_smem.dtype == gl.float8e4nv
    # 8 elements a thread also where they have 8 bits: the wide stores then meet no bank twice.
    WIDEN: gl.constexpr = copy_layout(D0, 2, WARPS)
    QUERY: gl.constexpr = copy_layout(D0, 2, WARPS)
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    TERMS: gl.constexpr = 2 if WHOLE else 1
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TERMS * BLOCK_M, 16 * TERMS])
    KEY: gl.constexpr = gl.SliceLayout(1, SCORE)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORE)
    SEEN: gl.constexpr = seen_layout(WARPS, BLOCK_M)
    SPREAD: gl.constexpr = spread_layout(WARPS, BLOCK_M, False)
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
        row_scale = gl.full([BLOCK_M], 1.0, gl.float32, ROW)
        if RESCALE:
            # Power of two of the largest element of each row: inf for a row that holds one, so that its scores are NaN.
            size = gl.max(gl.abs(q0.to(gl.float32)), 1)
            if D1 > 0:
                size = gl.maximum(size, gl.max(gl.abs(q1.to(gl.float32)), 1))
            power = (size.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
            power = gl.where(power > 1e-30, power, 1.0)
            if WHOLE:
                power = power * 0.0078125  # 2 ** -7: e4m3 reaches 448
                store_terms(q0.to(gl.float32) / power[:, None], q0_smem, BLOCK_M)
                if D1 > 0:
                    store_terms(q1.to(gl.float32) / power[:, None], q1_smem, BLOCK_M)
            else:
                q0_smem.store((q0.to(gl.float32) / power[:, None]).to(DOT))
                if D1 > 0:
                    q1_smem.store((q1.to(gl.float32) / power[:, None]).to(DOT))
            row_scale = gl.convert_layout(power, ROW)
        else:
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
        spread_peak = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(0, SPREAD))
        total = gl.zeros([TILE, BLOCK_M], gl.float32, SCORE)
        acc0 = gl.zeros([DV0, BLOCK_M], gl.float32, SCORE)
        acc1 = gl.zeros([DV1 if DV1 > 0 else 64, BLOCK_M], gl.float32, SCORE)

        for at in range(tile, tile + tiles):
            page = next_page
            next_page = load_page_ids(table, at + 1, room, P, KEY)
            key = at * TILE + gl.arange(0, TILE, KEY)
            visible = readable_keys(page, at, first, last, pages, KEY)[:, None] & (key[:, None] <= position[None, :])
            if window is not None:
                visible = visible & (position[None, :] - key[:, None] < window)
            mbarrier.wait(full.index(slot), phase)
            if CONVERT and not WHOLE:
                convert_tile(k0_ring.index(slot), k0_wide, WIDEN)
                if D1 > 0:
                    convert_tile(k1_ring.index(slot), k1_wide, WIDEN)
                fence_async_shared()
                barrier()
            else:
                fence_async_shared()
            k0 = k0_wide if CONVERT and not WHOLE else k0_ring.index(slot)
            zero = gl.zeros([TILE, TERMS * BLOCK_M], gl.float32, PRODUCT)
            scores = warpgroup_mma(k0, q0_smem.permute([1, 0]), zero, use_acc=False, is_async=True)
            if D1 > 0:
                k1 = k1_wide if CONVERT and not WHOLE else k1_ring.index(slot)
                scores = warpgroup_mma(k1, q1_smem.permute([1, 0]), scores, is_async=True)
            if CONVERT:  # while the scores are computed
                if not V_IN_K:
                    convert_tile(v0_ring.index(slot), v0_wide, WIDEN)
                    if DV1 > 0:
                        convert_tile(v1_ring.index(slot), v1_wide, WIDEN)
                elif WHOLE:
                    convert_tile(k0_ring.index(slot), k0_wide, WIDEN)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if WHOLE:  # both terms of a row are in one thread
                scores = gl.convert_layout(gl.sum(gl.reshape(scores, [TILE, TERMS, BLOCK_M]), 1), SCORE)
            if RESCALE:
                scores = scores * row_scale[None, :]
            if softcap is not None:
                scores = soft_cap(scores * score_scale, softcap) * _LOG2E
            else:
                scores = scores * (score_scale * _LOG2E)
            if slopes_ptr is not None:
                scores -= slope[None, :] * (position[None, :] - key[:, None]).to(gl.float32)
            scores = gl.where(visible, scores, float("-inf"))
            base = gl.where(peak == float("-inf"), 0.0, peak)
            p = gl.exp2(scores - base[None, :])
            # Each warp's own maximum: for all of them to agree on one first would cost a barrier and the wait for it.
            seen = peaks.index(at & 1)
            seen.store(gl.max(gl.reshape(scores, [WARPS, TILE // WARPS, BLOCK_M]), 1))
            p_smem.store(p.to(DOT))
            fence_async_shared()
            barrier()
            spread = seen.load(SPREAD)
            if CONVERT:
                mbarrier.arrive(empty.index(slot), count=1)
            if any_grown(spread, gl.expand_dims(spread_peak, 0)):
                newest = gl.convert_layout(gl.max(seen.load(SEEN), 0), ROW)
                newest = gl.where(newest > peak + GROWTH, newest, peak)
                base = gl.where(newest == float("-inf"), 0.0, newest)
                alpha = gl.exp2(peak - base)
                p = gl.exp2(scores - base[None, :])
                total = total * alpha[None, :]
                acc0 = acc0 * alpha[None, :]
                if DV1 > 0:
                    acc1 = acc1 * alpha[None, :]
                peak = newest
                spread_peak = gl.convert_layout(peak, gl.SliceLayout(0, SPREAD))
                p_smem.store(p.to(DOT))
                fence_async_shared()
                barrier()
            total += p
            v0 = (k0_wide if V_IN_K else v0_wide) if CONVERT else (k0_ring.index(slot) if V_IN_K else v0_ring.index(slot))
            acc0 = warpgroup_mma(v0.permute([1, 0]), p_smem, acc0, is_async=True)
            if DV1 > 0:
                v1 = v1_wide if CONVERT else v1_ring.index(slot)
                acc1 = warpgroup_mma(v1.permute([1, 0]), p_smem, acc1, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            if not CONVERT:
                barrier()
                mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1

        amount = gl.sum(total, 0)
        divisor = gl.where(amount == 0.0, 1.0, amount)
        lse = gl.where(amount == 0.0, float("-inf"), peak + gl.log2(divisor))
        lses = part_ptr + slots.to(gl.int64) * num_kv_heads * (BLOCK_M * DV)
        if whole:
            factor, result = apply_sinks(lse, sinks_ptr, head, row_ok)
            if lse_ptr is not None:
                gl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)
            factor = factor * value_scale / divisor
            rows = token * stride_ot + head * stride_oh
            store_rows(out_ptr, rows, row_ok, acc0 * factor[None, :], DV, 0, DV0, SCORE)
            if DV1 > 0:
                store_rows(out_ptr, rows, row_ok, acc1 * factor[None, :], DV, DV0, DV1, SCORE)
        else:
            factor = 1.0 / divisor
            place = 2 * piece + (step == 0).to(gl.int32)
            part = place.to(gl.int64) * num_kv_heads + kv_head
            part_row = gl.arange(0, BLOCK_M, ROW)
            rows = (part_row * DV).to(gl.int64)
            outs = part_ptr + part * (BLOCK_M * DV)
            store_rows(outs, rows, row_ok, acc0 * factor[None, :], DV, 0, DV0, SCORE)
            if DV1 > 0:
                store_rows(outs, rows, row_ok, acc1 * factor[None, :], DV, DV0, DV1, SCORE)
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


@gluon.jit(do_not_specialize=VARYING)
def decode_hopper_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, counter_ptr, plan_ptr, seq_lens_ptr, tables_ptr, cu_ptr,
    slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    score_scale, value_scale, softcap, window,
    tokens, sequences, q_len, pages, max_keys, pieces, slots, num_kv_heads,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_lt, stride_bt, stride_ksh, stride_vsh,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, DV0: gl.constexpr, DV1: gl.constexpr,
    G: gl.constexpr, TOKEN_ROWS: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_IN_K: gl.constexpr,
    MERGE_ROWS: gl.constexpr, MERGE_BATCH: gl.constexpr, COPY_WARPS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    WIDE: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Program i serves piece `i // Hkv` and kv head `i % Hkv`: the heads of a page are read at about the same time."""
    KV: gl.constexpr = k_ptr.dtype.element_ty
    KV_BYTES: gl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    DOT: gl.constexpr = gl.float16 if KV_BYTES == 1 else q_ptr.dtype.element_ty
    WHOLE: gl.constexpr = k_ptr.dtype.element_ty == gl.float8e4nv and q_ptr.dtype.element_ty == gl.bfloat16
    QUERY: gl.constexpr = gl.float8e4nv if WHOLE else DOT
    TERMS: gl.constexpr = 2 if WHOLE else 1
    k0_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, D0], key_layout(D0, KV_BYTES, WHOLE))
    q0_smem = gl.allocate_shared_memory(QUERY, [TERMS * BLOCK_M, D0], key_layout(D0, KV_BYTES, WHOLE) if WHOLE else operand_layout(D0))
    p_smem = gl.allocate_shared_memory(DOT, [TILE, BLOCK_M], operand_layout(BLOCK_M))
    peaks = gl.allocate_shared_memory(
        gl.float32, [2, BLOCK_M, num_warps // 4] if WIDE else [2, num_warps, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    k1_ring = k0_ring
    q1_smem = q0_smem
    if D1 > 0:
        k1_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, D1], key_layout(D1, KV_BYTES, WHOLE))
        q1_smem = gl.allocate_shared_memory(QUERY, [TERMS * BLOCK_M, D1], key_layout(D1, KV_BYTES, WHOLE) if WHOLE else operand_layout(D1))
    v0_ring = k0_ring
    v1_ring = k0_ring
    if not V_IN_K:
        v0_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, DV0], staging_layout(DV0, KV_BYTES))
        if DV1 > 0:
            v1_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, DV1], staging_layout(DV1, KV_BYTES))
    k0_wide = k0_ring
    k1_wide = k0_ring
    v0_wide = k0_ring
    v1_wide = k0_ring
    if KV_BYTES == 1:
        if V_IN_K or not WHOLE:
            k0_wide = gl.allocate_shared_memory(DOT, [TILE, D0], operand_layout(D0))
        if D1 > 0 and not WHOLE:
            k1_wide = gl.allocate_shared_memory(DOT, [TILE, D1], operand_layout(D1))
        if not V_IN_K:
            v0_wide = gl.allocate_shared_memory(DOT, [TILE, DV0], operand_layout(DV0))
            if DV1 > 0:
                v1_wide = gl.allocate_shared_memory(DOT, [TILE, DV1], operand_layout(DV1))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * COPY_WARPS)
        mbarrier.init(empty.index(i), count=1)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    piece = gl.program_id(0) // num_kv_heads
    kv_head = (gl.program_id(0) % num_kv_heads).to(gl.int64)
    share = gl.load(plan_ptr)
    long_steps = gl.load(plan_ptr + 1)
    short = gl.load(plan_ptr + 2)
    long = gl.load(plan_ptr + 3)
    record = plan_ptr + _HEADER + piece * _RECORD
    sequence = gl.load(record)
    row_tile = gl.load(record + 1)
    step = gl.load(record + 2)
    left = gl.load(record + 3)
    steps_ptr = plan_ptr + _HEADER + pieces * _RECORD
    if k_scale_ptr is not None:
        score_scale *= gl.load(k_scale_ptr + kv_head * stride_ksh)
    if v_scale_ptr is not None:
        value_scale *= gl.load(v_scale_ptr + kv_head * stride_vsh)
    gl.warp_specialize(
        [
            (
                consume_wide if WIDE else _consume,
                (
                    q_ptr, out_ptr, lse_ptr, part_ptr, counter_ptr, tables_ptr, seq_lens_ptr, cu_ptr, slopes_ptr, sinks_ptr, steps_ptr,
                    sequence, row_tile, step, left, share, long_steps, short, long, piece, pieces, kv_head, score_scale, value_scale, softcap, window,
                    tokens, sequences, q_len, pages, max_keys, slots, num_kv_heads, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_bt,
                    k0_ring, k1_ring, v0_ring, v1_ring, k0_wide, k1_wide, v0_wide, v1_wide, q0_smem, q1_smem, p_smem, peaks, full, empty,
                    D, D0, D1, DV, DV0, DV1, G, TOKEN_ROWS, P, BLOCK_M, STAGES, V_IN_K, MERGE_ROWS, MERGE_BATCH, num_warps,
                ),
            ),
            (
                _produce,
                (
                    k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, tables_ptr, seq_lens_ptr, cu_ptr, steps_ptr,
                    sequence, row_tile, step, left,
                    window, tokens, sequences, q_len, pages, max_keys, stride_kp, stride_kt, stride_vp, stride_vt, stride_bt,
                    k0_ring, k1_ring, v0_ring, v1_ring, full, empty,
                    D, D0, D1, DV, DV0, DV1, TOKEN_ROWS, P, BLOCK_M, STAGES, V_IN_K, WIDE or not V_IN_K, COPY_WARPS,
                ),
            ),
        ],
        [COPY_WARPS],
        [COPY_REGISTERS],
    )  # fmt: skip
