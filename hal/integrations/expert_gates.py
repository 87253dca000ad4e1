"""Which gated activation the experts of a transformers model apply, as options of `fused_moe`.

What a module says of itself (its layout flags, `alpha` and `limit`) gives the candidates; its own gate function, asked about a
grid of numbers, decides among them. So a gate that only looks like a known one is refused, not computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

import hal
from hal.backend import Backend
from hal.errors import ArgumentError
from hal.ops.moe_fused import ACTIVATIONS

__all__ = ["EAGER", "gate_options"]

EAGER = "Load the model with experts_implementation='eager'."
#: Activation -> the op of a backend that defines it, over rows of all gates and then all ups.
_OPS: dict[str, Callable[..., Tensor]] = {
    "silu": lambda backend, x, **numbers: backend.silu_and_mul(x, **numbers),
    "gelu": lambda backend, x: backend.gelu_and_mul(x),
    "gelu_tanh": lambda backend, x: backend.gelu_and_mul(x, approximate="tanh"),
    "swiglu_oai": lambda backend, x, **numbers: backend.swiglu_oai_and_mul(x, gate_up="concat", **numbers),
}
#: Number of the contract -> what modules and configs call it.
_NAMES = {"alpha": ("alpha", "swiglu_alpha"), "limit": ("limit", "swiglu_limit")}
#: fp32 rounds at some 1e-7 of the factors; the nearest two activations, GELU and its tanh approximation, differ by 5e-4.
_TOLERANCE = 1e-5


def gate_options(module: torch.nn.Module) -> dict[str, Any]:
    """Return the options of `fused_moe` that say what these experts do between their two products.

    Args:
        module: experts decorated with transformers' `use_experts_implementation`.

    Returns:
        `activation` and `gate_up`, and `alpha` and `limit` where the activation has them. Nothing is computed on the module's device.

    Raises:
        ArgumentError: their activation is none of the contract's, or they are no gated experts.
    """
    options: dict[str, Any] = {"gate_up": "concat" if getattr(module, "is_concatenated", True) else "interleaved"}
    gate, up = _grid()
    # Autocast would round the numbers of the comparison, not those of the model.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = _ask(module, gate, up, options["gate_up"])
        reference = hal.get_backend("reference")
        for activation, numbers in _candidates(module):
            if _agree(found, _expected(reference, activation, gate, up, numbers), gate, up):
                return options | {"activation": activation} | numbers
    raise _unknown(module)


def _grid() -> tuple[Tensor, Tensor]:
    """Gates by column and ups by row, (M, I): dense where activations bend, and far enough out for any clamp to show."""
    far = torch.tensor([2.0**i for i in range(4, 17)], device="cpu")
    line = torch.cat([-far, torch.linspace(-12, 12, 193, device="cpu"), far])
    ups, gates = torch.meshgrid(line[::4], line, indexing="ij")
    return gates.contiguous(), ups.contiguous()


def _ask(module: torch.nn.Module, gate: Tensor, up: Tensor, gate_up: str) -> Tensor:
    """Return what the module's own gate function makes of the grid."""
    packed = torch.cat([gate, up], 1) if gate_up == "concat" else torch.stack([gate, up], 2).flatten(1)
    own: Any = module  # whose attributes torch types as Tensor or Module
    try:
        return own._apply_gate(packed)
    except Exception as error:  # whatever a foreign gate raises: it has parameters of its own, or wants another shape
        raise _unknown(module) from error


def _candidates(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield activations of the contract, each with the numbers of the module that it takes: all of them, or none."""
    stated = {name: _stated(module, names) for name, names in _NAMES.items()}
    for activation, takes in ACTIVATIONS.items():
        numbers = {name: value for name in takes if (value := stated[name]) is not None}
        if numbers:
            yield activation, numbers
        yield activation, {}


def _stated(module: torch.nn.Module, names: tuple[str, ...]) -> float | None:
    """Return the first of these numbers that the module or else its config has."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                return float(value)
    return None


def _expected(backend: Backend, activation: str, gate: Tensor, up: Tensor, numbers: dict[str, float]) -> Tensor:
    return _OPS[activation](backend, torch.cat([gate, up], 1), **numbers)


def _agree(found: Any, expected: Tensor, gate: Tensor, up: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool(((found.float() - expected).abs() <= _TOLERANCE * (1 + gate.abs()) * (1 + up.abs())).all())


def _unknown(module: torch.nn.Module) -> ArgumentError:
    config, act = getattr(module, "config", None), getattr(module, "act_fn", None)
    words = [value for name in ("hidden_act", "hidden_activation", "mlp_hidden_act") if isinstance(value := getattr(config, name, None), str)]
    named = [repr(word) for word in words[:1]] + ([getattr(act, "__name__", type(act).__name__)] if act is not None else [])
    own = "" if getattr(type(module), "_apply_gate", None) is moe._default_apply_gate else ", in a gate function of its own"
    found = f"of {type(module).__name__} ({type(config).__name__}) is {', '.join(named) or 'not named'}{own}"
    return ArgumentError("experts", "activation", found, f"{', '.join(ACTIVATIONS)} (silu also clamped), as `fused_moe` defines them", EAGER)
