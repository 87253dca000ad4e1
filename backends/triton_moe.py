"""The Triton backend's ops of mixtures of experts: the contracts' signatures in front of the launchers in `hal.kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

import hal.kernels.moe_activation as _activation
import hal.kernels.moe_combine as _rows
import hal.kernels.moe_experts as _experts
import hal.kernels.moe_fused as _fused
import hal.kernels.moe_index as _index
import hal.kernels.route as _route
from hal.kernels.moe_routing import Routing
from hal.ops.moe_activations import OAI_ALPHA, OAI_LIMIT
from hal.ops.moe_checks import MoeIndex, result_dtype

__all__ = [
    "fused_moe",
    "gelu_and_mul",
    "group_gemm",
    "moe_combine",
    "moe_expand",
    "moe_index",
    "route",
    "silu_and_mul",
    "swiglu_oai_and_mul",
    "topk_softmax",
]


def topk_softmax(
    logits: Tensor, top_k: int, *, renormalize: bool = False, weights: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `hal.ops.moe_routing.TopkSoftmax`."""
    return _route.route(logits, top_k, renormalize=renormalize, weights=weights, ids=ids)


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scale: float = 1.0,
    weights: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `hal.ops.moe_routing.Route`."""
    return _route.route(
        logits,
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
        scale=scale,
        weights=weights,
        ids=ids,
    )


def moe_index(
    ids: Tensor,
    num_experts: int,
    *,
    expert_range: tuple[int, int] | None = None,
    expert_map: Tensor | None = None,
    num_local_experts: int | None = None,
    out: MoeIndex | None = None,
) -> MoeIndex:
    """See `hal.ops.moe_permute.MoeIndexOp`."""
    routing = Routing.of(ids, num_experts, local=num_local_experts, expert_range=expert_range, expert_map=expert_map)
    if out is None:
        sizes = (routing.slots, routing.slots, routing.local)
        out = MoeIndex(*(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes))
    _index.moe_index(routing, *out)
    return out


def moe_expand(x: Tensor, index: MoeIndex, *, out: Tensor | None = None) -> Tensor:
    """See `hal.ops.moe_permute.MoeExpand`."""
    tokens, hidden = x.shape
    slots = index.src_to_dst.shape[0]
    if out is None:
        out = x.new_empty((slots, hidden))
    _rows.moe_expand(x, index.src_to_dst, out, top_k=slots // max(tokens, 1))
    return out


def moe_combine(
    y: Tensor, weights: Tensor, index: MoeIndex, *, residual: Tensor | None = None, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """See `hal.ops.moe_permute.MoeCombine`."""
    tokens, top_k = weights.shape
    if out is None:
        out = y.new_empty((tokens, y.shape[1]))
    _rows.moe_combine(y, weights, index.src_to_dst, out, top_k=top_k, residual=residual, scale=scale)
    return out


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
    """See `hal.ops.moe_gemm.GroupGemm`."""
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[1]), dtype=result_dtype(x, None))
    _experts.group_gemm(x, weight, expert_sizes, out, bias=bias, w_scales=w_scales, x_scales=x_scales)
    return out


def silu_and_mul(x: Tensor, *, gate_up: str = "concat", limit: float | None = None, out: Tensor | None = None) -> Tensor:
    """See `hal.ops.moe_activations.SiluAndMul`."""
    return _gated(x, out, "silu", gate_up, limit=limit)


def gelu_and_mul(x: Tensor, *, approximate: str = "none", gate_up: str = "concat", out: Tensor | None = None) -> Tensor:
    """See `hal.ops.moe_activations.GeluAndMul`."""
    return _gated(x, out, "gelu" if approximate == "none" else "gelu_tanh", gate_up)


def swiglu_oai_and_mul(
    x: Tensor, *, alpha: float = OAI_ALPHA, limit: float = OAI_LIMIT, gate_up: str = "interleaved", out: Tensor | None = None
) -> Tensor:
    """See `hal.ops.moe_activations.SwigluOaiAndMul`."""
    return _gated(x, out, "swiglu_oai", gate_up, alpha, limit)


def _gated(x: Tensor, out: Tensor | None, activation: str, gate_up: str, alpha: float = OAI_ALPHA, limit: float | None = None) -> Tensor:
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
    _activation.gated(x, out, activation=activation, gate_up=gate_up, alpha=alpha, limit=limit)
    return out


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
    """See `hal.ops.moe_fused.FusedMoe`."""
    if out is None:
        out = x.new_empty(x.shape, dtype=result_dtype(x, None))
    if limit is None and activation == "swiglu_oai":  # to the kernels None is no clamp
        limit = OAI_LIMIT
    _fused.fused_moe(
        x,
        w_gate_up,
        w_down,
        weights,
        ids,
        out,
        activation=activation,
        gate_up=gate_up,
        b_gate_up=b_gate_up,
        b_down=b_down,
        w_scales=w_scales,
        x_scales=x_scales,
        alpha=OAI_ALPHA if alpha is None else alpha,
        limit=limit,
        num_experts=num_experts,
        expert_range=expert_range,
        expert_map=expert_map,
        weight_on_input=weight_on_input,
        num_valid_tokens=num_valid_tokens,
    )
    return out
