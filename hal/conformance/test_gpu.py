"""What only a CUDA device can show: graph capture, streams, host synchronisation, a second device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.caches import filled, put
from hal.conformance.cases import DTYPES, Attention
from hal.conformance.compare import assert_same_bits
from hal.conformance.inputs import build_decode, build_prefill
from hal.conformance.outcomes import NotRun
from hal.conformance.shared_slots import KINDS, SharedSlots
from hal.conformance.subject import Subject
from hal.conformance.test_decode import plan_facts
from hal.conformance.test_merge import states
from hal.conformance.test_write import make as make_write
from hal.errors import CaptureError
from hal.ops.layouts import cache_shapes

pytestmark = pytest.mark.hal_gpu

DECODE = pytest.mark.hal_op("flash_decode")
WRITE = pytest.mark.hal_op("write_kv")


def ids(case: Attention) -> str:
    return case.id


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Any operation that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def refill(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Copy every tensor of a call into the tensors of another; outputs are poisoned instead."""
    for name, tensor in target.items():
        if name in ("out", "lse"):
            tensor.fill_(math.nan)
        elif isinstance(tensor, Tensor):
            tensor.copy_(source[name])


def capture(subject: Subject, op: str, args: dict[str, Any]) -> torch.cuda.CUDAGraph | None:
    """Call once eagerly, then capture; None if the backend declares that it waits for the device, which capture must refuse."""
    subject.call(op, args)
    torch.cuda.synchronize(subject.device)
    graph = torch.cuda.CUDAGraph()
    if subject.host_sync(op, args):
        with pytest.raises(CaptureError), torch.cuda.graph(graph):
            getattr(subject.backend(), op)(**args)
        return None
    with torch.cuda.graph(graph):
        getattr(subject.backend(), op)(**args)
    return graph


_FIRST = Attention("graph", (33, 0, 64, 5), table="tight")
_SECOND = replace(_FIRST, lengths=(1, 64, 0, 40))
_GRAPHS = (
    Attention("plain"),
    Attention("bf16", dtype="bf16", heads=(8, 2), dims=(128, 128)),
    Attention("block", q_len=4),
    Attention("window-sinks", window=9, sinks=True),
    Attention("e4m3", kv="e4m3", k_scale="head", v_scale="float", dtype="bf16"),
    Attention("int8-token", kv="int8", k_scale="token", v_scale="token", dtype="fp16"),
    Attention("int8-device-scales", kv="int8", k_scale="0d", v_scale="1", dtype="bf16"),
    Attention("varlen", q_len=(3, 0, 4, 1), padding=2, dtype="bf16"),
    Attention("tree-alibi", q_len=5, tree="branches", alibi=True, dtype="bf16"),
    Attention("batch-invariant", batch_invariant=True),
)


@DECODE
@pytest.mark.parametrize("features", _GRAPHS, ids=ids)
def test_decode_graph(hal_subject: Subject, features: Attention) -> None:
    """B53: captured once, replayed after lengths, tables, caches and queries changed in place."""
    first = replace(features, lengths=_FIRST.lengths, table="tight")
    second = replace(features, lengths=_SECOND.lengths, table="tight")
    args = build_decode(first, hal_subject.generator(), hal_subject.device).args
    graph = capture(hal_subject, "flash_decode", args)
    if graph is None:
        return
    for case in (second, first, replace(second, lengths=(0, 64, 16, 32)), first):
        refill(args, build_decode(case, hal_subject.generator(), hal_subject.device).args)
        graph.replay()
        torch.cuda.synchronize(hal_subject.device)
        hal_subject.expect("flash_decode", args, args["out"], args["lse"])


