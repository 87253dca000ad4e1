"""`group_gemm` of the reference backend: the rows of each expert times its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.backends.reference_limits import on_host
from hal.backends.reference_moe_quantised import dequantised_rows, dequantised_weight, rounded_rows
from hal.backends.reference_products import matmul
from hal.ops.moe_checks import result_dtype

__all__ = ["Experts", "group_gemm", "grouped_product", "operand"]

#: Rows of a block, at most; and fp32 values of the weights gathered for one step.
_MOST_ROWS = 64
_MOST_VALUES = 2**26


@dataclass(frozen=True)
class Experts:
    """The parameters of one product: weight (E, N, K), scales, bias (E, N)."""

    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None


def group_gemm(
    x: Tensor,
    weight: Tensor,
    expert_sizes: Tensor,
    *,
    bias: Tensor | None = None,
    w_scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of each expert (M, K) by its weights (E, N, K); the contract is `hal.ops.moe_gemm.GroupGemm`."""
    experts = Experts(weight, w_scales, bias)
    result = grouped_product(operand(x, x_scales, experts), experts, expert_sizes)
    return result.to(result_dtype(x, out)) if out is None else out.copy_(result)


def operand(x: Tensor, x_scales: Tensor | None, experts: Experts) -> Tensor:
    """Return the rows that the product takes: x, or beside quantised experts fp32 rows of what x is after quantisation."""
    if experts.scales is None:
        return x
    return rounded_rows(x, experts.weight.dtype, experts.scales) if x_scales is None else dequantised_rows(x, x_scales)


def grouped_product(x: Tensor, experts: Experts, sizes: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return (M, N) `factor[r] * (x[r] @ weight[e].T) + bias[e]`, fp32 or rounded to the dtype of x; rows of no expert are unspecified."""
    if not (x.shape[0] and sizes.shape[0]):
        return x.new_zeros(x.shape[0], experts.weight.shape[1])
    if on_host(x):
        return _by_expert(x, experts, sizes, factor)
    return _by_block(x, experts, sizes, factor)


def _by_expert(x: Tensor, experts: Experts, sizes: Tensor, factor: Tensor | None) -> Tensor:
    """One product for each expert that has rows."""
    # bf16 products accumulate in fp32 and several times faster than those of converted weights, but round their result: fp16 would overflow.
    plain = experts.bias is None and factor is None and x.dtype == experts.weight.dtype and x.dtype != torch.float16
    out = torch.zeros(x.shape[0], experts.weight.shape[1], dtype=x.dtype if plain else torch.float32)
    start = 0
    for e, size in enumerate(sizes.tolist()):
        rows = slice(start, min(start + max(size, 0), x.shape[0]))
        start = rows.stop
        if rows.start == rows.stop:
            continue
        if plain:
            out[rows] = x[rows] @ experts.weight[e].T
            continue
        product = x[rows].float() @ dequantised_weight(experts.weight[e], None if experts.scales is None else experts.scales[e]).T
        if factor is not None:
            product *= factor[rows, None]
        out[rows] = product if experts.bias is None else product + experts.bias[e]
    return out


def _by_block(x: Tensor, experts: Experts, sizes: Tensor, factor: Tensor | None) -> Tensor:
    """Blocks of rows of one expert each, in numbers that depend on shapes alone: no value is read by the host."""
    (rows, inputs), (count, outputs, _) = x.shape, experts.weight.shape
    height = min(_MOST_ROWS, 1 << (-(-rows // count) - 1).bit_length())
    ends = sizes.clamp_min(0).cumsum(0).clamp_max(rows)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    last_block = ((ends - starts + height - 1) // height).cumsum(0)
    first_block = torch.cat([last_block.new_zeros(1), last_block[:-1]])
    blocks = min(rows, rows // height + min(count, rows))
    block = torch.arange(blocks, device=x.device)
    owner = torch.searchsorted(last_block, block, right=True).clamp_max(count - 1)
    source = (starts[owner] + (block - first_block[owner]) * height)[:, None] + torch.arange(height, device=x.device)
    gathered = x[source.clamp(0, rows - 1)].float()
    step = max(1, _MOST_VALUES // max(1, outputs * inputs))
    parts = [matmul(gathered[i : i + step], _weights_of(experts, owner[i : i + step]).transpose(1, 2)) for i in range(0, blocks, step)]
    row = torch.arange(rows, device=x.device)
    expert = torch.searchsorted(ends, row, right=True).clamp_max(count - 1)
    place = (first_block[expert] * height + row - starts[expert]).clamp(0, blocks * height - 1)
    product = torch.cat(parts).flatten(0, 1)[place]
    if factor is not None:
        product = product * factor[:, None]
    return product if experts.bias is None else product + experts.bias[expert]


def _weights_of(experts: Experts, owner: Tensor) -> Tensor:
    """fp32 (blocks, N, K) weights of some experts; torch selects 8-bit floats only as bytes."""
    raw = experts.weight.view(torch.uint8) if experts.weight.dtype.itemsize == 1 else experts.weight
    chosen = raw[owner].view(experts.weight.dtype)
    return dequantised_weight(chosen, None if experts.scales is None else experts.scales[owner])
