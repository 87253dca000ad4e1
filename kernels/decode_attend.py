# mypy: allow-untyped-defs
"""The inner loop of `flash_decode`: one unit of packed query rows against a run of its keys.

Scores are computed transposed, keys x rows: K fills the 64 rows that a matrix instruction of Hopper wants and comes from
shared memory, and the few query rows are its narrow side, so a group of 4 heads wastes little. The output is kept
transposed as well. Running maximum, sum and output follow Flash-Attention (Dao et al., 2022) in the base-2 domain; the
sum is kept per key of the tile and added up once at the end.

With AHEAD, page ids are loaded one tile ahead of the keys that they address: keys and values are then fetched by
asynchronous copies several tiles ahead (the compiler's software pipeline), at any page size. They are loaded twice, once
in the order in which the copies need them, once in that of the scores: an exchange between the two would cost a barrier.
That is for 16-bit caches without a tree mask, of which K and V are both copied in 16 bytes; where one is not, its loads stay in another stage of the
pipeline, and ids carried from tile to tile do not reach both. Keys that must not be seen are never loaded, V included:
0 * NaN is NaN.

A head dim is cut into a power of two and a masked rest (D0 + D1, DV0 + DV1), so that 80 costs 64 + 16. All arithmetic
but the operands of `tl.dot` is fp32; DOT is fp32 too under the interpreter, which computes bf16 wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.numerics import _LOG2E, apply_tanh, normalise

__all__ = ["attend"]


@triton.jit
def _head_offsets(d, stride_x, SPLIT_X: tl.constexpr):
    """Offsets of the elements `d` of a key: contiguous, or split into groups of SPLIT_X."""
    return d if SPLIT_X == 0 else (d // SPLIT_X).to(tl.int64) * stride_x + d % SPLIT_X


@triton.jit
def attend(
    begin, end, first, last, block_start, row_start, row_ok, position, slope,
    q0, q1, k_base, v_base, table, tree_ptr, depth_ptr, k_scale_base, v_scale_base,
    score_scale, softcap, window, pages, tree_cols, stride_tree, tree_row,
    stride_kp, stride_kt, stride_kx, stride_vp, stride_vt, stride_vd, stride_ksp, stride_kst, stride_vsp, stride_vst,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    P: tl.constexpr, SPLIT_X: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, DOT: tl.constexpr, V_IN_K: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys from `begin` to `end`, looking only at keys in [first, last).

    `q0` (D0, BLOCK_M) and `q1` (D1, BLOCK_M) are the transposed rows. With V_IN_K the values are the first DV0
    elements of the keys (MLA) and are not loaded again. Returns the base-2 log-sum-exp (BLOCK_M,) and the normalised
    output, transposed: (DV0, BLOCK_M), (DV1, BLOCK_M).
    """
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE, BLOCK_M), tl.float32)
    acc0 = tl.zeros((DV0, BLOCK_M), tl.float32)
    acc1 = tl.zeros((DV1 if DV1 > 0 else 16, BLOCK_M), tl.float32)
    k_off0 = _head_offsets(tl.arange(0, D0), stride_kx, SPLIT_X)
    v_d0 = tl.arange(0, DV0)
    last = tl.minimum(last, end)
    key = begin + tl.arange(0, TILE)
    next_page = tl.load(table + key // P, mask=(key >= first) & (key < last), other=-1)
    next_seen = next_page
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        if AHEAD:
            page = next_page
            seen = next_seen
            ahead = key + TILE
            next_page = tl.load(table + ahead // P, mask=(ahead >= first) & (ahead < last), other=-1)
            next_seen = tl.load(table + ahead // P, mask=(ahead >= first) & (ahead < last), other=-1)
        else:
            page = tl.load(table + key // P, mask=(key >= first) & (key < last), other=-1)
            seen = page
        load = (page >= 0) & (page < pages)
        inside = (seen >= 0) & (seen < pages)
        offset = (key % P).to(tl.int64)
        k_rows = k_base + (page.to(tl.int64) * stride_kp + offset * stride_kt)
        k0 = tl.load(k_rows[:, None] + k_off0[None, :], mask=load[:, None], other=0.0).to(DOT)
        scores = tl.dot(k0, q0, input_precision="ieee")
        if D1 > 0:
            k_d1 = D0 + tl.arange(0, D1)
            k1 = tl.load(k_rows[:, None] + _head_offsets(k_d1, stride_kx, SPLIT_X)[None, :], mask=load[:, None] & (k_d1 < D)[None, :], other=0.0)
            scores = tl.dot(k1.to(DOT), q1, acc=scores, input_precision="ieee")
        scores *= score_scale
        if k_scale_base is not None:
            k_scales = k_scale_base + (seen.to(tl.int64) * stride_ksp + (key % P).to(tl.int64) * stride_kst)
            scores *= tl.load(k_scales, mask=inside, other=0.0)[:, None]
        if softcap is not None:
            scores = softcap * apply_tanh(scores / softcap)
        scores *= _LOG2E
        key_position = key
        if tree_ptr is None:
            visible = inside[:, None] & (key[:, None] <= position[None, :])
        else:
            draft = key - block_start
            in_block = inside & (draft >= 0) & (draft < tree_cols)
            allowed = tl.load(tree_ptr + tree_row[None, :] * stride_tree + draft[:, None], mask=row_ok[None, :] & in_block[:, None], other=0)
            visible = row_ok[None, :] & inside[:, None] & ((draft < 0)[:, None] | (allowed != 0))
            if depth_ptr is not None:
                key_position = tl.where(draft < 0, key, block_start + tl.load(depth_ptr + row_start + draft, mask=in_block, other=0))
        if slope is not None:
            scores -= (slope[None, :] * _LOG2E) * (position[None, :] - key_position[:, None]).to(tl.float32)
        if window is not None:
            visible = visible & (position[None, :] - key_position[:, None] < window)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores - base[None, :])
        alpha = tl.exp2(peak - base)
        total = total * alpha[None, :] + p
        peak = new_peak
        p = p.to(DOT)
        if V_IN_K:
            acc0 = tl.dot(tl.trans(k0), p, acc=acc0 * alpha[None, :], input_precision="ieee")
        else:
            if tree_ptr is not None:
                # A draft key that no row sees may hold anything.
                load = load & (tl.max(visible.to(tl.int32), 1) > 0)
            v_rows = v_base + (page.to(tl.int64) * stride_vp + offset * stride_vt)
            v0 = tl.load(v_rows[:, None] + (v_d0.to(tl.int64) * stride_vd)[None, :], mask=load[:, None], other=0.0)
            if v_scale_base is not None:
                # Applied to V, not to p: a small scale would underflow p in fp16.
                v_scale = tl.load(v_scale_base + (page.to(tl.int64) * stride_vsp + offset * stride_vst), mask=load, other=0.0)
                v0 = v0.to(tl.float32) * v_scale[:, None]
            acc0 = tl.dot(tl.trans(v0.to(DOT)), p, acc=acc0 * alpha[None, :], input_precision="ieee")
            if DV1 > 0:
                v_d1 = DV0 + tl.arange(0, DV1)
                v1 = tl.load(v_rows[:, None] + (v_d1.to(tl.int64) * stride_vd)[None, :], mask=load[:, None] & (v_d1 < DV)[None, :], other=0.0)
                if v_scale_base is not None:
                    v1 = v1.to(tl.float32) * v_scale[:, None]
                acc1 = tl.dot(tl.trans(v1.to(DOT)), p, acc=acc1 * alpha[None, :], input_precision="ieee")
    divisor, lse = normalise(peak, tl.sum(total, 0))
    acc0 = tl.div_rn(acc0, tl.broadcast_to(divisor[None, :], acc0.shape))
    if DV1 > 0:
        acc1 = tl.div_rn(acc1, tl.broadcast_to(divisor[None, :], acc1.shape))
    return lse, acc0, acc1
