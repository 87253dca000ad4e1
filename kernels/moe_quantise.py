# mypy: allow-untyped-defs
"""Rows quantised to int8 or e4m3 with scales of their own: dynamic quantisation of activations.

`scale = amax / qmax` over a row, or over a row's group of 128 columns; `code = x / scale`, rounded half to even and saturated.
A group of zeros has scale 0 and codes 0. A group with NaN or an infinity has scale NaN and codes 0, so that whatever is
made of it is NaN, in int8 too. The functions serve the kernel below and the kernels that quantise what they hold in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.numerics import round_half_even
from hal.kernels.scratch import current_device, scratch
from hal.kernels.tuning import supports_pdl

__all__ = ["GROUP", "QMAX", "Rows", "amax_of", "codes_of", "empty_rows", "quantise", "quantise_kernel", "quantise_shape", "scale_of"]

#: Columns of a group, and rows and columns of a block of the weights, that share one scale.
GROUP = 128
#: dtype -> the code of the largest magnitude.
QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: Elements of a program.
_ELEMENTS = 2048
_MOST_COLUMNS = 4096
#: Rows begin on multiples of this many bytes, so that they can be copied in the widest units and by TMA.
_ALIGNED = 16


@dataclass(frozen=True)
class Rows:
    """Quantised rows.

    Attributes:
        codes: (R, K) int8 or e4m3.
        scales: fp32 (R,), or (R, ceil(K / 128)) of groups.
    """

    codes: Tensor
    scales: Tensor


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """Largest magnitude of fp32 x along an axis; infinite where there is a NaN."""
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, float("inf")), axis)


@triton.jit
def scale_of(amax, QMAX: tl.constexpr):
    """Scale of what has this amax: 0 of zeros, NaN of what is not finite."""
    scale = tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32))
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def codes_of(x, scale, QMAX: tl.constexpr, INTEGER: tl.constexpr):
    """fp32 codes of x, whose scales are broadcast to its shape: integers, or what a conversion to e4m3 rounds."""
    usable = scale > 0.0
    code = tl.div_rn(tl.where(usable, x, 0.0), tl.where(usable, scale, 1.0))
    code = tl.minimum(tl.maximum(code, -QMAX), QMAX)
    return round_half_even(code) if INTEGER else code


@triton.jit(do_not_specialize=["rows", "groups", "stride_sm"])
def quantise_kernel(
    x_ptr, codes_ptr, scales_ptr, valid_ptr, rows, groups, columns, stride_xm, stride_cm, stride_sm,
    QMAX: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows, or of `groups` groups of a row (`GROUPED`; one is a BLOCK). Rows from `valid` on are left out."""
    pdl_begin(PDL)
    INTEGER: tl.constexpr = codes_ptr.dtype.element_ty == tl.int8
    if valid_ptr is not None:
        rows = tl.minimum(rows, tl.load(valid_ptr))
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = index // groups if GROUPED else index
    group = index % groups if GROUPED else tl.zeros((ROWS,), tl.int32)
    row_ok = row < rows
    wide = row.to(tl.int64)
    # Only the columns beyond the last are masked, so that loads and stores stay wide.
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x_ptrs = x_ptr + wide[:, None] * stride_xm + column
    codes_ptrs = codes_ptr + wide[:, None] * stride_cm + column
    end = BLOCK if GROUPED else columns
    amax = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, end, BLOCK):
        x = tl.load(x_ptrs + begin, mask=(begin + column < columns) & row_ok[:, None], other=0.0).to(tl.float32)
        amax = tl.maximum(amax, amax_of(x, 1))
    scale = scale_of(amax, QMAX)
    tl.store(scales_ptr + wide * stride_sm + group, scale, mask=row_ok)
    for begin in range(0, end, BLOCK):
        # The second time from L1.
        ok = (begin + column < columns) & row_ok[:, None]
        x = tl.load(x_ptrs + begin, mask=ok, other=0.0).to(tl.float32)
        codes = codes_of(x, tl.broadcast_to(scale[:, None], x.shape), QMAX, INTEGER)
        tl.store(codes_ptrs + begin, codes.to(codes_ptr.dtype.element_ty), mask=ok)


def empty_rows(name: str, rows: int, columns: int, dtype: torch.dtype, grouped: bool, device: torch.device) -> Rows:
    """Scratch memory for quantised rows.

    Args:
        name: rows of different names are in use at the same time.
        rows: R.
        columns: K.
        dtype: of the codes.
        grouped: scales of groups, not of rows.
        device: where.
    """
    stride = max(1, triton.cdiv(columns, _ALIGNED)) * _ALIGNED
    codes = scratch(f"moe_{name}_codes", rows * stride // 4, torch.int32, device)[: rows * stride // 4].view(dtype).view(rows, stride)[:, :columns]
    groups = triton.cdiv(columns, GROUP) if grouped else 1
    scales = scratch(f"moe_{name}_scales", rows * groups, torch.float32, device)[: rows * groups]
    return Rows(codes, scales.view(rows, groups) if grouped else scales)


def quantise_shape(columns: int, grouped: bool) -> tuple[int, int, int]:
    """(rows or groups of a program, columns that it handles at a time, its warps)."""
    block = GROUP if grouped else min(_MOST_COLUMNS, max(16, triton.next_power_of_2(columns)))
    height = max(1, _ELEMENTS // block)
    return height, block, max(4, block * height // 512)


def quantise(x: Tensor, rows: Rows, valid: Tensor | None = None) -> Rows:
    """Quantise x (R, K) into `rows` and return them.

    Args:
        x: fp32, fp16 or bf16; the last dimension contiguous.
        rows: (R, K), written; its scales say whether rows or groups have one.
        valid: int32 of one element on the device: rows from there on are left out; None for all.
    """
    count, columns = x.shape
    grouped = rows.scales.dim() == 2
    groups = rows.scales.shape[1] if grouped else 1
    if count * groups == 0:
        return rows
    height, block, warps = quantise_shape(columns, grouped)
    pdl = supports_pdl(x.device)
    with current_device(x.device):
        quantise_kernel[(triton.cdiv(count * groups, height),)](
            x, rows.codes, rows.scales, valid, count, groups, columns, x.stride(0), rows.codes.stride(0), rows.scales.stride(0),
            QMAX[rows.codes.dtype], grouped, height, block, pdl, num_warps=warps, num_stages=1, enable_fp_fusion=True,
            **pdl_options(pdl),
        )  # fmt: skip
    return rows
