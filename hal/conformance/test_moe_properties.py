"""Random calls of routing and of the expert pipeline, drawn by hypothesis with the seed of the suite, against the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from hal.conformance.cases import DTYPES
from hal.conformance.moe_inputs import Moe, build_moe
from hal.conformance.routing_inputs import levels
from hal.conformance.subject import Subject
from hal.conformance.test_properties import explore
from hal.ops.moe_fused import ACTIVATIONS

_LOGITS = st.one_of(st.floats(-60.0, 60.0, width=16), st.sampled_from((0.0, -0.0, 1.0, math.nan, math.inf, -math.inf)))


@st.composite
def routings(draw: Callable[..., Any]) -> dict[str, Any]:
    """Few logits of any value, in any groups. Group scores are maxima: sums of two may differ in their last bit."""
    groups = draw(st.integers(1, 5))
    experts = groups * draw(st.integers(1, 7))
    top_groups = draw(st.integers(1, groups))
    rows = draw(st.integers(0, 4))
    return {
        "values": [draw(st.lists(_LOGITS, min_size=experts, max_size=experts)) for _ in range(rows)],
        "dtype": draw(st.sampled_from(("fp32", "fp16", "bf16"))),
        "experts": experts,
        "options": {
            "top_k": draw(st.integers(1, top_groups * experts // groups)),
            "scoring": draw(st.sampled_from(("softmax", "sigmoid"))),
            "renormalize": draw(st.booleans()),
            "num_groups": groups,
            "top_groups": top_groups,
            "scale": draw(st.sampled_from((1.0, 2.5))),
        },
    }


def attempt_route(subject: Subject, drawn: dict[str, Any]) -> None:
    logits = torch.tensor(drawn["values"]).reshape(len(drawn["values"]), drawn["experts"]).to(subject.device, DTYPES[drawn["dtype"]])
    subject.verify("route", {"logits": logits, **drawn["options"]})


@st.composite
def pipelines(draw: Callable[..., Any], quantised: bool) -> Moe:
    """A call with few tokens, small sizes, and any mix of features."""
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    tokens, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    placement = draw(st.sampled_from(("", "", "range", "map", "nothing")))
    return Moe(
        "drawn",
        tokens=tokens,
        experts=draw(st.integers(1, 9)),
        top_k=top_k,
        hidden=draw(st.sampled_from((8, 24, 40, 130))),
        inter=draw(st.sampled_from((8, 24, 72))),
        dtype=draw(st.sampled_from(("fp16", "bf16") if quantised else ("fp32", "fp16", "bf16"))),
        quantised="int8" if quantised else "",
        scales=draw(st.sampled_from(("tensor", "channel", "block"))),
        x_quantised=quantised and draw(st.booleans()),
        activation=activation,
        gate_up=draw(st.sampled_from(("concat", "interleaved"))),
        biases=draw(st.booleans()),
        bias_dtype=draw(st.sampled_from(("", "fp32"))),
        alpha=draw(st.sampled_from((None, 0.7))) if "alpha" in ACTIVATIONS[activation] else None,
        limit=draw(st.sampled_from((None, 0.6))) if "limit" in ACTIVATIONS[activation] else None,
        routing=draw(st.sampled_from(("random", "one", "few", "repeats", "garbage", "nobody", "balanced"))),
        placement=placement,
        weight_on_input=draw(st.booleans()),
        valid=draw(st.one_of(st.none(), st.integers(-1, tokens + 1))),
        storage=draw(st.sampled_from(("compact", "transposed", "padded", "transposed_padded"))),
        x_storage=draw(st.sampled_from(("compact", "padded"))),
        out=draw(st.sampled_from(("new", "given", "strided"))),
    )


def attempt_fused(subject: Subject, case: Moe) -> None:
    subject.verify("fused_moe", build_moe(case, subject.generator(), subject.device))


@st.composite
def indices(draw: Callable[..., Any]) -> dict[str, Any]:
    """Ids of which some are none, and any placement."""
    experts = draw(st.integers(0, 12))
    tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 4))
    ids = st.one_of(st.integers(-2, experts + 1), st.sampled_from((2**31 - 1, -(2**31))))
    start = draw(st.integers(0, experts))
    local = draw(st.integers(0, experts + 1))
    placements: tuple[dict[str, Any], ...] = (
        {},
        {"expert_range": (start, draw(st.integers(start, experts)))},
        {"expert_map": draw(st.lists(st.integers(-1, local), min_size=experts, max_size=experts)), "num_local_experts": local},
    )
    return {
        "ids": [draw(st.lists(ids, min_size=top_k, max_size=top_k)) for _ in range(tokens)],
        "top_k": top_k,
        "num_experts": experts,
        **draw(st.sampled_from(placements)),
    }


def attempt_index(subject: Subject, drawn: dict[str, Any]) -> None:
    args = dict(drawn)
    shape = (len(args["ids"]), args.pop("top_k"))
    args["ids"] = torch.tensor(args["ids"], dtype=torch.int32, device=subject.device).reshape(shape)
    if "expert_map" in args:
        args["expert_map"] = torch.tensor(args["expert_map"], dtype=torch.int32, device=subject.device)
    subject.verify("moe_index", args)


@pytest.mark.hal_op("route")
def test_route(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_route, routings())


@pytest.mark.hal_op("topk_softmax")
@pytest.mark.parametrize("count", [1, 2, 50])
def test_topk_softmax(hal_subject: Subject, count: int) -> None:
    """Any sizes, with few or many different logits."""

    def attempt(subject: Subject, sizes: tuple[int, int, int]) -> None:
        tokens, experts, top_k = sizes
        logits = levels(subject.generator(), tokens, experts, count).sub(count / 2).div(4).to(subject.device, torch.bfloat16)
        subject.verify("topk_softmax", {"logits": logits, "top_k": min(top_k, experts)})

    explore(hal_subject, attempt, st.tuples(st.integers(0, 20), st.integers(1, 300), st.integers(1, 20)))


@pytest.mark.hal_op("moe_index")
def test_index(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_index, indices())


@pytest.mark.hal_op("fused_moe")
def test_fused(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_fused, pipelines(quantised=False))


@pytest.mark.hal_op("fused_moe")
def test_fused_int8(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_fused, pipelines(quantised=True))