@pytest.mark.hal_op("plan_decode")
def test_plan_graph(hal_subject: Subject) -> None:
    """A plan refreshed in place and used, in one graph."""
    args = build_decode(_FIRST, hal_subject.generator(), hal_subject.device).args
    facts = plan_facts(args)
    plan = hal_subject.call("plan_decode", facts)
    args["plan"] = plan
    hal_subject.call("plan_decode", facts | {"out": plan})
    hal_subject.call("flash_decode", args)
    if hal_subject.host_sync("plan_decode", facts) or hal_subject.host_sync("flash_decode", args):
        return
    torch.cuda.synchronize(hal_subject.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hal_subject.backend().plan_decode(**facts, out=plan)
        hal_subject.backend().flash_decode(**args)
    for case in (_SECOND, _FIRST):
        refill({k: v for k, v in args.items() if k != "plan"}, build_decode(case, hal_subject.generator(), hal_subject.device).args)
        graph.replay()
        torch.cuda.synchronize(hal_subject.device)
        hal_subject.expect("flash_decode", args, args["out"], args["lse"])


@pytest.mark.hal_op("flash_prefill")
@pytest.mark.parametrize("packed", [False, True], ids=["paged", "packed"])
def test_prefill_graph(hal_subject: Subject, packed: bool) -> None:
    first = Attention("graph", (40, 12, 20), q_len=(9, 12, 3), packed=packed, table="tight")
    second = replace(first, lengths=(12, 40, 20), q_len=(12, 9, 3))
    args = build_prefill(first, hal_subject.generator(), hal_subject.device).args
    graph = capture(hal_subject, "flash_prefill", args)
    if graph is None:
        return
    for case in (second, first):
        refill(args, build_prefill(case, hal_subject.generator(), hal_subject.device).args)
        graph.replay()
        torch.cuda.synchronize(hal_subject.device)
        hal_subject.expect("flash_prefill", args, args["out"], args["lse"])


@pytest.mark.hal_op("merge_states")
def test_merge_graph(hal_subject: Subject) -> None:
    args = states(hal_subject, dtype="bf16")
    args["out"], args["lse"] = torch.empty_like(args["out_a"]), torch.empty_like(args["lse_a"])
    graph = capture(hal_subject, "merge_states", args)
    if graph is None:
        return
    for _ in range(2):
        refill(args, {name: torch.randn_like(t) for name, t in args.items()})
        args["lse_a"][0] = -math.inf
        graph.replay()
        torch.cuda.synchronize(hal_subject.device)
        hal_subject.expect("merge_states", args, args["out"], args["lse"])


@WRITE
@pytest.mark.parametrize("kv", ["", "e4m3"])
def test_write_graph(hal_subject: Subject, kv: str) -> None:
    device = hal_subject.device
    k_shape, v_shape = cache_shapes("NHD", 4, 8, 2, 32, 32, 2)
    dtype = DTYPES[kv or "bf16"]
    args: dict[str, Any] = {
        "key": torch.randn(3, 2, 32, device=device, dtype=torch.bfloat16),
        "value": torch.randn(3, 2, 32, device=device, dtype=torch.bfloat16),
        "k_cache": filled(k_shape, 0.0, dtype, device),
        "v_cache": filled(v_shape, 0.0, dtype, device),
        "slot_mapping": torch.tensor([3, 9, -1], device=device),
    }
    graph = capture(hal_subject, "write_kv", args)
    if graph is None:
        return
    expected = {name: args[name].clone() for name in ("k_cache", "v_cache")}
    for slots in ([30, -1, 0], [7, 8, 31]):
        args["slot_mapping"].copy_(torch.tensor(slots))
        for name in ("key", "value"):
            args[name].copy_(torch.randint(-3, 4, args[name].shape, device=device))  # exact in every dtype
        graph.replay()
        for which, name in (("k", "key"), ("v", "value")):
            kept = [i for i, s in enumerate(slots) if s >= 0]
            put(expected[f"{which}_cache"], "NHD", which, torch.tensor([slots[i] for i in kept], device=device), args[name][kept].to(dtype))
            assert_same_bits(f"{which}_cache after replay", args[f"{which}_cache"], expected[f"{which}_cache"])


@WRITE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [300, 5000])
def test_write_graph_of_shared_slots(hal_subject: Subject, count: int, kind: str) -> None:
    """Whatever decides between rows of one slot, a replay with other slots decides anew."""
    call, generator = SharedSlots.build(kind, count, "NHD", torch.int64, hal_subject.device), hal_subject.generator()
    call.name_slots(generator)
    graph = capture(hal_subject, "write_kv", call.args)
    call.check()  # of the eager call
    if graph is None:
        return
    for _ in range(10):
        call.name_slots(generator)
        graph.replay()
        call.check()
    call.args["slot_mapping"].fill_(13)
    call.blank()
    graph.replay()
    call.check()


