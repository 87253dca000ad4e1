"""Experts of transformers models, served by `fused_moe` on their weights as they lie.

transformers hands an experts function the module, the tokens, and the ids and weights that the model's router chose. Routing stays
the model's own, and so do shared experts. Padding is not visible here: pads cost as much as other tokens do, as in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal.errors import ArgumentError
from hal.integrations.expert_gates import EAGER, gate_options

__all__ = ["NAME", "expert_modules", "experts"]

#: Name of our implementations among those of transformers.
NAME = "hal"
#: Attribute of an experts module: options of `fused_moe` that its first call found.
_OPTIONS = "hal_options"
#: Attributes that transformers' decorator sets; modules without them never ask for an implementation.
_MARKS = ("has_gate", "has_bias", "is_transposed")
#: Attribute -> (value that is not served, what it means).
_REFUSED = {
    "has_gate": (False, "has no gate, only an up projection"),
    "has_post_expert_norm": (True, "normalises the result of each expert"),
}


def experts(module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Feed every token through its experts (an entry of transformers' `ExpertsInterface`).

    The backend is that of `hal.get_backend()` at the time of the call. Weights are read from the module at every call, so that they
    may be moved, offloaded and brought back in between; what the experts compute is read at the first one.

    Args:
        module: experts decorated with transformers' `use_experts_implementation`: `gate_up_proj` (E, 2I, H) and `down_proj`
            (E, H, I), or transposed; with `has_bias` also `gate_up_proj_bias` (E, 2I) and `down_proj_bias` (E, H).
        hidden_states: (T, H), the dtype of the weights.
        top_k_index: (T, k) integer expert ids; those outside 0..E-1, as of experts held elsewhere, are skipped.
        top_k_weights: (T, k) router weights.

    Returns:
        (T, H) in the dtype of `hidden_states`.

    Raises:
        ArgumentError: the experts do something that `fused_moe` does not, or a tensor requires grad.
    """
    options = getattr(module, _OPTIONS, None)
    if options is None:
        options = _read(module)
        setattr(module, _OPTIONS, options)
    weights: Any = module  # whose attributes torch types as Tensor or Module
    w_gate_up, w_down = weights.gate_up_proj, weights.down_proj
    if weights.is_transposed:
        w_gate_up, w_down = w_gate_up.transpose(1, 2), w_down.transpose(1, 2)
    if weights.has_bias:
        options = options | {"b_gate_up": weights.gate_up_proj_bias, "b_down": weights.down_proj_bias}
    return hal.get_backend().fused_moe(
        hidden_states, w_gate_up, w_down, top_k_weights.to(torch.float32).contiguous(), top_k_index.to(torch.int32).contiguous(), **options
    )


def expert_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a model whose experts `experts_implementation` decides about."""
    return [module for module in model.modules() if all(hasattr(module, mark) for mark in _MARKS)]


def _read(module: torch.nn.Module) -> dict[str, Any]:
    for attribute, (refused, meaning) in _REFUSED.items():
        if getattr(module, attribute, not refused) is refused:
            raise ArgumentError("experts", "module", f"{type(module).__name__} {meaning}", "gated experts without a norm of their own", EAGER)
    return gate_options(module)
