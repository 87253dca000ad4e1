# mypy: allow-untyped-defs
"""Grouped matrix product: rows sorted by expert, times the weights of their expert.

`y[r] = x[row(r)] @ w[expert(r)].T + bias[expert(r)]`, optionally with a gated activation behind it. One program makes one
tile of BLOCK_M rows of an expert and BLOCK_N rows of its weights; which rows, it reads from the list of tiles that
`moe_index` writes on the device. The row tiles of an expert that use the same weights run side by side, so that memory is
read once and L2 serves the others.

With an activation a tile holds as many gate rows as up rows of the weights, so that one product feeds both and only the
activated half is written. `SWAP` computes the tile transposed: the weights are then the wide operand of the matrix
instruction, which suits few rows. Weights come through TMA descriptors or through pointers, K or N contiguous.

Quantised products (w8a8): int8 codes add up in int32 where a scale spans all of K. e4m3 codes add up inside the matrix unit,
which keeps few bits, along one step of K only; these parts, like those of blocks of 128 x 128 with a scale each, add up in
fp32. A tile whose activated half is one group of 128 columns can leave quantised itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.launch import pdl_begin, pdl_release, pdl_wait, prefetch_rows
from hal.kernels.moe_activation import activate
from hal.kernels.moe_quantise import GROUP, amax_of, codes_of, scale_of

__all__ = ["VARYING", "moe_gemm_kernel"]

#: Arguments that change from call to call: no variant of the kernel may depend on their value.
VARYING = ["alpha", "limit", "top_k", "early"]

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _weight_rows(first, columns, BLOCK_N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of the weights of one expert that make up a tile, and which of them exist."""
    at = tl.arange(0, BLOCK_N)
    if GATED and not INTERLEAVED:
        HALF: tl.constexpr = BLOCK_N // 2
        column = first + at % HALF
        return (at // HALF) * columns + column, column < columns
    elif GATED:
        return 2 * first + at, 2 * first + at < 2 * columns
    else:
        return first + at, first + at < columns


@triton.jit
def _load_weights(w_tma, expert, first, begin, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAIRED: tl.constexpr, K_INNER: tl.constexpr):
    """A tile (N, K) through a descriptor; rows and columns beyond the matrix are 0."""
    if K_INNER:
        tile = w_tma.load([expert, 0, first, begin]) if PAIRED else w_tma.load([expert, first, begin])
        tile = tl.reshape(tile, (BLOCK_N, BLOCK_K))
    else:
        tile = w_tma.load([expert, begin, 0, first]) if PAIRED else w_tma.load([expert, begin, first])
        tile = tl.trans(tl.reshape(tile, (BLOCK_K, BLOCK_N)))
    return tile


@triton.jit
def _block_scales(
    w_scales, weight_row, weight_ok, first, columns, stride_wsn, BLOCK_N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Scales of the rows of a tile for one block of K: (BLOCK_N,); `w_scales` points to those of the expert's first rows.

    With HALVES each half of the tile lies in one block: two scales, and no exchange between threads.
    """
    if HALVES:
        HALF: tl.constexpr = BLOCK_N // 2
        if GATED and not INTERLEAVED:
            upper = first
            lower = columns + first
            lower_ok = first < columns
        else:
            upper = 2 * first if GATED else first
            lower = upper + HALF
            lower_ok = lower < (2 * columns if GATED else columns)
        upper_scale = tl.load(w_scales + (upper // _GROUP) * stride_wsn)
        lower_scale = tl.load(w_scales + (lower // _GROUP) * stride_wsn, mask=lower_ok, other=0.0)
        return tl.where(tl.arange(0, BLOCK_N) < HALF, upper_scale, lower_scale)
    else:
        return tl.load(w_scales + (weight_row // _GROUP) * stride_wsn, mask=weight_ok, other=0.0)


@triton.jit
def _tile(
    x_ptr, w_ptr, x_tma, w_tma, y_ptr, bias_ptr, factors_ptr, src_ptr, x_scales_ptr, w_scales_ptr, y_scales_ptr,
    expert, row, end, first, alpha, limit, columns, depth, top_k,
    stride_xm, stride_we, stride_wn, stride_wk, stride_be, stride_ft, stride_ym,
    stride_xsm, stride_xsk, stride_wse, stride_wsn, stride_wsk, stride_ysm,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, K_INNER: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    SCALES: tl.constexpr, HALVES: tl.constexpr, QMAX: tl.constexpr,
):  # fmt: skip
    """Rows `row`.. of `expert` (before `end`), output columns `first`..; `depth` is K."""
    GATED: tl.constexpr = ACTIVATION != ""
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    INTEGER: tl.constexpr = w_ptr.dtype.element_ty == tl.int8
    BLOCKS: tl.constexpr = SCALES == "block"
    #: Sums of one step of K are added up apart from the matrix unit.
    STEPWISE: tl.constexpr = BLOCKS or (SCALES != "" and not INTEGER)
    if BLOCKS:
        tl.static_assert(_GROUP % BLOCK_K == 0, "a step of K lies in one block of the weights")
    rows = row + tl.arange(0, BLOCK_M)
    row_ok = rows < end
    wide = expert.to(tl.int64)
    if src_ptr is not None:
        slot = tl.load(src_ptr + rows, mask=row_ok, other=0)
        source = slot // top_k
    else:
        source = rows
    step = tl.arange(0, BLOCK_K)
    weight_row, weight_ok = _weight_rows(first, columns, BLOCK_N, GATED, INTERLEAVED)
    if x_tma is None:
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * stride_xm + step[None, :]
    if w_tma is None:
        if K_INNER:
            w_ptrs = w_ptr + wide * stride_we + weight_row.to(tl.int64)[:, None] * stride_wn + step[None, :]
        else:
            w_ptrs = w_ptr + wide * stride_we + weight_row[None, :] + step.to(tl.int64)[:, None] * stride_wk

    if SCALES != "":
        x_scales = x_scales_ptr + source.to(tl.int64) * stride_xsm
        w_scales = w_scales_ptr + wide * stride_wse
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.int32 if INTEGER and not STEPWISE else tl.float32)
    for begin in tl.range(0, depth, BLOCK_K):
        left = depth - begin
        if x_tma is not None:
            a = x_tma.load([row, begin])
        elif EVEN_K:
            a = tl.load(x_ptrs, mask=row_ok[:, None], other=0.0)
        else:
            a = tl.load(x_ptrs, mask=row_ok[:, None] & (step < left)[None, :], other=0.0)
        if w_tma is not None:
            b = _load_weights(
                w_tma, expert, first * 2 if GATED and INTERLEAVED else first, begin, BLOCK_N, BLOCK_K, GATED and not INTERLEAVED, K_INNER
            )
        elif K_INNER:
            b = tl.load(w_ptrs) if EVEN_N and EVEN_K else tl.load(w_ptrs, mask=weight_ok[:, None] & (step < left)[None, :], other=0.0)
        else:
            b = tl.load(w_ptrs) if EVEN_N and EVEN_K else tl.load(w_ptrs, mask=weight_ok[None, :] & (step < left)[:, None], other=0.0)
            b = tl.trans(b)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        if BLOCKS:
            block = begin // _GROUP
            row_scale = tl.load(x_scales + block * stride_xsk, mask=row_ok, other=0.0)
            weight_scale = _block_scales(
                w_scales + block * stride_wsk, weight_row, weight_ok, first, columns, stride_wsn, BLOCK_N, GATED, INTERLEAVED, HALVES
            )
        if STEPWISE:
            part = tl.dot(b, tl.trans(a), input_precision="ieee") if SWAP else tl.dot(a, tl.trans(b), input_precision="ieee")
            part = part.to(tl.float32)
            if BLOCKS:
                part *= weight_scale[:, None] * row_scale[None, :] if SWAP else row_scale[:, None] * weight_scale[None, :]
            acc += part
        else:
            if SWAP:
                acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee", out_dtype=acc.dtype)
            else:
                acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee", out_dtype=acc.dtype)
        if x_tma is None:
            x_ptrs += BLOCK_K
        if w_tma is None:
            w_ptrs += BLOCK_K if K_INNER else BLOCK_K * stride_wk

    if SWAP:
        acc = tl.trans(acc)
    if SCALES == "row":
        row_scale = tl.load(x_scales, mask=row_ok, other=0.0)
        weight_scale = tl.load(w_scales + weight_row * stride_wsn, mask=weight_ok, other=0.0)
        acc = acc.to(tl.float32) * row_scale[:, None] * weight_scale[None, :]
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + source.to(tl.int64) * stride_ft + slot % top_k, mask=row_ok, other=0.0)
        acc = acc * factor[:, None]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + wide * stride_be + weight_row, mask=weight_ok, other=0.0)
        acc = acc + bias.to(tl.float32)[None, :]
    if GATED:
        if INTERLEAVED:
            gate, up = tl.split(tl.reshape(acc, (BLOCK_M, OUT_N, 2)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, OUT_N)), (0, 2, 1)))
        acc = activate(gate, up, alpha, limit, ACTIVATION)
    column = first + tl.arange(0, OUT_N)
    if y_scales_ptr is not None:
        tl.static_assert(OUT_N == _GROUP, "a quantised tile is one group of columns")
        acc = tl.where((column < columns)[None, :], acc, 0.0)
        scale = scale_of(amax_of(acc, 1), QMAX)
        tl.store(y_scales_ptr + rows.to(tl.int64) * stride_ysm + first // _GROUP, scale, mask=row_ok)
        acc = codes_of(acc, tl.broadcast_to(scale[:, None], acc.shape), QMAX, y_ptr.dtype.element_ty == tl.int8)
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * stride_ym + column[None, :]
    ok = row_ok[:, None] if EVEN_N else row_ok[:, None] & (column < columns)[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _place(tiles_ptr, at, column_tiles, OUT_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """(expert, first row, end row of the expert, first output column) of tile number `at`; first row = end row: nothing to do.

    The tiles of an expert count through groups of GROUP_M row tiles; inside a group rows run first. Loads go past L1, so that
    this may be called before the wait for the kernel before.
    """
    record = tiles_ptr + 4 + (at // column_tiles) * 4
    expert = tl.load(record, cache_modifier=".cg")
    begin = tl.load(record + 1, cache_modifier=".cg")
    end = tl.load(record + 2, cache_modifier=".cg")
    first_tile = tl.load(record + 3, cache_modifier=".cg")
    row_tiles = tl.cdiv(end - begin, BLOCK_M)
    place = at - first_tile * column_tiles
    group = place // (GROUP_M * column_tiles)
    group_rows = tl.maximum(tl.minimum(row_tiles - group * GROUP_M, GROUP_M), 1)
    inside = place - group * (GROUP_M * column_tiles)
    row = begin + (group * GROUP_M + inside % group_rows) * BLOCK_M
    return expert, tl.where(begin < end, row, end), end, (inside // group_rows) * OUT_N


@triton.jit(do_not_specialize=VARYING)
def moe_gemm_kernel(
    x_ptr, w_ptr, x_tma, w_tma, y_ptr, bias_ptr, factors_ptr, src_ptr, tiles_ptr, x_scales_ptr, w_scales_ptr, y_scales_ptr,
    alpha, limit, columns, depth, top_k, early,
    stride_xm, stride_we, stride_wn, stride_wk, stride_be, stride_ft, stride_ym,
    stride_xsm, stride_xsk, stride_wse, stride_wsn, stride_wsk, stride_ysm,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, K_INNER: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PERSISTENT: tl.constexpr, AHEAD: tl.constexpr, UPCAST: tl.constexpr, SCALES: tl.constexpr, HALVES: tl.constexpr, QMAX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Work on one tile, or (`PERSISTENT`) on every tile that is this program's turn.

    With AHEAD > 0 the first `early` programs ask L2 for that many columns of their weights before they wait: only for kernels
    whose list of tiles was complete before the kernel before them passed its own wait.

    Args beyond those of the launcher:
        x_tma: descriptor of x, or None.
        w_tma: descriptor of the weights, or None.
        tiles_ptr: int32 records of 4: header (tiles, 0, 0, 0), then per tile (expert, its first row, its end row, its first tile).
        SCALES: "" for none, "row" for one of a row of x and one of an output, "block" for one of each 128 columns.
        HALVES: each half of the rows of a tile of weights lies in one block.
        QMAX: largest code of y, if `y_scales_ptr` is given.
    """
    OUT_N: tl.constexpr = BLOCK_N if ACTIVATION == "" else BLOCK_N // 2
    column_tiles = tl.cdiv(columns, OUT_N)
    if AHEAD > 0:
        pdl_release(PDL)
        if PDL and tl.program_id(0) < early:
            expert, row, end, first = _place(tiles_ptr, tl.program_id(0), column_tiles, OUT_N, BLOCK_M, GROUP_M)
            if row < end:
                weight_row, weight_ok = _weight_rows(first, columns, BLOCK_N, ACTIVATION != "", INTERLEAVED)
                prefetch_rows(w_ptr + expert.to(tl.int64) * stride_we, tl.where(weight_ok, weight_row, 0), depth, stride_wn, AHEAD)
        pdl_wait(PDL)
    else:
        pdl_begin(PDL)
    if PERSISTENT:
        stop = tl.load(tiles_ptr) * column_tiles
        turn = tl.num_programs(0)
    else:
        stop = tl.program_id(0) + 1
        turn = 1
    for at in tl.range(tl.program_id(0), stop, turn):
        expert, row, end, first = _place(tiles_ptr, at, column_tiles, OUT_N, BLOCK_M, GROUP_M)
        if row < end:
            _tile(
                x_ptr, w_ptr, x_tma, w_tma, y_ptr, bias_ptr, factors_ptr, src_ptr, x_scales_ptr, w_scales_ptr, y_scales_ptr,
                expert, row, end, first, alpha, limit, columns, depth, top_k,
                stride_xm, stride_we, stride_wn, stride_wk, stride_be, stride_ft, stride_ym,
                stride_xsm, stride_xsk, stride_wse, stride_wsn, stride_wsk, stride_ysm,
                ACTIVATION, INTERLEAVED, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, K_INNER, EVEN_N, EVEN_K, UPCAST, SCALES, HALVES, QMAX,
            )  # fmt: skip
