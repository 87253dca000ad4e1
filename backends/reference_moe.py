"""`fused_moe` of the reference backend: the stages, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.reference_moe_activations import activate
from hal.backends.reference_moe_gemm import Experts, grouped_product, operand
from hal.backends.reference_moe_rows import combine_rows, expand_rows, index_slots, local_ids
from hal.ops.moe_checks import result_dtype

__all__ = ["fused_moe"]


def fused_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    activation: str = "silu",
    gate_up: str = "concat",
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_scales: tuple[Tensor, Tensor] | None = None,
    x_scales: Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    num_experts: int | None = None,
    expert_range: tuple[int, int] | None = None,
    expert_map: Tensor | None = None,
    weight_on_input: bool = False,
    num_valid_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Feed T tokens through their experts, (T, H); the contract is `hal.ops.moe_fused.FusedMoe`."""
    experts = w_gate_up.shape[0]
    start, end = expert_range or (0, experts if expert_map is None else expert_map.shape[0])
    local = local_ids(ids, end if num_experts is None else num_experts, experts, start, expert_map)
    if num_valid_tokens is not None:
        local = local.masked_fill((torch.arange(x.shape[0], device=x.device) >= num_valid_tokens)[:, None], experts)
    index = index_slots(local, experts)
    scales = w_scales or (None, None)
    first, second = Experts(w_gate_up, scales[0], b_gate_up), Experts(w_down, scales[1], b_down)
    rows = expand_rows(operand(x, x_scales, first), index)
    factor = weights.flatten()[index.dst_to_src.long()] if weight_on_input else None
    hidden = activate(grouped_product(rows, first, index.expert_sizes, factor), activation, gate_up, alpha, limit)
    hidden = hidden.to(x.dtype) if w_scales is None else operand(hidden, None, second)
    result = grouped_product(hidden, second, index.expert_sizes)
    total = combine_rows(result, torch.ones_like(weights) if weight_on_input else weights, index)
    return total.to(result_dtype(x, out)) if out is None else out.copy_(total)
