"""`fused_moe` with quantised experts (w8a8): the two paths of `moe_fused`, with rows quantised before each product.

Sorted path: quantise x (unless it comes quantised) -> index -> gate and up projections with the activation -> quantise the
intermediate -> down projection -> combine. Where a tile's activated columns are one group of 128, the first product quantises
the intermediate itself. Scratch: codes and scales of x (T * H) and of the intermediate (T * k * I), and the down projection's
output (T * k * H, the dtype of `out`), which first holds the intermediate where that is still to be quantised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.kernels.moe_combine import moe_combine
from hal.kernels.moe_configs import MoeConfig, SlotPath
from hal.kernels.moe_experts import Activation, Gather, Scales, grouped_product
from hal.kernels.moe_index import sorted_index
from hal.kernels.moe_quantise import GROUP, Rows, empty_rows, quantise
from hal.kernels.moe_quantised_tuning import quantised_config, quantised_slot_path
from hal.kernels.moe_routing import Routing
from hal.kernels.moe_slots_quantised import quantised_slot_down, quantised_slot_gate_up
from hal.kernels.scratch import scratch

__all__ = ["QuantisedExperts", "quantised_moe"]


@dataclass(frozen=True)
class QuantisedExperts:
    """Quantised experts.

    Attributes:
        w_gate_up: (E, 2I, H). gate_up_scales: (E,), (E, 2I) or (E, ceil(2I / 128), ceil(H / 128)). b_gate_up: (E, 2I) or None.
        w_down: (E, H, I). down_scales, b_down: likewise.
        activation: between the products.
    """

    w_gate_up: Tensor
    gate_up_scales: Tensor
    b_gate_up: Tensor | None
    w_down: Tensor
    down_scales: Tensor
    b_down: Tensor | None
    activation: Activation

    @property
    def blocks(self) -> bool:
        """Whether scales are those of blocks, and activations are quantised by groups."""
        return self.gate_up_scales.dim() == 3


def quantised_moe(
    x: Tensor, x_scales: Tensor | None, experts: QuantisedExperts, routing: Routing, out: Tensor, *, before: Tensor | None, after: Tensor | None
) -> None:
    """Write `out` (T, H).

    Args:
        x: (T, H), a float dtype, or codes with `x_scales`.
        x_scales: (T,), or (T, ceil(H / 128)) beside scales of blocks; None for a float x.
        experts: their parameters.
        routing: what the ids mean.
        out: (T, H), written.
        before: (T, k) fp32 factors of x, or None.
        after: (T, k) fp32 factors of the results, or None.
    """
    count, hidden, _ = experts.w_down.shape
    tokens, top_k = routing.ids.shape
    if x_scales is None:
        rows = quantise(x, empty_rows("x", tokens, hidden, experts.w_down.dtype, experts.blocks, x.device), routing.num_valid_tokens)
    else:
        rows = Rows(x, x_scales)
    k_inner = experts.w_gate_up.stride(2) == 1 and experts.w_down.stride(2) == 1
    path = quantised_slot_path(tokens, top_k, count, k_inner)
    if path is not None:
        _few(rows, experts, routing, out, path, before, after, ids_known=x_scales is None)
    else:
        config = quantised_config(x.device, experts.w_down.dtype, experts.blocks, tokens * top_k, count)
        _sorted(rows, experts, routing, out, config, before, after)


def _intermediate(experts: QuantisedExperts, slots: int) -> Rows:
    return empty_rows("inter", slots, experts.w_down.shape[2], experts.w_down.dtype, experts.blocks, experts.w_down.device)


def _few(
    x: Rows, experts: QuantisedExperts, routing: Routing, out: Tensor, path: SlotPath, before: Tensor | None, after: Tensor | None, *, ids_known: bool
) -> None:
    """Slot by slot."""
    slots, inner = routing.slots, experts.w_down.shape[2]
    inter = scratch("moe_inter", slots * inner, torch.float32, out.device)[: slots * inner].view(slots, inner)
    quantised_slot_gate_up(
        x.codes, experts.w_gate_up, Scales(x.scales, experts.gate_up_scales), inter, routing, path.up,
        activation=experts.activation, bias=experts.b_gate_up, factors=before, ids_known=ids_known,
    )  # fmt: skip
    rows = quantise(inter, _intermediate(experts, slots))
    scales = Scales(rows.scales, experts.down_scales)
    quantised_slot_down(rows.codes, experts.w_down, scales, out, routing, path.down, bias=experts.b_down, weights=after)


def _sorted(
    x: Rows, experts: QuantisedExperts, routing: Routing, out: Tensor, config: MoeConfig, before: Tensor | None, after: Tensor | None
) -> None:
    """Sorted by expert."""
    device, slots, top_k = out.device, routing.slots, routing.ids.shape[1]
    _, hidden, inner = experts.w_down.shape
    sorted_slots, places, tiles, bound = sorted_index(routing, config.block_m)
    inter = _intermediate(experts, slots)
    fused = experts.blocks and config.up.block_n == 2 * GROUP
    # fp16 would overflow where bf16 does not, and both have more bits than the codes.
    wide_dtype = torch.float32 if out.dtype == torch.float32 else torch.bfloat16
    buffer = scratch("moe_rows", slots * (hidden if fused else max(hidden, inner)), out.dtype, device)
    wide = inter.codes if fused else buffer[: slots * inner].view(wide_dtype).view(slots, inner)
    up_scales = Scales(x.scales, experts.gate_up_scales, inter.scales if fused else None)
    grouped_product(
        x.codes, experts.w_gate_up, wide, tiles, bound, config.block_m, config.up, bias=experts.b_gate_up, activation=experts.activation,
        gather=Gather(sorted_slots, top_k, before), scales=up_scales,
    )  # fmt: skip
    if not fused:
        quantise(wide, inter)
    rows = buffer[: slots * hidden].view(slots, hidden)
    down_scales = Scales(inter.scales, experts.down_scales)
    grouped_product(
        inter.codes, experts.w_down, rows, tiles, bound, config.block_m, config.down, bias=experts.b_down, scales=down_scales, tiles_known=True
    )
    moe_combine(rows, after, places, out, top_k=top_k)
