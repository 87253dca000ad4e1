# mypy: allow-untyped-defs
"""Tiles of `decode_hopper`: their layouts in shared memory and registers, and how they get in and out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hal.kernels.decode_hopper_walk import TILE
from hal.kernels.numerics import LOG2E

__all__ = [
    "GROWTH", "any_grown", "convert_tile", "copy_keys", "copy_layout", "key_layout", "key_offsets", "load_queries",
    "operand_layout", "seen_layout", "soft_cap", "spread_layout", "staging_layout", "store_rows", "store_terms", "store_wide_rows",
    "wide_seen_layout",
]  # fmt: skip

_LOG2E = gl.constexpr(LOG2E)
# Renamed between Triton 3.6 and 3.9.
_start_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


#: Growth of a row's maximum, in powers of two, up to which the old one goes on serving: weights up to 2 ** 8 are as exact as those up to 1, and
#: what was accumulated need not be rescaled (as in FlashAttention-4).
GROWTH = gl.constexpr(8.0)


@gluon.constexpr_function
def copy_layout(width, element_bytes, warps):
    """16 bytes a thread, whole rows of `width` elements side by side."""
    vector = 16 // element_bytes
    threads = min(32, width // vector)
    return gl.BlockedLayout([1, vector], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.constexpr_function
def operand_layout(width):
    """Shared memory as `wgmma` reads it, `width` 16-bit elements a row."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, 2)


@gluon.constexpr_function
def staging_layout(width, element_bytes):
    """Shared memory that copies write: the operands' where no conversion follows."""
    return operand_layout(width) if element_bytes == 2 else gl.SwizzledSharedLayout(16, 1, 8, [1, 0])


@gluon.constexpr_function
def key_layout(width, element_bytes, whole):
    """Shared memory for keys; `whole`: 8-bit keys that are an operand as they are."""
    return gl.NVMMASharedLayout(min(128, width), 8, 2) if whole else staging_layout(width, element_bytes)