@DECODE
@pytest.mark.hal_no_entry
def test_first_call_inside_capture_is_refused(hal_subject: Subject) -> None:
    hal_subject.require("flash_decode")
    args = build_decode(_FIRST, hal_subject.generator(), hal_subject.device).args
    backend, entered = hal_subject.fresh_backend(), hal_subject.entries
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError), torch.cuda.graph(graph):
        backend.flash_decode(**args)
    assert hal_subject.entries == entered
    assert bool(args["out"].isnan().all())
    backend.flash_decode(**args)
    hal_subject.expect("flash_decode", args, args["out"], args["lse"])


@DECODE
@pytest.mark.parametrize("features", _GRAPHS, ids=ids)
def test_no_host_sync(hal_subject: Subject, features: Attention) -> None:
    """B53: nothing waits for the device, unless the backend declares it."""
    args = build_decode(replace(features, lengths=(33, 0, 64, 5)), hal_subject.generator(), hal_subject.device).args
    hal_subject.verify("flash_decode", args)
    plan = hal_subject.call("plan_decode", plan_facts(args)) if "plan_decode" in hal_subject.declared else None
    if hal_subject.host_sync("flash_decode", args):
        hal_subject.warn("declares host_sync")
        return
    if plan is not None:
        hal_subject.call("flash_decode", args | {"plan": plan})
    with no_host_sync():
        hal_subject.backend().flash_decode(**args)
        if plan is not None and not hal_subject.host_sync("plan_decode", plan_facts(args)):
            hal_subject.backend().plan_decode(**plan_facts(args), out=plan)
            hal_subject.backend().flash_decode(**args, plan=plan)


@pytest.mark.hal_op("merge_states")
def test_merge_without_host_sync(hal_subject: Subject) -> None:
    args = states(hal_subject)
    hal_subject.verify("merge_states", args)
    if not hal_subject.host_sync("merge_states", args):
        with no_host_sync():
            hal_subject.backend().merge_states(**args)


@WRITE
@pytest.mark.parametrize("kv", ["", "int8"])
def test_write_without_host_sync(hal_subject: Subject, kv: str) -> None:
    scale = torch.tensor(0.05) if kv else None
    args = make_write(hal_subject, [3, -1, 9, 2**31], kv=kv, k_scale=scale, v_scale=scale).args
    hal_subject.call("write_kv", args)
    if not hal_subject.host_sync("write_kv", args):
        with no_host_sync():
            hal_subject.backend().write_kv(**args)


def agreeing(subject: Subject, args: dict[str, Any], expected: Tensor, wrong: Tensor) -> None:
    """Enqueue one call and count, on the device, the elements whose bits differ."""
    args["out"].fill_(math.nan)
    subject.backend().flash_decode(**args)
    wrong += (args["out"] != expected).sum()


def repetitions(subject: Subject, args: dict[str, Any], most: int) -> int:
    """Fewer of a backend that waits for the device at each call: it has little that could overlap."""
    return most // 50 if subject.host_sync("flash_decode", args) else most


