"""Other implementations of routing and of the expert layer: PyTorch's own, and those of a Python file that the user gives.

The file may define any of these; each computes at once, on what it is given, and can be captured in a CUDA graph:

    topk_softmax(logits, top_k, renormalize) -> (weights fp32, ids)      logits (T, E); both (T, k), best first
    fused_moe(x, w_gate_up, w_down, weights, ids, config) -> (T, H)      x (T, H), w_gate_up (E, 2I, H), w_down (E, H, I),
                                                                         weights fp32 and ids int32 (T, k); silu, gates first
    moe_config(num_experts, intermediate, hidden, tokens) -> config      without it, config is None
    NAMES = {"fused_moe": "...", "topk_softmax": "..."}                  what tables call them; default: the name of the file
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hal.bench.peers import PeersFile

__all__ = ["FUNCTIONS", "Experts", "MoePeers", "Router", "experts_of_torch", "routers_of_torch"]

FUNCTIONS = ("fused_moe", "topk_softmax")

#: x, w_gate_up, w_down, weights, ids -> (T, H)
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: logits, k -> weights, ids
Router = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class MoePeers(PeersFile):
    """The functions of a peers file, by the name that tables call them."""

    def __init__(self, path: Path) -> None:
        """Import the file; raises HalError if it cannot be used."""
        super().__init__(path, FUNCTIONS, "the module text of hal/bench/moe/peers.py")

    def _name(self, function: str) -> str:
        return str(getattr(self.module, "NAMES", {}).get(function, self.path.stem))

    def experts(self, num_experts: int, inter: int, hidden: int, tokens: int) -> Mapping[str, Experts]:
        """Return the expert layer for a shape."""
        if "fused_moe" not in self.functions:
            return {}
        choose = getattr(self.module, "moe_config", None)
        config = None if choose is None else choose(num_experts, inter, hidden, tokens)
        call = self.functions["fused_moe"]
        return {self._name("fused_moe"): lambda *tensors: call(*tensors, config)}

    def routers(self) -> Mapping[str, Router]:
        """Return the router."""
        if "topk_softmax" not in self.functions:
            return {}
        call = self.functions["topk_softmax"]
        return {self._name("topk_softmax"): lambda logits, top_k: call(logits, top_k, False)}


def experts_of_torch() -> Mapping[str, Experts]:
    """Return PyTorch's ways to compute the expert layer: over its grouped product, where this version has it."""
    return {"torch_grouped_mm": _grouped} if hasattr(torch, "_grouped_mm") else {}


def routers_of_torch() -> Mapping[str, Router]:
    """Return PyTorch's ways to route."""
    return {"torch_ops": _softmax_topk}


def _grouped(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Sort the slots by expert, multiply, and bring the results back; no host synchronisation."""
    tokens, top_k = ids.shape
    slots = ids.flatten().long()
    order = slots.argsort(stable=True)
    sizes = torch.zeros(w_gate_up.shape[0], dtype=torch.int32, device=x.device).scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
    ends = sizes.cumsum(0).int()
    gate, up = torch._grouped_mm(x[order // top_k], w_gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    return (rows[places].view(tokens, top_k, -1) * weights[:, :, None]).sum(1).to(x.dtype)


def _softmax_topk(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k))  # type: ignore[return-value]
