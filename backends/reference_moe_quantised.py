"""Quantised experts in the reference backend: everything is dequantised to fp32, which holds every code times its scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.moe_checks import BLOCK, scale_kind

__all__ = ["dequantised_rows", "dequantised_weight", "rounded_rows"]

#: dtype -> the code of the largest magnitude of a row.
_QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def dequantised_weight(weight: Tensor, scales: Tensor | None) -> Tensor:
    """Return fp32 (..., N, K) weights; `scales` as in the contract, with the same leading dimensions."""
    if scales is None:
        return weight.float()
    if scales.dim() == weight.dim():
        scales = scales.repeat_interleave(BLOCK, -2)[..., : weight.shape[-2], :].repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]
        return weight.float() * scales
    return weight.float() * scales.reshape(scales.shape + (1,) * (weight.dim() - scales.dim()))


def dequantised_rows(x: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 x (M, K), given the scales of its rows (M,), or of its rows and blocks of columns."""
    spread = scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return x.float() * spread


def rounded_rows(x: Tensor, dtype: torch.dtype, w_scales: Tensor) -> Tensor:
    """Return fp32 x (M, K) after quantisation to `dtype` and back, per row, or per row and block beside block scales."""
    rows, columns = x.shape
    if not columns:
        return x.float()
    width = BLOCK if scale_kind(w_scales) == "block" else columns
    blocks = functional.pad(x.float(), (0, -columns % width)).view(rows, -(-columns // width), width)
    scale = blocks.abs().amax(2, keepdim=True) / _QMAX[dtype]
    codes = (blocks / scale.masked_fill(scale == 0, 1.0)).clamp(-_QMAX[dtype], _QMAX[dtype])
    codes = codes.round() if dtype == torch.int8 else codes.to(dtype).float()
    return (codes * scale).flatten(1)[:, :columns]
