"""`silu_and_mul`, `gelu_and_mul` and `swiglu_oai_and_mul` of the reference backend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.moe_activations import OAI_ALPHA, OAI_LIMIT

__all__ = ["activate", "gelu_and_mul", "silu_and_mul", "swiglu_oai_and_mul"]


def silu_and_mul(x: Tensor, *, gate_up: str = "concat", limit: float | None = None, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of x (M, 2I), clamped where asked; the contract is `hal.ops.moe_activations.SiluAndMul`."""
    return _result(x, activate(x, "silu", gate_up, None, limit), out)


def gelu_and_mul(x: Tensor, *, approximate: str = "none", gate_up: str = "concat", out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` of x (M, 2I); the contract is `hal.ops.moe_activations.GeluAndMul`."""
    return _result(x, activate(x, "gelu" if approximate == "none" else "gelu_tanh", gate_up), out)


def swiglu_oai_and_mul(
    x: Tensor, *, alpha: float = OAI_ALPHA, limit: float = OAI_LIMIT, gate_up: str = "interleaved", out: Tensor | None = None
) -> Tensor:
    """The clamped SwiGLU of gpt-oss of x (M, 2I); the contract is `hal.ops.moe_activations.SwigluOaiAndMul`."""
    return _result(x, activate(x, "swiglu_oai", gate_up, alpha, limit), out)


def _result(x: Tensor, result: Tensor, out: Tensor | None) -> Tensor:
    return result.to(x.dtype) if out is None else out.copy_(result)


def activate(x: Tensor, activation: str, gate_up: str, alpha: float | None = None, limit: float | None = None) -> Tensor:
    """Return the fp32 (M, I) activation of x (M, 2I); names and defaults as in `hal.ops.moe_fused.FusedMoe`."""
    if gate_up == "concat":
        gate, up = x.float().chunk(2, dim=1)
    else:
        gate, up = x[:, 0::2].float(), x[:, 1::2].float()
    if activation == "swiglu_oai":
        limit = OAI_LIMIT if limit is None else limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return gate * torch.sigmoid((OAI_ALPHA if alpha is None else alpha) * gate) * (up + 1.0)
    if activation == "silu":
        return functional.silu(gate) * up
    gelu = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    # On a CPU torch's own is NaN at +inf, where the vector unit computes it.
    return torch.where(gate == float("inf"), gate, gelu) * up
