"""Routing of transformers models by `topk_softmax`, for those who ask for it.

transformers has no interface for routers, so `serve_routers` replaces the forward of each router module of one model. A router is
replaced if its own forward, asked about made-up weights and tokens, routes as `topk_softmax` does; a model with another one is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import hal
from hal.errors import ArgumentError
from hal.integrations.experts import NAME, expert_modules

__all__ = ["serve_routers"]

#: Tensors that a router may have; any other could move its choice by less than the comparison sees.
_TENSORS = ("weight", "bias")
#: Scales of the rows of made-up logits, whose softmax neither ties nor underflows in fp32.
_SCALES = (0.1, 0.5, 1.0, 2.0, 5.0)
_TOLERANCE = 1e-4


def serve_routers(model: torch.nn.Module) -> list[str]:
    """Let `topk_softmax` route for a model whose experts `hal` serves; call it after everything that sets up the model.

    The choice is that of the model's router but for ties, which go to the lower id, and the weights stay fp32, where some models
    round theirs to 16 bits. To go back to experts of another implementation, load the model anew.

    Args:
        model: a transformers model loaded with `experts_implementation=register()`.

    Returns:
        The names of the router modules, which are served from now on.

    Raises:
        ArgumentError: the experts are not served by `hal`, or a router does something else. Then none is replaced.
    """
    others = {implementation for module in expert_modules(model) if (implementation := _implementation(module)) != NAME}
    if others or not expert_modules(model):
        found = f"has experts by {', '.join(map(repr, sorted(others)))}" if others else "has no experts that an implementation can be chosen for"
        raise ArgumentError("serve_routers", "model", found, "experts by 'hal'", "Load it with experts_implementation=register().")
    routers = {name: module for name, module in model.named_modules() if _is_router(module)}
    if not routers:
        raise ArgumentError(
            "serve_routers", "model", f"{type(model).__name__} has no routers", "a model with router modules", "Keep its own routing."
        )
    for (_, router), renormalize in zip(routers.items(), [_rule(router) for router in routers.values()], strict=True):
        _replace(router, renormalize)
    return list(routers)


def _implementation(module: torch.nn.Module) -> str:
    return str(getattr(module.config, "_experts_implementation", None))


def _is_router(module: torch.nn.Module) -> bool:
    return type(module).__name__.lower().endswith("router")


def _rule(router: Any) -> bool:
    """Return whether a router renormalises the weights of the experts that it chose, having found that it routes by softmax."""
    extra = sorted(name for name, _ in [*router.named_parameters(), *router.named_buffers()] if name not in _TENSORS)
    if extra or not isinstance(getattr(router, "top_k", None), int) or getattr(router, "weight", None) is None:
        raise _refusal(router, f"{type(router).__name__} has {', '.join(extra)}" if extra else f"{type(router).__name__} has no `weight` and `top_k`")
    stand_in, tokens = _made_up(router)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        logits = linear(tokens, stand_in.weight, getattr(stand_in, "bias", None))
        try:
            found = type(router).forward(stand_in, tokens)
        except Exception as error:  # whatever a foreign router raises: it wants other arguments, or has modules of its own
            raise _refusal(router, f"{type(router).__name__} does not route by tokens alone") from error
        for renormalize in (True, False):
            weights, ids = hal.get_backend("reference").topk_softmax(logits, router.top_k, renormalize=renormalize)
            if _agree(found, (logits, weights, ids)):
                return renormalize
    raise _refusal(router, f"{type(router).__name__} does not choose the best of a softmax")


def _made_up(router: Any) -> tuple[Any, Tensor]:
    """Return the router with random fp32 tensors on the CPU, whatever its own are and wherever they lie, and tokens to ask it about."""
    generator = torch.Generator("cpu").manual_seed(0)
    stand_in = copy.copy(router)
    stand_in.__dict__["_parameters"] = {
        name: None if value is None else torch.nn.Parameter(torch.randn(value.shape, generator=generator, device="cpu"), requires_grad=False)
        for name, value in router._parameters.items()
    }
    hidden = router.weight.shape[1]
    tokens = torch.randn(4 * len(_SCALES), hidden, generator=generator, device="cpu") / hidden**0.5
    return stand_in, tokens * torch.tensor(_SCALES, device="cpu").repeat(4)[:, None]


def _agree(found: Any, expected: tuple[Tensor, Tensor, Tensor]) -> bool:
    if not isinstance(found, tuple) or [getattr(x, "shape", None) for x in found] != [x.shape for x in expected]:
        return False
    logits, weights, ids = found
    same = torch.equal(logits.float(), expected[0]) and torch.equal(ids.int(), expected[2])
    return same and torch.allclose(weights.float(), expected[1], rtol=_TOLERANCE, atol=0)


def _replace(router: Any, renormalize: bool) -> None:
    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden_states.reshape(-1, hidden_states.shape[-1]), router.weight, getattr(router, "bias", None))
        return logits, *hal.get_backend().topk_softmax(logits, router.top_k, renormalize=renormalize)

    # Where accelerate has put a hook before a module, what it wraps is the attribute of this name.
    setattr(router, "_old_forward" if hasattr(router, "_hf_hook") else "forward", forward)


def _refusal(router: Any, problem: str) -> ArgumentError:
    return ArgumentError("serve_routers", "model", problem, "routers that choose the top_k of a softmax over all experts", "Keep its own routing.")
