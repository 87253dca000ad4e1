# mypy: allow-untyped-defs
"""Main kernel of `flash_decode`: one program per piece of the partition and kv head.

A program walks through the units of its piece. It writes the result of a unit that lies inside the piece, and a
normalised partial with its base-2 log-sum-exp for each unit that a boundary cuts; `decode_reduce` merges those. A
piece leaves at most two partials per kv head: of the unit that it begins in the middle of (slot 2 * piece), and of the
one that it leaves unfinished (slot 2 * piece + 1).

In a batch-invariant call a step is a chunk of an absolute grid of keys, and a cut unit leaves a partial per chunk, in
the slot of the chunk's place in the list of steps. A unit that is not cut merges its chunks as the reduction would, so
that its bits do not depend on being cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.decode_attend import attend
from hal.kernels.decode_partition import HEADER, RECORD, work_of
from hal.kernels.launch import pdl_begin
from hal.kernels.numerics import finish, merge_weights, normalise

__all__ = ["VARYING", "decode_kernel"]

#: Integers that change from call to call: no variant of the kernel may depend on their value.
VARYING = [
    "window", "tokens", "sequences", "q_len", "pages", "max_keys", "pieces", "slots", "num_kv_heads", "stride_bt", "stride_tree", "tree_cols",
]  # fmt: skip


@triton.jit
def _store_partial(
    part_ptr, slot, slots, kv_head, num_kv_heads, row_ok, lse, acc0, acc1,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write a transposed partial to `slot`: outputs of all slots first, then the log-sum-exps."""
    part = slot.to(tl.int64) * num_kv_heads + kv_head
    row = tl.arange(0, BLOCK_M)
    rows = part_ptr + part * (BLOCK_M * DV)
    tl.store(rows + row[None, :] * DV + tl.arange(0, DV0)[:, None], acc0, mask=row_ok[None, :])
    if DV1 > 0:
        d1 = DV0 + tl.arange(0, DV1)
        tl.store(rows + row[None, :] * DV + d1[:, None], acc1, mask=(d1 < DV)[:, None] & row_ok[None, :])
    tl.store(part_ptr + slots.to(tl.int64) * num_kv_heads * (BLOCK_M * DV) + part * BLOCK_M + row, lse, mask=row_ok)


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, plan_ptr, seq_lens_ptr, tables_ptr, cu_ptr,
    slopes_ptr, sinks_ptr, tree_ptr, depth_ptr, k_scale_ptr, v_scale_ptr,
    score_scale, value_scale, softcap, window,
    tokens, sequences, q_len, pages, max_keys, pieces, slots, num_kv_heads,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_kx, stride_vp, stride_vt, stride_vh, stride_vd,
    stride_ot, stride_oh, stride_lt, stride_bt, stride_tree, tree_cols,
    stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    G: tl.constexpr, TOKEN_ROWS: tl.constexpr, P: tl.constexpr, SPLIT_X: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    STEP: tl.constexpr, INVARIANT: tl.constexpr, V_IN_K: tl.constexpr, AHEAD: tl.constexpr,
    K_TOKEN_SCALE: tl.constexpr, V_TOKEN_SCALE: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i serves piece `i // Hkv` and kv head `i % Hkv`: the heads of a page are read at about the same time."""
    pdl_begin(PDL)
    DOT: tl.constexpr = tl.float32 if UPCAST else q_ptr.dtype.element_ty
    piece = tl.program_id(0) // num_kv_heads
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    share = tl.load(plan_ptr)
    record = plan_ptr + HEADER + piece * RECORD
    sequence = tl.load(record)
    row_tile = tl.load(record + 1)
    step = tl.load(record + 2)
    left = tl.load(record + 3)
    if left <= 0:
        return

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
    packed = tl.arange(0, BLOCK_M)
    d0 = tl.arange(0, D0)
    v_d0 = tl.arange(0, DV0)
    v_d1 = DV0 + tl.arange(0, DV1 if DV1 > 0 else 16)
    position_in_list = piece * share  # of the chunk at hand, in a batch-invariant call

    while left > 0:
        row_tiles, steps = work_of(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M, STEP)
        planned = tl.load(plan_ptr + HEADER + pieces * RECORD + sequence)
        if row_tile < row_tiles:
            if cu_ptr is None:
                row_start = sequence * q_len
                queries = q_len
            else:
                row_start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), tokens)
                row_end = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
                queries = tl.minimum(tl.maximum(row_end, row_start), tokens) - row_start
            keys = tl.load(seq_lens_ptr + sequence, mask=sequence < sequences, other=0)
            keys = tl.minimum(tl.maximum(keys, 0), max_keys)
            row = row_tile * BLOCK_M + packed
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
            q_rows = q_ptr + token * stride_qt + head * stride_qh
            q0 = tl.trans(tl.load(q_rows[:, None] + d0[None, :], mask=row_ok[:, None], other=0.0).to(DOT))
            q1 = q0
            if D1 > 0:
                q_d1 = D0 + tl.arange(0, D1)
                q1 = tl.trans(tl.load(q_rows[:, None] + q_d1[None, :], mask=row_ok[:, None] & (q_d1 < D)[None, :], other=0.0).to(DOT))
            slope = None
            if slopes_ptr is not None:
                slope = tl.load(slopes_ptr + head, mask=row_ok, other=0.0)
            table = tables_ptr + sequence.to(tl.int64) * stride_bt

            # Steps [step, stop) of the unit as it was planned; the keys that it has now are divided in proportion.
            stop = tl.minimum(planned, step + left)
            if INVARIANT:  # noqa: SIM102 (the outer one is a constant)
                if share * pieces > slots:  # too many chunks to keep: units are not cut
                    stop = planned
            begin = step
            end = stop
            if planned != steps:
                begin = (step.to(tl.int64) * steps // planned).to(tl.int32)
                end = (stop.to(tl.int64) * steps // planned).to(tl.int32)
            begin += first // STEP
            end += first // STEP
            whole = (step == 0) & (stop == planned)
            if not INVARIANT:
                lse, acc0, acc1 = attend(
                    begin * STEP, end * STEP, first, last, block_start, row_start, row_ok, position, slope,
                    q0, q1, k_base, v_base, table, tree_ptr, depth_ptr, k_token_scale, v_token_scale,
                    score_scale, softcap, window, pages, tree_cols, stride_tree, token,
                    stride_kp, stride_kt, stride_kx, stride_vp, stride_vt, stride_vd, stride_ksp, stride_kst, stride_vsp, stride_vst,
                    D, D0, D1, DV, DV0, DV1, P, SPLIT_X, TILE, BLOCK_M, DOT, V_IN_K, AHEAD,
                )  # fmt: skip
                if not whole:
                    slot = 2 * piece + (step == 0).to(tl.int32)
                    _store_partial(part_ptr, slot, slots, kv_head, num_kv_heads, row_ok, lse, acc0, acc1, DV, DV0, DV1, BLOCK_M)
            else:
                peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
                acc0 = tl.zeros((DV0, BLOCK_M), tl.float32)
                acc1 = tl.zeros((DV1 if DV1 > 0 else 16, BLOCK_M), tl.float32)
                for chunk in range(begin, end):
                    chunk_lse, chunk0, chunk1 = attend(
                        chunk * STEP, chunk * STEP + STEP, first, last, block_start, row_start, row_ok, position, slope,
                        q0, q1, k_base, v_base, table, tree_ptr, depth_ptr, k_token_scale, v_token_scale,
                        score_scale, softcap, window, pages, tree_cols, stride_tree, token,
                        stride_kp, stride_kt, stride_kx, stride_vp, stride_vt, stride_vd, stride_ksp, stride_kst, stride_vsp, stride_vst,
                        D, D0, D1, DV, DV0, DV1, P, SPLIT_X, TILE, BLOCK_M, DOT, V_IN_K, AHEAD,
                    )  # fmt: skip
                    if whole:
                        peak, old, new = merge_weights(peak, chunk_lse)
                        total = total * old + new
                        acc0 = acc0 * old[None, :] + chunk0 * new[None, :]
                        if DV1 > 0:
                            acc1 = acc1 * old[None, :] + chunk1 * new[None, :]
                    else:
                        slot = position_in_list + chunk - begin
                        _store_partial(part_ptr, slot, slots, kv_head, num_kv_heads, row_ok, chunk_lse, chunk0, chunk1, DV, DV0, DV1, BLOCK_M)
                divisor, lse = normalise(peak, total)
                acc0 = tl.div_rn(acc0, tl.broadcast_to(divisor[None, :], acc0.shape))
                if DV1 > 0:
                    acc1 = tl.div_rn(acc1, tl.broadcast_to(divisor[None, :], acc1.shape))
            if whole:
                factor, result = finish(lse, sinks_ptr, head, row_ok)
                factor *= value_scale
                out_rows = out_ptr + token * stride_ot + head * stride_oh
                out0 = (acc0 * factor[None, :]).to(out_ptr.dtype.element_ty)
                tl.store(out_rows[None, :] + v_d0[:, None], out0, mask=row_ok[None, :])
                if DV1 > 0:
                    out1 = (acc1 * factor[None, :]).to(out_ptr.dtype.element_ty)
                    tl.store(out_rows[None, :] + v_d1[:, None], out1, mask=row_ok[None, :] & (v_d1 < DV)[:, None])
                if lse_ptr is not None:
                    tl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)
            left -= stop - step
            position_in_list += stop - step
            step = 0
            row_tile += 1
        if row_tile >= row_tiles:
            row_tile = 0
            sequence += 1
