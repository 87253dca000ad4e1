# mypy: allow-untyped-defs
"""The way between tokens and sorted rows: `moe_expand` copies rows to their places, `moe_combine` sums them up again.

`out[t] = scale * sum_j weights[t, j] * y[places[t * k + j]] + residual[t]`, j ascending, in fp32. A slot without a place
is not read. Both walk through the tokens by `src_to_dst`, whose every entry is defined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.moe_tuning import row_blocks
from hal.kernels.scratch import current_device
from hal.kernels.tuning import supports_pdl

__all__ = ["combine_kernel", "expand_kernel", "moe_combine", "moe_expand", "unrolled"]

#: Bytes of an element -> the dtype that its bits are copied as: floats that the target lacks need no conversion then.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["rows", "top_k", "scale"])
def combine_kernel(
    y_ptr, weights_ptr, places_ptr, residual_ptr, out_ptr, rows, columns, top_k, scale, stride_ym, stride_wt, stride_rt, stride_ot,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token."""
    pdl_begin(PDL)
    blocks = tl.cdiv(columns, BLOCK)
    token = tl.program_id(0) // blocks
    wide = token.to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, top_k, UNROLL):
        for i in tl.static_range(UNROLL):
            choice = first + i
            place = tl.load(places_ptr + wide * top_k + choice, mask=choice < top_k, other=-1)
            exists = (place >= 0) & (place < rows)
            values = tl.load(y_ptr + place.to(tl.int64) * stride_ym + column, mask=column < tl.where(exists, columns, 0), other=0.0).to(tl.float32)
            if weights_ptr is not None:
                values *= tl.load(weights_ptr + wide * stride_wt + choice, mask=exists, other=0.0)
            total += values
    total *= scale
    if residual_ptr is not None:
        total += tl.load(residual_ptr + wide * stride_rt + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + wide * stride_ot + column, total.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "top_k"])
def expand_kernel(
    x_ptr, places_ptr, out_ptr, rows, columns, top_k, stride_xt, stride_om, UNROLL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """BLOCK columns of one token, read once and written to the place of each of its slots."""
    pdl_begin(PDL)
    blocks = tl.cdiv(columns, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = column < columns
    values = tl.load(x_ptr + token * stride_xt + column, mask=ok, other=0.0)
    for first in range(0, top_k, UNROLL):
        for i in tl.static_range(UNROLL):
            choice = first + i
            place = tl.load(places_ptr + token * top_k + choice, mask=choice < top_k, other=-1)
            exists = (place >= 0) & (place < rows)
            tl.store(out_ptr + place.to(tl.int64) * stride_om + column, values, mask=column < tl.where(exists, columns, 0))


def unrolled(top_k: int) -> int:
    """Choices of a token that are handled at a time: all of the usual numbers, so that their loads overlap."""
    return top_k if top_k <= 16 else 8


def moe_combine(
    y: Tensor, weights: Tensor | None, places: Tensor, out: Tensor, *, top_k: int, residual: Tensor | None = None, scale: float = 1.0
) -> None:
    """Sum up the rows of each token.

    Args:
        y: (M, H) sorted rows.
        weights: (T, k) fp32, or None for 1.
        places: (T * k,) int32, row of each slot, -1 for skipped ones; other numbers outside [0, M) are skipped too.
        out: (T, H), written; H elements of a row lie side by side in all of `y`, `residual` and `out`.
        top_k: k.
        residual: (T, H) or None.
        scale: factor of the sum, not of the residual.
    """
    tokens, hidden = out.shape
    if tokens == 0 or hidden == 0:
        return
    block, warps = row_blocks(out.device, tokens, hidden)
    pdl = supports_pdl(out.device)
    with current_device(out.device):
        combine_kernel[(tokens * triton.cdiv(hidden, block),)](
            y, weights, places, residual, out, y.shape[0], hidden, top_k, scale,
            y.stride(0), 0 if weights is None else weights.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
            unrolled(top_k), block, pdl, num_warps=warps, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
        )  # fmt: skip


def moe_expand(x: Tensor, places: Tensor, out: Tensor, *, top_k: int) -> None:
    """Copy the row of each token to the places of its slots.

    Args:
        x: (T, H) of any dtype of up to 8 bytes.
        places: (T * k,) int32 as in `moe_combine`.
        out: (T * k, H), written where a slot has its place.
        top_k: k.
    """
    tokens, hidden = x.shape
    if tokens == 0 or hidden == 0:
        return
    block, warps = row_blocks(x.device, tokens, hidden)
    pdl, bits = supports_pdl(x.device), _BITS[x.element_size()]
    with current_device(x.device):
        expand_kernel[(tokens * triton.cdiv(hidden, block),)](
            x.view(bits), places, out.view(bits), out.shape[0], hidden, top_k, x.stride(0), out.stride(0),
            unrolled(top_k), block, pdl, num_warps=warps, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
        )  # fmt: skip
