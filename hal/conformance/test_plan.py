"""`plan_decode`: opaque, optional, refreshed in place; it steers speed only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hal.conformance.cases import Attention
from hal.conformance.inputs import build_decode
from hal.conformance.subject import Subject
from hal.conformance.test_decode import plan_facts
from hal.errors import ArgumentError
from hal.ops.plan import DecodePlan

pytestmark = pytest.mark.hal_op("plan_decode")

CASES = (
    Attention("decode", (40, 3, 0, 64)),
    Attention("block", (40, 3, 64), q_len=4, dtype="bf16"),
    Attention("varlen", (40, 3, 64), q_len=(1, 0, 5), padding=2),
    Attention("window", (70, 9), window=12, q_len=2),
    Attention("int8", (40, 9), kv="int8", k_scale="float", v_scale="float"),
    Attention("dims-differ", (40, 9), dims=(64, 32)),
    Attention("batch-invariant", (40, 9), batch_invariant=True),
    Attention("empty", ()),
    Attention("all-empty", (0, 0)),
    Attention("mla", (40,), dims=(576, 512), heads=(4, 1)),
)


def make(subject: Subject, case: Attention) -> dict[str, Any]:
    return build_decode(case, subject.generator(), subject.device).args


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_planned_call(hal_subject: Subject, case: Attention) -> None:
    args = make(hal_subject, case)
    plan = hal_subject.call("plan_decode", plan_facts(args))
    assert isinstance(plan, DecodePlan)
    hal_subject.verify("flash_decode", args | {"plan": plan})


def test_one_plan_for_many_layers(hal_subject: Subject) -> None:
    args = make(hal_subject, CASES[0])
    plan = hal_subject.call("plan_decode", plan_facts(args))
    for _ in range(3):
        args["q"] = torch.randn_like(args["q"])
        hal_subject.verify("flash_decode", args | {"plan": plan})


def test_refresh_in_place(hal_subject: Subject) -> None:
    args = make(hal_subject, CASES[0])
    plan = hal_subject.call("plan_decode", plan_facts(args))
    lengths = torch.tensor([1, 3, 0, 17], dtype=torch.int32, device=hal_subject.device)
    args["seq_lens"] = lengths
    refreshed = hal_subject.call("plan_decode", plan_facts(args) | {"out": plan})
    assert refreshed is plan
    hal_subject.verify("flash_decode", args | {"plan": plan})


def test_stale_plan_changes_speed_only(hal_subject: Subject) -> None:
    args = make(hal_subject, CASES[0])
    stale = dict(args, seq_lens=torch.zeros_like(args["seq_lens"]))
    plan = hal_subject.call("plan_decode", plan_facts(stale))
    hal_subject.verify("flash_decode", args | {"plan": plan})


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("made_for", [(16384, 16384, 16384), (16384, 0, 0), (0, 16384, 1)], ids=str)
def test_plan_of_longer_sequences(hal_subject: Subject, made_for: tuple[int, ...], q_len: int) -> None:
    """L11: nearly all the splits of a sequence are without keys, and the sequences without splits may have keys."""
    args = make(hal_subject, Attention("short", (40, 0, 700), q_len=q_len, page=16, spare_columns=1024 - 44))
    stale = torch.tensor(made_for, dtype=torch.int32, device=hal_subject.device)
    plan = hal_subject.call("plan_decode", plan_facts(args | {"seq_lens": stale}))
    hal_subject.verify("flash_decode", args | {"plan": plan})


def test_foreign_plan_is_ignored(hal_subject: Subject) -> None:
    args = make(hal_subject, CASES[0])
    plan = hal_subject.call("plan_decode", plan_facts(args))
    foreign = DecodePlan(plan.facts, "somebody-else", object())
    hal_subject.verify("flash_decode", args | {"plan": foreign})


@pytest.mark.hal_no_entry
@pytest.mark.parametrize(
    "change",
    [{"window": 5}, {"num_heads": 2}, {"batch_invariant": True}, {"page_size": 4}, {"q_len": 2}, {"max_seq_len": 100}],
    ids=lambda c: next(iter(c)),
)
def test_plan_of_other_facts_is_refused(hal_subject: Subject, change: dict[str, Any]) -> None:
    hal_subject.require("flash_decode")
    args = make(hal_subject, replace(CASES[0], lengths=(40, 3)))
    plan = hal_subject.call("plan_decode", plan_facts(args) | change)
    with pytest.raises(ArgumentError) as caught:
        hal_subject.backend().flash_decode(**args, plan=plan)
    assert caught.value.argument == "plan"
    assert bool(args["out"].isnan().all())


@pytest.mark.hal_no_entry
def test_refresh_of_other_facts_is_refused(hal_subject: Subject) -> None:
    args = make(hal_subject, CASES[0])
    plan = hal_subject.call("plan_decode", plan_facts(args))
    with pytest.raises(ArgumentError) as caught:
        hal_subject.call("plan_decode", plan_facts(args) | {"out": plan, "window": 3})
    assert caught.value.argument == "out"
