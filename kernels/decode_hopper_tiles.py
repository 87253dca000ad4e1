# mypy: allow-untyped-defs
"""Tiles of `decode_hopper`: their layouts in shared memory and registers, and how they get in and out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hal.kernels.decode_hopper_walk import TILE

__all__ = [
    "convert_tile", "copy_keys", "copy_layout", "key_layout", "load_queries", "offsets_in_page", "operand_layout", "staging_layout", "store_rows",
    "store_terms", "wide_product",
]  # fmt: skip

# Renamed between Triton 3.6 and 3.9.
_start_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


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


@gluon.jit
def wide_product(page, stride):
    """64-bit product; one instruction for 32-bit factors, whatever the compiler has hoisted."""
    if stride.dtype == gl.int32:
        product = gl.inline_asm_elementwise("mul.wide.s32 $0, $1, $2;", "=l,r,r", [page, stride], dtype=gl.int64, is_pure=True, pack=1)
    else:
        product = page.to(gl.int64) * stride
    return gl.multiple_of(product, [16])


@gluon.jit
def offsets_in_page(tile, stride, P: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the keys of a tile inside their pages; the same for every tile where pages divide tiles."""
    if TILE % P == 0:
        return (gl.arange(0, TILE, LAYOUT) % P).to(gl.int64) * stride
    elif P % TILE == 0:
        return gl.arange(0, TILE, LAYOUT).to(gl.int64) * stride + (tile % (P // TILE) * TILE).to(gl.int64) * stride
    else:
        return ((tile * TILE + gl.arange(0, TILE, LAYOUT)).to(gl.uint32) % P).to(gl.int64) * stride


@gluon.jit
def copy_keys(smem, slot, base, rows, ok, D: gl.constexpr, BEGIN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying elements [BEGIN, BEGIN + WIDTH) of the keys at `base + rows`; what is not there becomes zero."""
    column = BEGIN + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    mask = ok[:, None]
    if BEGIN + WIDTH > D:
        mask = mask & (column < D)[None, :]
    _start_copy(smem.index(slot), (base[:, None] + column[None, :]) + rows[:, None], mask=mask)


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
