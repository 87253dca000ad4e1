# mypy: disable-error-code="no-untyped-def"
# (the `_..._signature` functions: their types are those of the Protocol above each, and a test compares the parameters)
"""Routing of a mixture of experts: `topk_softmax` and `route`.

Axes: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hal.ops.checks import FLOATS, Checker
from hal.ops.op import Arguments, Op, TensorMeta
from hal.ops.signature import facts, number, types

__all__ = ["GROUP_SCORES", "ROUTE", "SCORINGS", "TOPK_SOFTMAX", "Route", "RouteCall", "TopkSoftmax"]

#: How logits become scores.
SCORINGS = ("softmax", "sigmoid")
#: How a group of experts is scored: by its best expert (DeepSeek-V2) or by the sum of its best two (DeepSeek-V3).
GROUP_SCORES = ("max", "top2")


class TopkSoftmax(Protocol):
    """Type of `backend.topk_softmax`."""

    def __call__(
        self,
        logits: Tensor,
        top_k: int,
        *,
        renormalize: bool = False,
        weights: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the k most probable experts of every token: `route` with its defaults.

        Args:
            logits: (T, E) fp32, fp16 or bf16, E >= 1; the last dimension contiguous, any row stride.
            top_k: k, 1 to E.
            renormalize: divide the k weights by their sum.
            weights: (T, k) fp32, written when given, any row stride.
            ids: (T, k) int32, written when given, any row stride.

        Returns:
            (weights, ids), best expert first; softmax over all E experts. Bad logits and ties: see `route`.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _topk_softmax_signature(logits, top_k, *, renormalize=False, weights=None, ids=None):
    return (
        logits.shape, logits.stride(), logits.dtype, logits.device, top_k, renormalize, facts(weights), facts(ids),
        types(top_k, renormalize), logits.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip


class Route(Protocol):
    """Type of `backend.route`."""

    def __call__(
        self,
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
        """Choose k experts for every token, and how much each weighs.

        Scores are `softmax(logits)` over all E experts (Shazeer et al., 2017) or `sigmoid(logits)` (DeepSeek-V3, 2024), in
        fp32 from the load on. Experts are chosen by score plus `correction_bias`, where given; weights are the scores
        without it, then divided by their sum where `renormalize` asks, then multiplied by `scale`.

        Order: score (with the bias) descending, then id ascending. Without a bias a higher logit is a higher score, so
        that the order is that of the logits: rounding or underflow of the scores makes no ties (-0.0 equals 0.0).

        Args:
            logits: (T, E) fp32, fp16 or bf16, E >= 1; the last dimension contiguous, any row stride.
            top_k: k, 1 to E, and at most the `top_groups * E / num_groups` experts that may be chosen.
            scoring: "softmax" or "sigmoid".
            renormalize: divide the k weights by their sum; where that is 0 in fp32, the weights are 0.
            correction_bias: (E,) fp32, finite; a NaN entry acts like NaN logits of that expert.
            num_groups: groups of E / num_groups neighbouring experts, which must come out even.
            top_groups: only experts of that many groups may be chosen, 1 to num_groups: those with the highest group
                score, ties by index ascending.
            group_score: "max", the highest score (with the bias) in the group, or "top2", the sum of the two highest;
                an unusable expert counts as -inf, and a group of one expert has its score.
            scale: factor of the weights.
            weights: (T, k) fp32, written when given, any row stride.
            ids: (T, k) int32, written when given, any row stride.

        Returns:
            (weights, ids), best expert first. Ids of a row are distinct and in 0..E-1, whatever the logits. NaN and -inf
            logits are unusable: they rank below every other expert (of the chosen groups), weigh 0 and add 0 to the
            softmax's denominator. Several +inf share the softmax equally, and everything else weighs 0. A row with no usable
            logit gives ids 0..k-1 and weights 0. A row's result does not depend on its neighbours. T = 0 gives empty results.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _route_signature(
    logits,
    top_k,
    *,
    scoring="softmax",
    renormalize=False,
    correction_bias=None,
    num_groups=1,
    top_groups=1,
    group_score="max",
    scale=1.0,
    weights=None,
    ids=None,
):
    return (
        logits.shape, logits.stride(), logits.dtype, logits.device, top_k, scoring, renormalize, facts(correction_bias),
        num_groups, top_groups, group_score, number(scale), scale == 1.0, facts(weights), facts(ids),
        types(top_k, renormalize, num_groups, top_groups), logits.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip


@dataclass(frozen=True)
class RouteCall:
    """What a gate sees of a `topk_softmax` or `route` call.

    Attributes:
        op: name of the op.
        dtype: dtype of the logits.
        tokens: T. num_experts: E. top_k: k.
        scoring, renormalize, num_groups, top_groups, group_score: as in the contract.
        features: the optional arguments in use: renormalize, correction_bias, groups (some are left out), scale, weights, ids.
        logits_strides: in elements.
    """

    op: str
    dtype: torch.dtype
    tokens: int
    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool
    num_groups: int
    top_groups: int
    group_score: str
    features: frozenset[str]
    logits_strides: tuple[int, ...]


def check_route(a: Arguments) -> RouteCall:
    """Check a `route` call and return what gates look at."""
    check = Checker("route", a.logits.device)
    tokens, experts = _check_logits(check, a)
    check.choice("scoring", a.scoring, SCORINGS)
    check.choice("group_score", a.group_score, GROUP_SCORES)
    check.integer("num_groups", a.num_groups, least=1)
    if experts % a.num_groups:
        raise check.fail("num_groups", f"is {a.num_groups}", f"a divisor of the {experts} experts")
    check.integer("top_groups", a.top_groups, least=1, most=a.num_groups)
    allowed = a.top_groups * (experts // a.num_groups)
    if a.top_k > allowed:
        raise check.fail("top_k", f"is {a.top_k}", f"at most the {allowed} experts of {a.top_groups} groups", "Raise top_groups or lower top_k.")
    check.number("scale", a.scale)
    if a.correction_bias is not None:
        check.tensor("correction_bias", a.correction_bias, shape=(experts,), axes="(E,)", dtypes=(torch.float32,))
    check.no_grad(correction_bias=a.correction_bias)
    used = {name for name in ("correction_bias", "weights", "ids") if getattr(a, name) is not None}
    used |= {"groups"} if a.top_groups < a.num_groups else set()
    used |= {"scale"} if a.scale != 1.0 else set()
    return _call(check, a, tokens, experts, used, a.scoring, (a.num_groups, a.top_groups, a.group_score))


def check_topk_softmax(a: Arguments) -> RouteCall:
    """Check a `topk_softmax` call and return what gates look at."""
    check = Checker("topk_softmax", a.logits.device)
    tokens, experts = _check_logits(check, a)
    used = {name for name in ("weights", "ids") if getattr(a, name) is not None}
    return _call(check, a, tokens, experts, used, "softmax", (1, 1, "max"))


def _check_logits(check: Checker, a: Arguments) -> tuple[int, int]:
    check.tensor("logits", a.logits, shape=(None, None), axes="(T, E)", dtypes=FLOATS)
    check.no_grad(logits=a.logits)
    tokens, experts = a.logits.shape
    if not experts:
        raise check.fail("logits", f"has shape {tuple(a.logits.shape)}", "(T, E) with at least one expert")
    check.integer("top_k", a.top_k, least=1, most=experts)
    check.flag("renormalize", a.renormalize)
    return tokens, experts


def _call(check: Checker, a: Arguments, tokens: int, experts: int, used: set[str], scoring: str, groups: tuple[int, int, str]) -> RouteCall:
    for name, dtype in (("weights", torch.float32), ("ids", torch.int32)):
        check.output(name, getattr(a, name), shape=(tokens, a.top_k), axes="(T, k)", dtypes=(dtype,))
    used |= {"renormalize"} if a.renormalize else set()
    return RouteCall(
        check.op,
        a.logits.dtype,
        tokens,
        experts,
        a.top_k,
        scoring,
        a.renormalize,
        *groups,
        features=frozenset(used),
        logits_strides=a.logits.stride(),
    )


def _meta(a: Arguments) -> tuple[TensorMeta, ...]:
    shape = (a.logits.shape[0], a.top_k)
    return TensorMeta(shape, torch.float32), TensorMeta(shape, torch.int32)


TOPK_SOFTMAX = Op("topk_softmax", TopkSoftmax, _topk_softmax_signature, check_topk_softmax, _meta)
ROUTE = Op("route", Route, _route_signature, check_route, _meta)
