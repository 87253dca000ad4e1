"""Compares the results of routing and of the expert pipeline with the oracle; rows that the contract leaves open are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance import moe_oracle as oracle
from hal.conformance.compare import OUTPUT, QUANTISED_ROWS, REQUANTISED_ROWS, ROUTER_WEIGHTS, assert_same_bits, close
from hal.ops.checks import FLOATS
from hal.ops.moe_checks import MoeIndex

__all__ = ["JUDGES", "assert_same_index"]

#: Activation ops -> what the oracle calls them, given their arguments.
_ACTIVATIONS: dict[str, Callable[[dict[str, Any]], tuple[str, float | None, float | None]]] = {
    "silu_and_mul": lambda a: ("silu", None, a["limit"]),
    "gelu_and_mul": lambda a: ("gelu" if a["approximate"] == "none" else "gelu_tanh", None, None),
    "swiglu_oai_and_mul": lambda a: ("swiglu_oai", a["alpha"], a["limit"]),
}


def _routed(a: dict[str, Any], result: tuple[Tensor, Tensor]) -> float:
    weights, ids = result
    expected_weights, expected_ids = oracle.route(a)
    assert_same_bits("ids", ids, expected_ids)
    top = expected_weights.abs().amax(1, keepdim=True)
    unit = torch.where(top > 0, top, torch.ones_like(top))
    if a.get("correction_bias") is None and a.get("scale", 1.0) >= 0:
        assert bool((weights[:, 1:] <= weights[:, :-1]).all()), "weights increase along k"
    return close("weights, over the largest of their row", weights.double().cpu() / unit, expected_weights / unit, ROUTER_WEIGHTS)


def assert_same_index(index: MoeIndex, expected: MoeIndex) -> None:
    """Check an index against one whose `dst_to_src` has the used rows only."""
    used = expected.dst_to_src.shape[0]
    assert_same_bits("expert_sizes", index.expert_sizes, expected.expert_sizes)
    assert_same_bits("src_to_dst", index.src_to_dst, expected.src_to_dst)
    assert_same_bits("dst_to_src, used part", index.dst_to_src[:used], expected.dst_to_src)


def _indexed(a: dict[str, Any], index: MoeIndex) -> float:
    assert isinstance(index, MoeIndex), f"the result is {type(index).__name__}, not a MoeIndex"
    assert_same_index(index, oracle.moe_index(a))
    return 0.0


def _expanded(a: dict[str, Any], rows: Tensor) -> float:
    if rows.shape[0]:
        used = int(a["index"].expert_sizes.sum())
        top_k = rows.shape[0] // a["x"].shape[0]
        assert_same_bits("used rows", rows[:used], a["x"][a["index"].dst_to_src[:used].long() // top_k])
    return 0.0


def _multiplied(a: dict[str, Any], rows: Tensor) -> float:
    expected = oracle.group_gemm(a)
    rounds = a["x"].dtype in FLOATS and a["w_scales"] is not None
    return close("used rows", rows[: expected.shape[0]], expected, QUANTISED_ROWS if rounds else OUTPUT[rows.dtype])


def _activated(op: str) -> Callable[[dict[str, Any], Tensor], float]:
    def judge(a: dict[str, Any], rows: Tensor) -> float:
        name, alpha, limit = _ACTIVATIONS[op](a)
        return close("rows", rows, oracle.activate(a["x"], name, a["gate_up"], alpha, limit), OUTPUT[rows.dtype])

    return judge


def _combined(a: dict[str, Any], out: Tensor) -> float:
    return close("out", out, oracle.moe_combine(a), OUTPUT[out.dtype])


def _fused(a: dict[str, Any], out: Tensor) -> float:
    return close("out", out, oracle.fused_moe(a), OUTPUT[out.dtype] if a["w_scales"] is None else REQUANTISED_ROWS[a["w_down"].dtype])


#: op -> (all its arguments by name, on one device; its result) -> error as a fraction of the scale; AssertionError if it is wrong.
JUDGES: dict[str, Callable[[dict[str, Any], Any], float]] = {
    "topk_softmax": _routed,
    "route": _routed,
    "moe_index": _indexed,
    "moe_expand": _expanded,
    "group_gemm": _multiplied,
    **{op: _activated(op) for op in _ACTIVATIONS},
    "moe_combine": _combined,
    "fused_moe": _fused,
}