@gluon.constexpr_function
def seen_layout(warps, rows):
    """Of a maximum per (warp, row): every thread holds those of all warps, for the rows that it has of transposed scores (keys, rows)."""
    columns = [[0, 1]] + [[0, 8 << i] for i in range((rows // 8 - 1).bit_length())]
    parts = [[1 << i, 0] for i in range((warps - 1).bit_length())]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(columns + parts, lanes, [[0, 0]] * (warps - 1).bit_length(), [], [warps, rows])


@gluon.constexpr_function
def wide_seen_layout(groups):
    """Of a maximum per (row of 64, warp group): every thread holds those of all groups, for the rows that it has of scores (rows, keys)."""
    parts = [[0, 1 << i] for i in range((groups - 1).bit_length())]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *parts], lanes, [[16, 0], [32, 0]] + [[0, 0]] * len(parts), [], [64, groups])


@gluon.constexpr_function
def spread_layout(parts, rows, rows_first):
    """Of as many maxima, spread over the lanes of a warp, the same in every warp; fewer than lanes are there more than once."""
    bits = [[0, 1 << i] for i in range((rows - 1).bit_length())] + [[1 << i, 0] for i in range((parts - 1).bit_length())]
    bits = [bit[::-1] for bit in bits] if rows_first else bits
    lanes, rest = (bits + [[0, 0]] * 5)[:5], bits[5:]
    warps = parts if not rows_first else 4 * parts
    return gl.DistributedLinearLayout(rest, lanes, [[0, 0]] * (warps - 1).bit_length(), [], [rows, parts] if rows_first else [parts, rows])


@gluon.jit
def any_grown(seen, peak):
    """Whether any of the maxima `seen` has outgrown the row's `peak`; the same answer in every thread, without a barrier."""
    grown = (seen > peak + GROWTH).to(gl.int32)
    return gl.max(gl.max(grown, 1), 0) > 0


@gluon.jit
def _wide_product_sum(factor, stride, addend):
    """64-bit `factor * stride + addend`; one instruction for 32-bit factors, which the compiler can neither hoist nor keep in pieces."""
    if stride.dtype == gl.int32:
        result = gl.inline_asm_elementwise("mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [factor, stride, addend], dtype=gl.int64, is_pure=True, pack=1)
    else:
        result = factor.to(gl.int64) * stride + addend
    return gl.multiple_of(result, [16])  # here: a mark on the result of a call is lost


@gluon.jit
def key_offsets(page, tile, stride_p, stride_t, P: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the keys of a tile in the cache, given the page of each: all that lives on from tile to tile is those."""
    key = gl.arange(0, TILE, LAYOUT)
    if TILE % P == 0:
        key = key % P
    elif P % TILE == 0:
        key = key + tile % (P // TILE) * TILE
    else:
        key = ((tile * TILE + key).to(gl.uint32) % P).to(gl.int32)
    inside = _wide_product_sum(key, stride_t, gl.zeros([TILE], gl.int64, LAYOUT))
    return _wide_product_sum(page, stride_p, inside)


@gluon.jit
def copy_keys(smem, slot, base, rows, ok, D: gl.constexpr, BEGIN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying elements [BEGIN, BEGIN + WIDTH) of the keys at `base + rows`; what is not there becomes zero."""
    column = BEGIN + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    mask = ok[:, None]
    if BEGIN + WIDTH > D:
        mask = mask & (column < D)[None, :]
    _start_copy(smem.index(slot), (base + column)[None, :] + rows[:, None], mask=mask)


@gluon.jit
def convert_tile(source, target, LAYOUT: gl.constexpr):
    """A quantised tile in the operands' dtype."""
    target.store(source.load(LAYOUT).to(target.dtype))


@gluon.jit
def load_queries(
    q_ptr, row_tile, row_start, queries, kv_head, stride_qt, stride_qh,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, G: gl.constexpr, TOKEN_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The query rows of a unit, (BLOCK_M, D0) and (BLOCK_M, D1); the first again without D1."""
    row = row_tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
    rows = (row_start + row // TOKEN_ROWS).to(gl.int64) * stride_qt + (kv_head * G + row % TOKEN_ROWS) * stride_qh
    column = gl.arange(0, D0, gl.SliceLayout(0, LAYOUT))
    q0 = gl.load(q_ptr + rows[:, None] + column[None, :], mask=row_ok[:, None], other=0.0)
    q1 = q0
    if D1 > 0:
        column = D0 + gl.arange(0, D1, gl.SliceLayout(0, LAYOUT))
        q1 = gl.load(q_ptr + rows[:, None] + column[None, :], mask=row_ok[:, None] & (column < D)[None, :], other=0.0)
    return q0, q1


@gluon.jit
def store_terms(values, target, ROWS: gl.constexpr):
    """Write `values` (ROWS, width) as a sum of two terms in the dtype of `target` (2 * ROWS, width)."""
    first = values.to(target.dtype)
    target.slice(0, ROWS).store(first)
    target.slice(ROWS, ROWS).store((values - first.to(gl.float32)).to(target.dtype))


@gluon.jit
def store_rows(base, rows, row_ok, values, D: gl.constexpr, BEGIN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Write transposed `values` (WIDTH, rows) to columns from BEGIN on of the rows at `base + rows`.

    Straight from the accumulator's layout: 8 lanes hold 8 neighbouring columns, a whole sector in fp32.
    """
    column = BEGIN + gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT))
    mask = row_ok[None, :]
    if BEGIN + WIDTH > D:
        mask = mask & (column < D)[:, None]
    gl.store(base + rows[None, :] + column[:, None], values.to(base.dtype.element_ty), mask=mask)


@gluon.jit
def store_wide_rows(base, rows, row_ok, values, factor, D: gl.constexpr, BEGIN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Write `values * factor` (rows, WIDTH) to columns from BEGIN on of the rows at `base + rows`, straight from the accumulator's layout."""
    column = BEGIN + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    mask = gl.convert_layout(row_ok, ROW)[:, None]
    if BEGIN + WIDTH > D:
        mask = mask & (column < D)[None, :]
    values = values * gl.convert_layout(factor, ROW)[:, None]
    gl.store(base + gl.convert_layout(rows, ROW)[:, None] + column[None, :], values.to(base.dtype.element_ty), mask=mask)


@gluon.jit
def soft_cap(x, cap):
    """`cap * tanh(x / cap)`, which cannot overflow; see `numerics.apply_tanh`."""
    x = x / cap
    size = gl.abs(x)
    decay = gl.exp2(size * (-2.0 * _LOG2E))
    square = x * x
    small = size * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))))
    result = gl.where(size < 0.25, small, (1.0 - decay) / (1.0 + decay))
    return cap * gl.where(x < 0.0, -result, result)
