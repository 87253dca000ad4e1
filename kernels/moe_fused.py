"""Launcher of `fused_moe`: two kernels for very few tokens, else four to six.

Sorted path: index (one to three launches) -> gate and up projections, rows gathered and activation applied
inside -> down projection -> combine. Scratch is the activated intermediate (T * k * I), the down projection's output
(T * k * H), and int32 lists of 2 * T * k slots and at most `(T * k + min(T * k, E) * (block_m - 1)) / block_m` tiles of 16 bytes. The path for
few tokens needs the intermediate only. Nothing waits for the device. Quantised experts: `moe_quantised`.
"""

from __future__ import annotations

from torch import Tensor

from hal.kernels.moe_combine import moe_combine
from hal.kernels.moe_configs import Experts, MoeConfig, SlotPath
from hal.kernels.moe_experts import Activation, Gather, grouped_product
from hal.kernels.moe_index import sorted_index
from hal.kernels.moe_quantised import QuantisedExperts, quantised_moe
from hal.kernels.moe_routing import Routing
from hal.kernels.moe_slots import slot_down, slot_gate_up
from hal.kernels.moe_tuning import expert_config
from hal.kernels.scratch import scratch

__all__ = ["fused_moe"]


def fused_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    out: Tensor,
    *,
    activation: str,
    gate_up: str,
    alpha: float,
    limit: float | None,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_scales: tuple[Tensor, Tensor] | None = None,
    x_scales: Tensor | None = None,
    num_experts: int | None = None,
    expert_range: tuple[int, int] | None = None,
    expert_map: Tensor | None = None,
    weight_on_input: bool = False,
    num_valid_tokens: Tensor | None = None,
) -> None:
    """Write `out`; arguments as in the contract of `fused_moe`, defaults resolved.

    Args:
        x: (T, H); beside quantised weights of their dtype with `x_scales`, or a float dtype.
        w_gate_up: (E, 2I, H), either of the last dimensions contiguous.
        w_down: (E, H, I), likewise.
        weights: (T, k) fp32.
        ids: (T, k) int32.
        out: (T, H).
        activation: one of `moe_activation.ACTIVATIONS`.
        gate_up: "concat" or "interleaved".
        alpha: only read by swiglu_oai.
        limit: clamp of gates and ups, None for none.
        b_gate_up: (E, 2I) or None.
        b_down: (E, H) or None.
        w_scales: fp32 scales of both quantised weights: (E,), (E, N) or (E, ceil(N / 128), ceil(K / 128)); else None.
        x_scales: (T,), or (T, ceil(H / 128)) beside scales of blocks, of quantised x; else None.
        num_experts: experts that the ids speak of; E without range and map.
        expert_range: (first, end) id of the experts held here, or None.
        expert_map: (num_experts,) int32 id -> local expert or -1, or None.
        weight_on_input: `weights` multiply x before the first product instead of the result.
        num_valid_tokens: int32 of one element; later tokens are padding and get zero rows.
    """
    tokens, top_k = ids.shape
    experts, hidden, inner = w_down.shape
    if tokens == 0 or hidden == 0:
        return
    if experts == 0 or top_k == 0:
        out.zero_()
        return
    if expert_map is not None:
        spoken = expert_map.shape[0]
    elif expert_range is not None:
        spoken = expert_range[1] if num_experts is None else num_experts
    else:
        spoken = experts
    routing = Routing.of(ids, spoken, local=experts, expert_range=expert_range, expert_map=expert_map, num_valid_tokens=num_valid_tokens)
    act = Activation(activation, gate_up == "interleaved", alpha, limit)
    before, after = (weights, None) if weight_on_input else (None, weights)
    if w_scales is not None:
        quantised = QuantisedExperts(w_gate_up, w_scales[0], b_gate_up, w_down, w_scales[1], b_down, act)
        quantised_moe(x, x_scales, quantised, routing, out, before=before, after=after)
        return
    k_inner = w_gate_up.stride(2) == 1 and w_down.stride(2) == 1
    config = expert_config(x.device, Experts(experts, hidden, inner, top_k, x.element_size(), k_inner), tokens)
    if isinstance(config, SlotPath):
        _few(x, w_gate_up, w_down, before, after, out, routing, config, act, b_gate_up, b_down)
    else:
        _sorted(x, w_gate_up, w_down, before, after, out, routing, config, act, b_gate_up, b_down)


def _few(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, before: Tensor | None, after: Tensor | None, out: Tensor, routing: Routing, path: SlotPath,
    act: Activation, b_gate_up: Tensor | None, b_down: Tensor | None,
) -> None:  # fmt: skip
    """Slot by slot; `before` and `after` are the factors of x and of the results."""
    inter = scratch("moe_inter", routing.slots * w_down.shape[2], x.dtype, x.device)[: routing.slots * w_down.shape[2]].view(routing.slots, -1)
    slot_gate_up(
        x, w_gate_up, inter, routing, path.up,
        activation=act.name, interleaved=act.interleaved, bias=b_gate_up, factors=before, alpha=act.alpha, limit=act.limit,
    )  # fmt: skip
    slot_down(inter, w_down, out, routing, path.down, bias=b_down, weights=after)


def _sorted(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, before: Tensor | None, after: Tensor | None, out: Tensor, routing: Routing, config: MoeConfig,
    act: Activation, b_gate_up: Tensor | None, b_down: Tensor | None,
) -> None:  # fmt: skip
    """Sorted by expert."""
    device, slots, top_k = x.device, routing.slots, routing.ids.shape[1]
    _, hidden, inner = w_down.shape
    sorted_slots, places, tiles, bound = sorted_index(routing, config.block_m)
    inter = scratch("moe_inter", slots * inner, x.dtype, device)[: slots * inner].view(slots, inner)
    rows = scratch("moe_rows", slots * hidden, x.dtype, device)[: slots * hidden].view(slots, hidden)
    gather = Gather(sorted_slots, top_k, before)
    grouped_product(x, w_gate_up, inter, tiles, bound, config.block_m, config.up, bias=b_gate_up, activation=act, gather=gather)
    grouped_product(inter, w_down, rows, tiles, bound, config.block_m, config.down, bias=b_down, tiles_known=True)
    moe_combine(rows, after, places, out, top_k=top_k)
