"""Captured CUDA graphs, replayed with any lengths and tables within the declared maximum of `block_tables`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hal.conformance.cases import Attention
from hal.conformance.inputs import Built
from hal.conformance.long_contexts import build_long, judge
from hal.conformance.subject import Subject
from hal.conformance.test_decode import plan_facts
from hal.conformance.test_gpu import refill

pytestmark = [pytest.mark.hal_gpu, pytest.mark.hal_op("flash_decode")]

_PAGE, _COLUMNS = 16, 256
#: The first is captured; none is longer than the table is wide.
_LENGTHS = ((33, 0, 64, 5), (4096, 1, 0, 700), (0, 0, 0, 0), (129, 128, 127, 4095), (4096, 4096, 4096, 4096), (33, 0, 64, 5))
_CASES = (
    Attention("plain"),
    Attention("block", q_len=3),
    Attention("varlen", q_len=(3, 0, 1, 4), padding=2),
    Attention("window-sinks", window=200, sinks=True),
    Attention("e4m3", kv="e4m3", k_scale="float", v_scale="float"),
    Attention("mla", dims=(576, 512), heads=(16, 1), mla=True),
    Attention("batch-invariant", batch_invariant=True),
)

Call = tuple[str, dict[str, Any]]


def ids(case: Attention) -> str:
    return case.id


def captured(subject: Subject, calls: Sequence[Call]) -> Callable[[], None] | None:
    """Make the calls once, capture them in one graph and return its replay; None if one of them waits for the device."""
    for op, args in calls:
        subject.call(op, args)
    if any(subject.host_sync(op, args) for op, args in calls):
        subject.warn("declares host_sync")
        return None
    torch.cuda.synchronize(subject.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for op, args in calls:
            getattr(subject.backend(), op)(**args)
    return graph.replay


def build(case: Attention, lengths: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Built:
    """The case with other lengths, in caches and tables of always the same shape; blocks move round with each step."""
    turn = _LENGTHS.index(lengths)
    q_len = case.q_len if isinstance(case.q_len, int) else case.q_len[turn:] + case.q_len[:turn]
    needed = [-(-n // _PAGE) for n in lengths]
    wide: dict[str, Any] = {
        "page": _PAGE,
        "dtype": "bf16",
        "spare_columns": _COLUMNS - max(needed),
        "spare_pages": 4 * _COLUMNS + 3 - sum(needed),
        "table": "huge",
    }
    sizes: dict[str, Any] = {} if case.mla else {"heads": (32, 8), "dims": (128, 128)}
    return build_long(replace(case, lengths=lengths, q_len=q_len, **wide, **sizes), generator, device)


@pytest.mark.parametrize("plan", ["none", "captured", "refreshed", "stale"])
@pytest.mark.parametrize("case", _CASES, ids=ids)
def test_replays_within_the_declared_maximum(hal_subject: Subject, case: Attention, plan: str) -> None:
    """B53: without a plan; with one refreshed inside the graph, or outside before each replay; with that of the first lengths."""
    generator, device = hal_subject.generator(), hal_subject.device
    args = build(case, _LENGTHS[0], generator, device).args
    facts = plan_facts(args)
    calls: list[Call] = [("flash_decode", args)]
    if plan != "none":
        args["plan"] = hal_subject.call("plan_decode", facts)
        facts["out"] = args["plan"]
    if plan == "captured":
        calls.insert(0, ("plan_decode", facts))
    replay = captured(hal_subject, calls)
    if replay is None:
        return
    for lengths in _LENGTHS:
        refill({k: v for k, v in args.items() if k != "plan"}, build(case, lengths, generator, device).args)
        if plan == "refreshed":
            hal_subject.backend().plan_decode(**facts)
        replay()
        judge(hal_subject, args, args["out"], args["lse"])


def test_graphs_in_turn(hal_subject: Subject) -> None:
    """B47: two graphs and eager calls in between, all of other lengths, over and over without waiting."""
    generator = hal_subject.generator()
    calls = [build(case, lengths, generator, hal_subject.device).args for case, lengths in zip(_CASES, _LENGTHS[:3], strict=False)]
    replays = [captured(hal_subject, [("flash_decode", args)]) for args in calls[:2]]
    expected = []
    for args in calls:
        out, lse = hal_subject.call("flash_decode", args)
        judge(hal_subject, args, out, lse)
        expected.append(out.clone())
    wrong = torch.zeros((), dtype=torch.int64, device=hal_subject.device)
    for _ in range(200):
        for args, replay, wanted in zip(calls, (*replays, None), expected, strict=True):
            args["out"].fill_(torch.nan)
            if replay is None:
                hal_subject.backend().flash_decode(**args)
            else:
                replay()
            wrong += (args["out"] != wanted).sum()
    assert int(wrong) == 0