@DECODE
def test_two_streams(hal_subject: Subject) -> None:
    """B48: different shapes on two streams at once, 10,000 times."""
    device = hal_subject.device
    cases = (
        Attention("a", (3000, 7, 0), dtype="bf16", page=16),
        Attention("b", (900, 5), q_len=3, heads=(8, 1), dims=(64, 64), page=16, dtype="bf16"),
    )
    calls = []
    for case in cases:
        args = build_decode(case, hal_subject.generator(), device).args
        out, _ = hal_subject.verify("flash_decode", args)
        calls.append((torch.cuda.Stream(device), args, out.clone(), torch.zeros((), dtype=torch.int64, device=device)))
    torch.cuda.synchronize(device)
    for _ in range(repetitions(hal_subject, calls[0][1], 10_000)):
        for stream, args, expected, wrong in calls:
            with torch.cuda.stream(stream):
                agreeing(hal_subject, args, expected, wrong)
    torch.cuda.synchronize(device)
    assert [int(wrong) for *_, wrong in calls] == [0, 0]


@DECODE
@pytest.mark.parametrize("planned", [False, True], ids=["no-plan", "plan"])
def test_back_to_back(hal_subject: Subject, planned: bool) -> None:
    """B47: two calls with other lengths, a plan refreshed before each, over and over without waiting."""
    device = hal_subject.device
    plan, calls = None, []
    for lengths in ((3000, 0, 64, 5), (1, 2000, 0, 700)):
        case = Attention("turn", lengths, dtype="bf16", page=16, spare_columns=188 - -(-max(lengths) // 16))
        args = build_decode(case, hal_subject.generator(), device).args
        if planned:
            plan = hal_subject.call("plan_decode", plan_facts(args) | {"out": plan})
            args["plan"] = plan
        out, _ = hal_subject.verify("flash_decode", args)
        calls.append((args, out.clone(), plan_facts(args)))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(repetitions(hal_subject, calls[0][0], 1000)):
        for args, expected, facts in calls:
            if planned:
                hal_subject.backend().plan_decode(**facts, out=plan)
            agreeing(hal_subject, args, expected, wrong)
    assert int(wrong) == 0


@DECODE
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_repeated_runs_agree(hal_subject: Subject, dtype: str) -> None:
    args = build_decode(Attention("repeat", (5000, 17), dtype=dtype, page=16, dims=(64, 64)), hal_subject.generator(), hal_subject.device).args
    first, _ = hal_subject.call("flash_decode", args)
    first = first.clone()
    wrong = torch.zeros((), dtype=torch.int64, device=hal_subject.device)
    for _ in range(100):
        agreeing(hal_subject, args, first, wrong)
    assert int(wrong) == 0


def second_device(subject: Subject) -> torch.device:
    """Another device than that of the subject; ends the case as not run if there is none."""
    if torch.cuda.device_count() < 2:
        raise NotRun("one CUDA device only")
    return torch.device("cuda", (subject.device.index + 1) % torch.cuda.device_count())


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.hal_op(op)) for op in ("flash_decode", "plan_decode", "merge_states", "write_kv")])
def test_other_device(hal_subject: Subject, op: str) -> None:
    """B51: every tensor on one device while another is current; results and work memory are on the former."""
    other, current = second_device(hal_subject), hal_subject.device
    with torch.cuda.device(current):
        torch.cuda.synchronize(current)
        held = torch.cuda.memory_allocated(current)
        args = build_decode(Attention("device", (3000, 0, 64), page=16, dtype="bf16"), hal_subject.generator(), other).args
        if op == "write_kv":
            moved = {n: t.to(other) if isinstance(t, Tensor) else t for n, t in make_write(hal_subject, [9, 0, -1], dtype="bf16").args.items()}
            hal_subject.call(op, moved)
            assert_same_bits("the row in slot 9", moved["k_cache"][1, 1], moved["key"][0])
        elif op == "merge_states":
            hal_subject.verify(op, {name: t.to(other) for name, t in states(hal_subject).items()})
        elif op == "plan_decode":
            hal_subject.verify("flash_decode", args | {"plan": hal_subject.call(op, plan_facts(args))})
        else:
            hal_subject.verify(op, args)
        torch.cuda.synchronize(other)
        assert torch.cuda.current_device() == current.index
        assert torch.cuda.memory_allocated(current) <= held
