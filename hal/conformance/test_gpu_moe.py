"""Routing and the expert pipeline where only a CUDA device can show it: graphs, host synchronisation, streams, dirty memory, repeated runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.moe_cases import FUSED_LARGE
from hal.conformance.moe_inputs import GARBAGE, Moe, build_moe, gemm_args, index_of
from hal.conformance.routing_inputs import BAD_ROWS
from hal.conformance.subject import WRITTEN, Subject
from hal.conformance.tensors import mapped, tensors
from hal.conformance.test_gpu import capture, no_host_sync, second_device
from hal.ops.moe_checks import MoeIndex

pytestmark = pytest.mark.hal_gpu

FUSED = pytest.mark.hal_op("fused_moe")
Make = Callable[[Subject, int], dict[str, Any]]
_TURNS = 4


def ids(case: Moe) -> str:
    return case.id


def _logits(subject: Subject, turn: int) -> dict[str, Any]:
    generator, device = subject.generator().manual_seed(turn), subject.device
    x = torch.randn(9, 60, generator=generator)
    x[turn] = torch.tensor([math.nan, -math.inf, 1.0, math.inf])[turn % 4]
    outputs = {"weights": torch.full((9, 6), math.nan, device=device), "ids": torch.full((9, 6), -77, dtype=torch.int32, device=device)}
    return {"logits": x.to(device, torch.bfloat16), "top_k": 6, "renormalize": True, **outputs}


def _grouped(subject: Subject, turn: int) -> dict[str, Any]:
    args = _logits(subject, turn) | {"scoring": "sigmoid", "num_groups": 6, "top_groups": 2, "scale": 2.5}
    return args | {"logits": args["logits"].float()}


def _ids(subject: Subject, turn: int) -> Tensor:
    """Random; all on one expert; none; some garbage."""
    drawn = torch.randint(13, (20, 4), generator=subject.generator().manual_seed(turn), dtype=torch.int32)
    drawn = (drawn, torch.full_like(drawn, 5), torch.full_like(drawn, -1), drawn)[turn]
    if turn == 3:
        drawn.view(-1)[::5] = torch.tensor(GARBAGE, dtype=torch.int32).repeat(4)
    return drawn.to(subject.device)


def _index(subject: Subject, turn: int) -> dict[str, Any]:
    out = MoeIndex(*(torch.full((n,), -77, dtype=torch.int32, device=subject.device) for n in (80, 80, 13)))
    return {"ids": _ids(subject, turn), "num_experts": 13, "out": out}


def _rows(subject: Subject, turn: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=subject.generator().manual_seed(turn)).to(subject.device, torch.bfloat16)


def _expand(subject: Subject, turn: int) -> dict[str, Any]:
    out = torch.full((80, 72), math.nan, dtype=torch.bfloat16, device=subject.device)
    return {"x": _rows(subject, turn, 20, 72), "index": index_of(_ids(subject, turn), 13), "out": out}


def _combine(subject: Subject, turn: int) -> dict[str, Any]:
    index, y = index_of(_ids(subject, turn), 13), _rows(subject, turn, 80, 72)
    y[int(index.expert_sizes.sum()) :] = math.nan
    weights = torch.rand(20, 4, generator=subject.generator().manual_seed(turn)).to(subject.device)
    weights[index.src_to_dst.view(20, 4) < 0] = math.nan
    out = torch.full((20, 72), math.nan, dtype=torch.bfloat16, device=subject.device)
    return {"y": y, "weights": weights, "index": index, "residual": _rows(subject, turn + 9, 20, 72), "scale": 1.5, "out": out}


def _gemm(subject: Subject, turn: int) -> dict[str, Any]:
    sizes = ([3, 0, 65], [68, 0, 0], [0, 34, 34], [1, 66, 1])[turn]
    return gemm_args(Moe("graph", dtype="bf16", biases=True, hidden=136), sizes, subject.generator().manual_seed(turn), subject.device, 4).args


def _activated(subject: Subject, turn: int) -> dict[str, Any]:
    return {"x": _rows(subject, turn, 33, 144), "out": torch.full((33, 72), math.nan, dtype=torch.bfloat16, device=subject.device)}


def _fused(case: Moe) -> Make:
    """Turns differ in routing: random, all tokens on one expert, none on any, garbage; and in the number of valid tokens."""

    def make(subject: Subject, turn: int) -> dict[str, Any]:
        routing = ("random", "one", "nobody", "garbage")[turn]
        valid = None if case.valid is None else (case.valid, case.tokens, 0, case.tokens // 2)[turn]
        return build_moe(replace(case, routing=routing, valid=valid), subject.generator().manual_seed(turn), subject.device).args

    return make


_BF16 = Moe("bf16", dtype="bf16", experts=16, top_k=4, hidden=136, inter=72)
_FUSED = (
    *(replace(_BF16, id=f"T-{t}", tokens=t) for t in (1, 2, 8, 16, 17, 64, 300)),
    replace(_BF16, id="fp16", dtype="fp16", tokens=40),
    replace(_BF16, id="fp32", dtype="fp32", tokens=40),
    replace(_BF16, id="valid-T-8", tokens=8, valid=5),
    replace(_BF16, id="valid-T-300", tokens=300, valid=100),
    replace(_BF16, id="range", tokens=33, placement="range"),
    replace(_BF16, id="map", tokens=33, placement="map"),
    replace(_BF16, id="gpt-oss", tokens=33, activation="swiglu_oai", gate_up="interleaved", biases=True, storage="transposed"),
    replace(_BF16, id="on-input", tokens=33, weight_on_input=True),
    *(
        replace(_BF16, id=f"{q}-{s}-T-{t}", tokens=t, quantised=q, scales=s, hidden=256, inter=128)
        for q, s in (("int8", "channel"), ("e4m3", "block"))
        for t in (2, 40)
    ),
)
_MAKERS: dict[str, tuple[str, Make]] = {
    "topk_softmax": ("topk_softmax", _logits),
    "route": ("route", _grouped),
    "moe_index": ("moe_index", _index),
    "moe_expand": ("moe_expand", _expand),
    "group_gemm": ("group_gemm", _gemm),
    "silu_and_mul": ("silu_and_mul", _activated),
    "gelu_and_mul": ("gelu_and_mul", _activated),
    "swiglu_oai_and_mul": ("swiglu_oai_and_mul", _activated),
    "moe_combine": ("moe_combine", _combine),
    **{f"fused_moe-{case.id}": ("fused_moe", _fused(case)) for case in _FUSED},
}
MADE = pytest.mark.parametrize(("op", "make"), [pytest.param(*entry, id=name, marks=pytest.mark.hal_op(entry[0])) for name, entry in _MAKERS.items()])


def refill(op: str, target: dict[str, Any], source: dict[str, Any]) -> None:
    """Copy every tensor of a call into those of another; outputs are poisoned instead."""
    fresh, written = tensors(source), WRITTEN.get(op, ("out",))
    for name, tensor in tensors(target).items():
        if name in written:
            tensor.fill_(math.nan if tensor.is_floating_point() else -77)
        else:
            tensor.copy_(fresh[name])


def results(op: str, args: dict[str, Any]) -> Any:
    """The given outputs of a call, as the op returns them."""
    if op == "moe_index":
        return args["out"]
    return tuple(args[name] for name in WRITTEN[op]) if op in WRITTEN else args["out"]


@MADE
def test_graph(hal_subject: Subject, op: str, make: Make) -> None:
    """A3, B13: captured once, replayed after ids, sizes, weights and values changed in place, between eager calls."""
    args = make(hal_subject, 0)
    graph = capture(hal_subject, op, args)
    if graph is None:
        return
    for turn in (1, 2, 3, 0, 1):
        refill(op, args, make(hal_subject, turn))
        graph.replay()
        torch.cuda.synchronize(hal_subject.device)
        hal_subject.expect_moe(op, args, results(op, args))
        hal_subject.verify(op, make(hal_subject, (turn + 1) % _TURNS))


@MADE
def test_no_host_sync(hal_subject: Subject, op: str, make: Make) -> None:
    """Nothing waits for the device, unless the backend declares it."""
    args = make(hal_subject, 0)
    hal_subject.verify(op, args)
    if hal_subject.host_sync(op, args):
        hal_subject.warn("declares host_sync")
        return
    with no_host_sync():
        getattr(hal_subject.backend(), op)(**args)


def differing(op: str, subject: Subject, args: dict[str, Any], expected: list[Tensor], wrong: Tensor) -> None:
    """Enqueue one call into poisoned outputs and count, on the device, the elements whose bits differ."""
    for tensor in outputs_of(op, args):
        tensor.fill_(math.nan if tensor.is_floating_point() else -77)
    getattr(subject.backend(), op)(**args)
    for now, before in zip(outputs_of(op, args), expected, strict=True):
        wrong += (now != before).sum()


def outputs_of(op: str, args: dict[str, Any]) -> list[Tensor]:
    found = results(op, args)
    return list(found) if isinstance(found, tuple) else [found]


def settled(op: str, subject: Subject, args: dict[str, Any]) -> list[Tensor]:
    """Verified results of a call that is given its outputs."""
    subject.verify(op, args)
    return [t.clone() for t in outputs_of(op, args)]


#: Ops whose results are written in full, so that every bit must repeat.
_WHOLE = [name for name in _MAKERS if name not in ("moe_index", "moe_expand", "group_gemm")]


@pytest.mark.parametrize(("op", "make"), [pytest.param(*_MAKERS[name], id=name, marks=pytest.mark.hal_op(_MAKERS[name][0])) for name in _WHOLE])
def test_repeated_runs_agree(hal_subject: Subject, op: str, make: Make) -> None:
    """B11: 50 runs give the same bits."""
    for turn in (0, 1):
        args = make(hal_subject, turn)
        expected = settled(op, hal_subject, args)
        wrong = torch.zeros((), dtype=torch.int64, device=hal_subject.device)
        for _ in range(50):
            differing(op, hal_subject, args, expected, wrong)
        assert int(wrong) == 0


@FUSED
@pytest.mark.parametrize("tokens", [64, 2000])
@pytest.mark.parametrize("routing", ["random", "one"])
def test_repeated_runs_of_many_rows_agree(hal_subject: Subject, tokens: int, routing: str) -> None:
    """B11: many rows for each expert, and all on one."""
    case = Moe("many", tokens=tokens, experts=8, top_k=2, hidden=1024, inter=512, dtype="bf16", routing=routing)
    args = build_moe(case, hal_subject.generator(), hal_subject.device).args
    expected = settled("fused_moe", hal_subject, args)
    wrong = torch.zeros((), dtype=torch.int64, device=hal_subject.device)
    for _ in range(50):
        differing("fused_moe", hal_subject, args, expected, wrong)
    assert int(wrong) == 0


@FUSED
def test_two_streams(hal_subject: Subject) -> None:
    """Different shapes on two streams at once, over and over without waiting: neither shares work memory with the other."""
    device, calls = hal_subject.device, []
    for seed, case in enumerate((replace(_BF16, tokens=300, top_k=4), replace(_BF16, tokens=3, experts=5, top_k=2))):
        args = build_moe(case, hal_subject.generator().manual_seed(seed), device).args
        expected = settled("fused_moe", hal_subject, args)
        calls.append((torch.cuda.Stream(device), args, expected, torch.zeros((), dtype=torch.int64, device=device)))
    torch.cuda.synchronize(device)
    for _ in range(20 if hal_subject.host_sync("fused_moe", calls[0][1]) else 1000):
        for stream, args, expected, wrong in calls:
            with torch.cuda.stream(stream):
                differing("fused_moe", hal_subject, args, expected, wrong)
    torch.cuda.synchronize(device)
    assert [int(wrong) for *_, wrong in calls] == [0, 0]


@MADE
def test_side_stream(hal_subject: Subject, op: str, make: Make) -> None:
    """A stream other than the default, fed and read there."""
    stream = torch.cuda.Stream(hal_subject.device)
    args = make(hal_subject, 0)
    torch.cuda.synchronize(hal_subject.device)
    with torch.cuda.stream(stream):
        hal_subject.verify(op, args)
    torch.cuda.synchronize(hal_subject.device)


@FUSED
def test_graphs_in_turn(hal_subject: Subject) -> None:
    """Two graphs and eager calls of one op in turn."""
    cases = (replace(_BF16, tokens=16), replace(_BF16, tokens=70), replace(_BF16, tokens=5))
    calls = [build_moe(case, hal_subject.generator().manual_seed(i), hal_subject.device).args for i, case in enumerate(cases)]
    graphs = [capture(hal_subject, "fused_moe", args) for args in calls[:2]]
    expected = [settled("fused_moe", hal_subject, args) for args in calls]
    if None in graphs:
        return
    wrong = torch.zeros((), dtype=torch.int64, device=hal_subject.device)
    for _ in range(100):
        for args, graph, wanted in zip(calls, (*graphs, None), expected, strict=True):
            args["out"].fill_(math.nan)
            if graph is None:
                hal_subject.backend().fused_moe(**args)
            else:
                graph.replay()
            wrong += (args["out"] != wanted[0]).sum()
    assert int(wrong) == 0


@FUSED
@pytest.mark.parametrize("name", BAD_ROWS)
def test_padded_graph(hal_subject: Subject, name: str) -> None:
    """A1, A3: 7 real tokens in a graph of 8, whose last row of logits, x and all that follows is bad."""
    hal_subject.require("topk_softmax")
    device, backend = hal_subject.device, hal_subject.backend()
    args = build_moe(Moe("padded", tokens=8, experts=8, top_k=2, dtype="bf16", routing="balanced"), hal_subject.generator(), device).args
    logits = torch.randn(8, 8, generator=hal_subject.generator()).to(device)
    route = {"logits": logits, "top_k": 2, "renormalize": True, "weights": args["weights"], "ids": args["ids"]}
    hal_subject.verify("topk_softmax", route)
    hal_subject.verify("fused_moe", args)
    if hal_subject.host_sync("topk_softmax", route) or hal_subject.host_sync("fused_moe", args):
        hal_subject.warn("declares host_sync")
        return
    good = args["out"][:7].clone()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.topk_softmax(**route)
        backend.fused_moe(**args)
    logits[7] = torch.tensor(BAD_ROWS[name]).to(device)
    args["x"][7] = math.nan
    args["out"].fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize(device)
    hal_subject.expect_moe("topk_softmax", route, (args["weights"], args["ids"]))
    assert bool((args["out"][:7] == good).all()), "a bad padding row changed other rows"


def dirty(subject: Subject) -> None:
    """Leave 0x7f bytes in the memory that the allocator hands out next."""
    blocks = [
        torch.full((size,), 0x7F, dtype=torch.uint8, device=subject.device) for size in (2**9, 2**12, 2**16, 2**20, 2**22, 2**25) for _ in range(8)
    ]
    del blocks


@MADE
def test_dirty_memory(hal_subject: Subject, op: str, make: Make) -> None:
    """B1: an op clears what it accumulates into, whatever the allocator returns."""
    for turn in range(_TURNS):
        args = {name: value for name, value in make(hal_subject, turn).items() if name not in ("out", *WRITTEN.get(op, ()))}
        dirty(hal_subject)
        hal_subject.verify(op, args)


@FUSED
@pytest.mark.parametrize("case", FUSED_LARGE, ids=ids)
def test_large(hal_subject: Subject, case: Moe) -> None:
    """A4, A5, B4, B10: sizes that a CPU has no patience for."""
    hal_subject.verify("fused_moe", build_moe(case, hal_subject.generator(), hal_subject.device))


@MADE
def test_other_device(hal_subject: Subject, op: str, make: Make) -> None:
    """Every tensor on one device while another is current."""
    other, current = second_device(hal_subject), hal_subject.device
    with torch.cuda.device(current):
        args = mapped(make(hal_subject, 0), lambda t: t.to(other))
        torch.cuda.synchronize(current)
        held = torch.cuda.memory_allocated(current)
        hal_subject.verify(op, args)
        torch.cuda.synchronize(other)
        assert torch.cuda.current_device() == current.index
        assert torch.cuda.memory_allocated(current) <= held
