"""What a backend must not remember: nothing of one call may reach the next, and nothing handed out may change later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.cases import Attention
from hal.conformance.compare import assert_same_bits
from hal.conformance.inputs import Built, build_decode
from hal.conformance.subject import Subject
from hal.conformance.test_decode import plan_facts

pytestmark = pytest.mark.hal_op("flash_decode")

_PLAIN = Attention("plain", (20, 30), out="new")


def build(subject: Subject, case: Attention = _PLAIN) -> Built:
    return build_decode(case, subject.generator(), subject.device)


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "out-lse"])
def test_results_of_two_calls_are_apart(hal_subject: Subject, return_lse: bool) -> None:
    args = build(hal_subject).args | {"return_lse": return_lse}
    args.pop("lse", None)
    first = hal_subject.call("flash_decode", args)
    kept = [t.clone() for t in ([first] if isinstance(first, Tensor) else first)]
    hal_subject.call("flash_decode", args | {"q": -2 * args["q"]})
    for now, before in zip([first] if isinstance(first, Tensor) else first, kept, strict=True):
        assert_same_bits("a result after another call", now, before)


def updates() -> dict[str, Any]:
    """Changes in place of one argument each."""
    return {
        "seq_lens": lambda a: a["seq_lens"].sub_(7),
        "block_tables": lambda a: a["block_tables"].copy_(a["block_tables"].flip(0)),
        "q": lambda a: a["q"].mul_(-1.5),
        "k_cache": lambda a: a["k_cache"].copy_(a["k_cache"].flip(0)),
        "v_cache": lambda a: a["v_cache"].mul_(2.0),
        "sinks": lambda a: a["sinks"].add_(3.0),
    }


@pytest.mark.parametrize("planned", [False, True], ids=["no-plan", "plan"])
@pytest.mark.parametrize("argument", updates())
def test_in_place_update_is_seen(hal_subject: Subject, argument: str, planned: bool) -> None:
    case = Attention("update", (24, 24), sinks=True, out="new", table="tight", poison="zero", spare_pages=0)
    args = build(hal_subject, case).args
    if planned:
        args["plan"] = hal_subject.call("plan_decode", plan_facts(args))
    hal_subject.verify("flash_decode", args)
    updates()[argument](args)
    hal_subject.verify("flash_decode", args)  # with the plan that was made for the lengths before


@pytest.mark.parametrize("kind", ["0d", "head", "token"])
def test_in_place_update_of_scales_is_seen(hal_subject: Subject, kind: str) -> None:
    args = build(hal_subject, Attention("scales", (20, 30), kv="int8", k_scale=kind, v_scale=kind, out="new")).args
    hal_subject.verify("flash_decode", args)
    args["k_scale"].mul_(1.5)
    args["v_scale"].mul_(0.5)
    hal_subject.verify("flash_decode", args)


@pytest.mark.parametrize("window", [None, 9], ids=["all", "window"])
def test_block_tables_may_have_a_wide_row_stride(hal_subject: Subject, window: int | None) -> None:
    args = build(hal_subject, Attention("strided", (20, 30, 0, 13), out="new", window=window)).args
    tables = args["block_tables"]
    wide = torch.full((tables.shape[0], tables.shape[1] + 5), 2**30, dtype=torch.int32, device=tables.device)
    wide[:, : tables.shape[1]] = tables
    hal_subject.verify("flash_decode", args | {"block_tables": wide[:, : tables.shape[1]]})
