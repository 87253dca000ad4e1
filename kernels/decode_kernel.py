# mypy: allow-untyped-defs
"""Main kernel of `flash_decode`: attention of packed query rows against the keys of one item of the partition.

One program takes a tile of BLOCK_M rows (token, head of one kv group) of one sequence and a run of its keys, and keeps
the running maximum, sum and output of Flash-Attention in the base-2 domain (Dao et al., 2022; Flash-Decoding for the
split over keys). A program of an unsplit unit writes the result; others write a normalised partial and its base-2
log-sum-exp for `decode_reduce`.

A head dim is cut into a power of two and a masked rest (D0 + D1, DV0 + DV1), so that 80 costs 64 + 16. Page ids are
loaded as a vector per tile, for any page size. Keys that must not be seen are never loaded, V included: 0 * NaN is NaN.
All arithmetic but the operands of `tl.dot` is fp32; UPCAST makes those fp32 too (the interpreter computes bf16 wrongly).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.decode_plan import HEADER, ITEM
from hal.kernels.numerics import _LOG2E, apply_tanh, finish, merge_weights, normalise

__all__ = ["VARYING", "decode_kernel"]

#: Integers that change from call to call: no variant of the kernel may depend on their value.
VARYING = [
    "window", "tokens", "sequences", "q_len", "pages", "max_keys", "row_tiles", "max_items", "max_slots", "num_kv_heads",
    "stride_bt", "stride_tree", "tree_cols",
]  # fmt: skip


@triton.jit
def _head_offsets(d, stride_x, SPLIT_X: tl.constexpr):
    """Offsets of the elements `d` of a key: contiguous, or split into groups of SPLIT_X."""
    return d.to(tl.int64) if SPLIT_X == 0 else (d // SPLIT_X).to(tl.int64) * stride_x + d % SPLIT_X


@triton.jit
def _attend(
    begin, end, first, last, block_start, row_start, row_ok, position, slope,
    q0, q1, k_base, v_base, table, tree_ptr, depth_ptr, k_scale_base, v_scale_base,
    score_scale, softcap, window, pages, tree_cols, stride_tree, tree_row,
    stride_kp, stride_kt, stride_kx, stride_vp, stride_vt, stride_vd, stride_ksp, stride_kst, stride_vsp, stride_vst,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    P: tl.constexpr, SPLIT_X: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys from `begin` to `end` (multiples of TILE), looking only at keys in [first, last)."""
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((BLOCK_M, DV0), tl.float32)
    acc1 = tl.zeros((BLOCK_M, DV1 if DV1 > 0 else 16), tl.float32)
    k_off0 = _head_offsets(tl.arange(0, D0), stride_kx, SPLIT_X)
    v_d0 = tl.arange(0, DV0)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        inside = (key >= first) & (key < last)
        page = tl.load(table + key // P, mask=inside, other=-1)
        inside = inside & (page >= 0) & (page < pages)
        page = page.to(tl.int64)
        offset = (key % P).to(tl.int64)
        k_ptrs = k_base + page * stride_kp + offset * stride_kt
        scores = tl.dot(q0, tl.load(k_ptrs[None, :] + k_off0[:, None], mask=inside[None, :], other=0.0).to(DOT), input_precision="ieee")
        if D1 > 0:
            k_d1 = D0 + tl.arange(0, D1)
            k1 = tl.load(k_ptrs[None, :] + _head_offsets(k_d1, stride_kx, SPLIT_X)[:, None], mask=inside[None, :] & (k_d1 < D)[:, None], other=0.0)
            scores = tl.dot(q1, k1.to(DOT), acc=scores, input_precision="ieee")
        scores *= score_scale
        if k_scale_base is not None:
            scores *= tl.load(k_scale_base + page * stride_ksp + offset * stride_kst, mask=inside, other=0.0)[None, :]
        if softcap is not None:
            scores = softcap * apply_tanh(scores / softcap)
        scores *= _LOG2E
        key_position = key
        if tree_ptr is None:
            visible = inside[None, :] & (key[None, :] <= position[:, None])
        else:
            draft = key - block_start
            in_block = inside & (draft >= 0) & (draft < tree_cols)
            allowed = tl.load(tree_ptr + tree_row[:, None] * stride_tree + draft[None, :], mask=row_ok[:, None] & in_block[None, :], other=0)
            visible = row_ok[:, None] & inside[None, :] & ((draft < 0)[None, :] | (allowed != 0))
            if depth_ptr is not None:
                key_position = tl.where(draft < 0, key, block_start + tl.load(depth_ptr + row_start + draft, mask=in_block, other=0))
        if slope is not None:
            scores -= (slope[:, None] * _LOG2E) * (position[:, None] - key_position[None, :]).to(tl.float32)
        if window is not None:
            visible = visible & (position[:, None] - key_position[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores - base[:, None])
        alpha = tl.exp2(peak - base)
        total = total * alpha + tl.sum(p, 1)
        peak = new_peak
        acc0 = acc0 * alpha[:, None]
        if tree_ptr is not None:
            # A draft key that no row sees may hold anything.
            inside = inside & (tl.max(visible.to(tl.int32), 0) > 0)
        v_ptrs = v_base + page * stride_vp + offset * stride_vt
        v0 = tl.load(v_ptrs[:, None] + (v_d0.to(tl.int64) * stride_vd)[None, :], mask=inside[:, None], other=0.0)
        if v_scale_base is not None:
            # Applied to V, not to p: a small scale would underflow p in fp16.
            v_scale = tl.load(v_scale_base + page * stride_vsp + offset * stride_vst, mask=inside, other=0.0)
            v0 = v0.to(tl.float32) * v_scale[:, None]
        p = p.to(DOT)
        acc0 = tl.dot(p, v0.to(DOT), acc=acc0, input_precision="ieee")
        if DV1 > 0:
            v_d1 = DV0 + tl.arange(0, DV1)
            v1 = tl.load(v_ptrs[:, None] + (v_d1.to(tl.int64) * stride_vd)[None, :], mask=inside[:, None] & (v_d1 < DV)[None, :], other=0.0)
            if v_scale_base is not None:
                v1 = v1.to(tl.float32) * v_scale[:, None]
            acc1 = tl.dot(p, v1.to(DOT), acc=acc1 * alpha[:, None], input_precision="ieee")
    divisor, lse = normalise(peak, total)
    acc0 = tl.div_rn(acc0, tl.broadcast_to(divisor[:, None], acc0.shape))
    if DV1 > 0:
        acc1 = tl.div_rn(acc1, tl.broadcast_to(divisor[:, None], acc1.shape))
    return lse, acc0, acc1


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, plan_ptr, seq_lens_ptr, tables_ptr, cu_ptr,
    slopes_ptr, sinks_ptr, tree_ptr, depth_ptr, k_scale_ptr, v_scale_ptr,
    score_scale, value_scale, softcap, window,
    tokens, sequences, q_len, pages, max_keys, row_tiles, max_items, max_slots, num_kv_heads,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_kx, stride_vp, stride_vt, stride_vh, stride_vd,
    stride_ot, stride_oh, stride_lt, stride_bt, stride_tree, tree_cols,
    stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    G: tl.constexpr, TOKEN_ROWS: tl.constexpr, P: tl.constexpr, SPLIT_X: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    K_TOKEN_SCALE: tl.constexpr, V_TOKEN_SCALE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program i serves item `i // Hkv` and kv head `i % Hkv`; programs beyond the items return at once."""
    item = tl.program_id(0) // num_kv_heads
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    if plan_ptr is None:
        sequence = item // row_tiles
        row_tile = item % row_tiles
        split, splits, slot = 0, 1, item
    else:
        if item >= tl.load(plan_ptr):
            return
        record = plan_ptr + HEADER + item * ITEM
        sequence = tl.load(record)
        row_tile = tl.load(record + 1)
        split = tl.load(record + 2)
        splits = tl.load(record + 3)
        slot = tl.load(record + 4)

    real = sequence < sequences
    if cu_ptr is None:
        row_start = sequence * q_len
        queries = q_len
    else:
        row_start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), tokens)
        row_end = tl.load(cu_ptr + sequence + 1, mask=real, other=tokens)
        queries = tl.minimum(tl.maximum(row_end, row_start), tokens) - row_start
    keys = tl.load(seq_lens_ptr + sequence, mask=real, other=0)
    keys = tl.minimum(tl.maximum(keys, 0), max_keys)

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
    query = row // TOKEN_ROWS
    token = (row_start + query).to(tl.int64)
    head = kv_head * G + row % TOKEN_ROWS
    block_start = keys - queries
    if depth_ptr is None:
        position = tl.where(row_ok, block_start + query, -1)
    else:
        position = tl.where(row_ok, block_start + tl.load(depth_ptr + token, mask=row_ok, other=0), -1)
    first = 0
    if window is not None:
        first = tl.minimum(tl.maximum(block_start - window + 1, 0), keys)
    last = keys
    if tree_ptr is None:
        # No row of this tile sees beyond its own last token.
        last = tl.minimum(tl.maximum(block_start + (row_tile * BLOCK_M + BLOCK_M - 1) // TOKEN_ROWS + 1, 0), keys)

    DOT: tl.constexpr = tl.float32 if UPCAST else q_ptr.dtype.element_ty
    q_rows = q_ptr + token * stride_qt + head * stride_qh
    q0 = tl.load(q_rows[:, None] + tl.arange(0, D0)[None, :], mask=row_ok[:, None], other=0.0).to(DOT)
    q1 = q0
    if D1 > 0:
        q_d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(q_rows[:, None] + q_d1[None, :], mask=row_ok[:, None] & (q_d1 < D)[None, :], other=0.0).to(DOT)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=row_ok, other=0.0)

    k_token_scale = None
    if K_TOKEN_SCALE:
        k_token_scale = k_scale_ptr + kv_head * stride_ksh
    elif k_scale_ptr is not None:
        score_scale *= tl.load(k_scale_ptr + kv_head * stride_ksh)
    v_token_scale = None
    if V_TOKEN_SCALE:
        v_token_scale = v_scale_ptr + kv_head * stride_vsh
    elif v_scale_ptr is not None:
        value_scale *= tl.load(v_scale_ptr + kv_head * stride_vsh)

    k_base = k_ptr + kv_head * stride_kh
    v_base = v_ptr + kv_head * stride_vh
    table = tables_ptr + sequence.to(tl.int64) * stride_bt
    if CHUNK == 0:
        tile_first = first // TILE
        tile_last = tl.cdiv(last, TILE)
        tile_share = tl.cdiv(tl.maximum(tile_last - tile_first, 0), splits)
        begin = tile_first + split * tile_share
        end = tl.minimum(begin + tile_share, tile_last)
        lse, acc0, acc1 = _attend(
            begin * TILE, end * TILE, first, last, block_start, row_start, row_ok, position, slope,
            q0, q1, k_base, v_base, table, tree_ptr, depth_ptr, k_token_scale, v_token_scale,
            score_scale, softcap, window, pages, tree_cols, stride_tree, token,
            stride_kp, stride_kt, stride_kx, stride_vp, stride_vt, stride_vd, stride_ksp, stride_kst, stride_vsp, stride_vst,
            D, D0, D1, DV, DV0, DV1, P, SPLIT_X, TILE, BLOCK_M, DOT,
        )  # fmt: skip
    else:
        # Batch-invariant: every chunk of an absolute grid is summed up by itself and merged in order, here or in the reduction.
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc0 = tl.zeros((BLOCK_M, DV0), tl.float32)
        acc1 = tl.zeros((BLOCK_M, DV1 if DV1 > 0 else 16), tl.float32)
        chunk_begin = first // CHUNK + split
        chunk_end = tl.cdiv(last, CHUNK)
        if split < splits - 1:
            chunk_end = tl.minimum(chunk_begin + 1, chunk_end)
        for chunk in range(chunk_begin, chunk_end):
            chunk_lse, chunk0, chunk1 = _attend(
                chunk * CHUNK, chunk * CHUNK + CHUNK, first, last, block_start, row_start, row_ok, position, slope,
                q0, q1, k_base, v_base, table, tree_ptr, depth_ptr, k_token_scale, v_token_scale,
                score_scale, softcap, window, pages, tree_cols, stride_tree, token,
                stride_kp, stride_kt, stride_kx, stride_vp, stride_vt, stride_vd, stride_ksp, stride_kst, stride_vsp, stride_vst,
                D, D0, D1, DV, DV0, DV1, P, SPLIT_X, TILE, BLOCK_M, DOT,
            )  # fmt: skip
            peak, old, new = merge_weights(peak, chunk_lse)
            total = total * old + new
            acc0 = acc0 * old[:, None] + chunk0 * new[:, None]
            if DV1 > 0:
                acc1 = acc1 * old[:, None] + chunk1 * new[:, None]
        divisor, lse = normalise(peak, total)
        acc0 = tl.div_rn(acc0, tl.broadcast_to(divisor[:, None], acc0.shape))
        if DV1 > 0:
            acc1 = tl.div_rn(acc1, tl.broadcast_to(divisor[:, None], acc1.shape))

    v_d1 = DV0 + tl.arange(0, DV1 if DV1 > 0 else 16)
    if splits > 1:
        part = slot.to(tl.int64) * num_kv_heads + kv_head
        part_row = row % BLOCK_M
        rows = part_ptr + part * (BLOCK_M * DV)
        tl.store(rows + part_row[:, None] * DV + tl.arange(0, DV0)[None, :], acc0)
        if DV1 > 0:
            tl.store(rows + part_row[:, None] * DV + v_d1[None, :], acc1, mask=(v_d1 < DV)[None, :] & (part_row >= 0)[:, None])
        lses = part_ptr + (max_slots.to(tl.int64) * num_kv_heads) * (BLOCK_M * DV) + part * BLOCK_M
        tl.store(lses + part_row, lse)
    else:
        factor, result = finish(lse, sinks_ptr, head, row_ok)
        factor *= value_scale
        out_rows = out_ptr + token * stride_ot + head * stride_oh
        tl.store(out_rows[:, None] + tl.arange(0, DV0)[None, :], (acc0 * factor[:, None]).to(out_ptr.dtype.element_ty), mask=row_ok[:, None])
        if DV1 > 0:
            tl.store(
                out_rows[:, None] + v_d1[None, :],
                (acc1 * factor[:, None]).to(out_ptr.dtype.element_ty),
                mask=row_ok[:, None] & (v_d1 < DV)[None, :],
            )
        if lse_ptr is not None:
            tl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)
