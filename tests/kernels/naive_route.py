"""Routing in float64 by a stable sort: what `route` means, in the fewest lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")


def expected(
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
) -> tuple[np.ndarray, np.ndarray]:
    """(weights float64, ids) of every row."""
    x = logits.double().cpu().numpy()
    bias = np.zeros(x.shape[1]) if correction_bias is None else correction_bias.double().cpu().numpy()
    x = np.where(np.isnan(x) | np.isnan(bias), -INF, x)
    rows = [_row(r, bias, top_k, scoring == "sigmoid", renormalize, correction_bias is None, num_groups, top_groups, group_score) for r in x]
    if not rows:
        return np.zeros((0, top_k)), np.zeros((0, top_k), np.int64)
    return np.stack([w for w, _ in rows]) * scale, np.stack([i for _, i in rows])


def _row(
    x: np.ndarray, bias: np.ndarray, k: int, sigmoid: bool, renormalize: bool, by_logit: bool, groups: int, top_groups: int, group_score: str
) -> tuple[np.ndarray, np.ndarray]:
    peak = x.max()
    with np.errstate(invalid="ignore", over="ignore"):
        score = 1 / (1 + np.exp(-x)) if sigmoid else np.where(x == peak, 1.0, np.exp(x - peak)) * (peak > -INF)
    if not sigmoid:
        score = score / max(score.sum(), 1.0)
    biased = np.where(x == -INF, -INF, score + bias)
    rank = x if by_logit else biased
    if top_groups < groups:
        if group_score == "top2" and x.size > groups:
            of_group = np.sort(biased.reshape(groups, -1))[:, -2:].sum(1)
        else:
            of_group = rank.reshape(groups, -1).max(1)
        chosen = np.argsort(-of_group, kind="stable")[:top_groups]
        allowed = np.isin(np.arange(x.size) // (x.size // groups), chosen)
    else:
        allowed = np.ones(x.size, bool)
    candidates = np.flatnonzero(allowed)
    ids = candidates[np.argsort(-rank[candidates], kind="stable")[:k]]
    weights = score[ids]
    if renormalize:
        weights = weights / weights.sum() if weights.sum() > 0 else weights * 0
    return weights, ids


def assert_routes(got: tuple[Tensor, Tensor], logits: Tensor, top_k: int, tolerance: float = 2e-5, **options: Any) -> None:
    """The ids are the expected ones; the weights too, within a tolerance relative to the largest of them."""
    weights, ids = expected(logits, top_k, **options)
    assert got[0].dtype == torch.float32
    assert got[1].dtype == torch.int32
    assert np.array_equal(got[1].cpu().numpy(), ids), f"ids {got[1].tolist()} are not {ids.tolist()}"
    error = np.abs(got[0].double().cpu().numpy() - weights)
    assert not np.isnan(error).any()
    assert error.max(initial=0) <= tolerance * np.abs(weights).max(initial=0), error.max()


def bad_rows(experts: int) -> dict[str, Tensor]:
    """Rows of logits that hold what no router should make, by name."""
    plain = torch.linspace(-2, 2, experts)
    rows = {name: torch.full((experts,), value) for name, value in (("nan", NAN), ("inf", INF), ("-inf", -INF), ("equal", 0.5), ("huge", 3e38))}
    for name, value in (("one-nan", NAN), ("one-inf", INF), ("one--inf", -INF)):
        rows[name] = plain.clone()
        rows[name][experts // 2] = value
    rows["infs"] = plain.clone()
    rows["infs"][::3] = INF
    rows["nan-or--inf"] = torch.where(torch.arange(experts) % 2 == 0, NAN, -INF)
    rows["one-usable"] = torch.full((experts,), -INF)
    rows["one-usable"][-1] = -7.0
    rows["all-kinds"] = torch.tensor([NAN, INF, -INF, 1.0, -1.0, 0.0, -0.0]).repeat(experts)[:experts]
    rows["far-apart"] = plain * 1000
    rows["zeros"] = torch.where(torch.arange(experts) % 2 == 0, 0.0, -0.0)
    return rows
