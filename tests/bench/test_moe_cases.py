"""`hal bench moe`: its shapes are those published, its floors and bars say what they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hal.bench.bars import Judgement, judge_rows
from hal.bench.ceilings import Ceilings
from hal.bench.moe.bars import BARS
from hal.bench.moe.cases import CPU_CASES, CUDA_CASES, GROUPS, ExpertsCase, RoutingCase
from hal.bench.moe.rows import MoeRow
from hal.bench.moe.view import TITLES
from hal.bench.rows import PeerTime

CEILINGS = Ceilings(4563.0, "made up", {}, 804.0, quantised_tflops={"e4m3": 1600.0, "int8": "RuntimeError: no"})
#: Published rows whose floor does not depend on which experts were drawn -> microseconds.
FLOORS = {
    "qwen3-30b-a3b T1": 16.5,
    "qwen3-30b-a3b T256": 264.7,
    "qwen3-30b-a3b T8192": 769.2,
    "mixtral-8x7b T1": 154.4,
    "mixtral-8x7b T256": 617.7,
    "mixtral-8x7b T4096": 3589.5,
    "qwen3-next-80b T1": 13.8,
    "qwen3-next-80b T4096": 705.9,
}
EXPERTS = {case.name: case for case in CUDA_CASES if isinstance(case, ExpertsCase)}
MakeRow = Callable[..., MoeRow]


@pytest.mark.parametrize("table", [CUDA_CASES, CPU_CASES], ids=["cuda", "cpu"])
def test_names_are_unique_and_groups_known(table: Sequence[Any]):
    assert [key for key, count in Counter((case.group, case.name) for case in table).items() if count > 1] == []
    assert {case.group for case in table} == set(GROUPS) - {"host"}
    assert set(TITLES) == set(GROUPS)


def test_published_rows_are_there():
    experts = [case for case in CUDA_CASES if case.group == "experts" and isinstance(case, ExpertsCase)]
    assert Counter(case.model for case in experts) == {"qwen3-30b-a3b": 6, "mixtral-8x7b": 4, "qwen3-next-80b": 4, "qwen3.5-35b/tp4": 1}
    routers = {(case.experts, case.top_k) for case in CUDA_CASES if isinstance(case, RoutingCase)}
    assert routers >= {(8, 2), (128, 8), (256, 8), (512, 10), (512, 512)}
    quantised = {(case.quantised, case.scales) for case in CUDA_CASES if isinstance(case, ExpertsCase) and case.quantised}
    assert quantised == {("int8", "channel"), ("e4m3", "channel"), ("e4m3", "block")}


@pytest.mark.parametrize(("name", "us"), FLOORS.items(), ids=FLOORS)
def test_published_floors(name: str, us: float):
    case = EXPERTS[name]
    touched = min(case.experts, case.top_k if case.tokens == 1 else case.experts)
    row = MoeRow(case, CEILINGS, bytes_read=touched * case.expert_bytes)
    assert row.floor_us == pytest.approx(us, rel=1e-3, abs=0.06)
    assert case.bytes_expected == pytest.approx(row.bytes_read, rel=1e-2)


def test_bytes_and_floors_of_quantised_experts():
    case = ExpertsCase("quant", "m", 4, 256, 128, 2, 8, quantised="e4m3", scales="block")
    assert case.expert_bytes == 3 * 256 * 128 + 4 * (2 * 2 + 2 * 1)
    assert ExpertsCase("quant", "m", 4, 256, 128, 2, 8, quantised="int8", scales="channel").expert_bytes == 3 * 256 * 128 + 4 * (256 + 256)
    row = MoeRow(case, CEILINGS, bytes_read=1.0)
    assert row.compute_us == pytest.approx(case.flops / 1600.0 / 1e6)
    unknown = ExpertsCase("quant", "m", 4, 256, 128, 2, 8, quantised="int8", scales="channel")
    assert MoeRow(unknown, CEILINGS, bytes_read=1.0).floor_us == CEILINGS.read_us(1.0)  # a rate that is not known bounds nothing


@pytest.fixture
def judged() -> Callable[..., dict[str, bool | None]]:
    """Judge a row of `name` that takes `us`, beside peers of the file (`peers`) and of PyTorch (`torch`)."""

    def of(
        name: str, us: float | None, peers: dict[str, float | None] | None = None, torch: dict[str, float | None] | None = None, **fields: Any
    ) -> dict[str, bool | None]:
        case = next(case for case in CUDA_CASES if case.name == name)
        times = {who: PeerTime(time, problem="" if time else "RuntimeError: no") for who, time in {**(peers or {}), **(torch or {})}.items()}
        row = MoeRow(case, CEILINGS, ours_us=us, bytes_read=case.bytes_expected, peers=times, against=tuple(peers or ()), **fields)
        found: list[Judgement] = judge_rows([row], BARS)
        return {judgement.what: judgement.met for judgement in found}

    return of


RATIO, NEAR = "time / best peer", "time / best peer, itself near the floor"


def test_a_far_peer_must_be_beaten_and_a_near_one_equalled(judged: Callable[..., dict[str, bool | None]]):
    floor = 617.7  # mixtral T256
    assert judged("mixtral-8x7b T256", 0.94 * 1.2 * floor, {"far": 1.2 * floor})[RATIO] is True
    assert judged("mixtral-8x7b T256", 0.96 * 1.2 * floor, {"far": 1.2 * floor})[RATIO] is False
    near = judged("mixtral-8x7b T256", 0.99 * 1.05 * floor, {"near": 1.05 * floor})
    assert RATIO not in near
    assert near[NEAR] is True
    assert judged("mixtral-8x7b T256", 1.06 * floor, {"near": 1.05 * floor})[NEAR] is False


def test_nothing_counts_as_beaten_that_did_not_run(judged: Callable[..., dict[str, bool | None]]):
    assert judged("mixtral-8x7b T256", 700.0, {"vllm": None}, {"torch": 1000.0})[RATIO] is None
    assert judged("mixtral-8x7b T256", 700.0, {}, {"torch": 1000.0})[RATIO] is None
    assert judged("mixtral-8x7b T256", 900.0, {"vllm": 1100.0}, {"torch": 920.0})[RATIO] is False  # the best of all counts
    assert judged("mixtral-8x7b T256", 700.0, {"vllm": 1000.0}, problem="failed")[RATIO] is False


@pytest.mark.parametrize(
    ("name", "what", "good", "bad"),
    [
        ("qwen3-30b-a3b T256", "fraction of the memory floor", 294.0, 295.0),
        ("qwen3-30b-a3b T1", "microseconds beyond 1.5 x the floor, one token", 30.7, 30.9),
        ("qwen3-30b-a3b T8192", "fraction of the matmul rate", 1240.0, 1242.0),
        ("mixtral-8x7b T4096", "fraction of the matmul rate", 4486.0, 4488.0),
    ],
)
def test_bars_of_the_floors(judged: Callable[..., dict[str, bool | None]], name: str, what: str, good: float, bad: float):
    assert judged(name, good)[what] is True
    assert judged(name, bad)[what] is False


def test_floors_bound_only_the_shapes_they_are_for(judged: Callable[..., dict[str, bool | None]]):
    assert "fraction of the memory floor" not in judged("qwen3.5-35b/tp4 T64", 99.0)  # I = 128
    assert "fraction of the memory floor" not in judged("qwen3-30b-a3b T1024", 99.0)
    assert "fraction of the memory floor" not in judged("mixtral-8x7b T16", 99.0)
    assert "fraction of the matmul rate" not in judged("qwen3-30b-a3b T1024", 99.0)
    assert judged("qwen3-30b-a3b T64 int8 channel", 99.0) == {}


def test_bar_of_scratch(judged: Callable[..., dict[str, bool | None]]):
    needed = EXPERTS["mixtral-8x7b T16"].activation_bytes
    assert needed == 16 * 2 * (14336 + 4096) * 2
    what = "scratch / results of the two products"
    assert judged("mixtral-8x7b T16", 99.0, scratch_bytes=int(1.24 * needed))[what] is True
    assert judged("mixtral-8x7b T16", 99.0, scratch_bytes=int(1.26 * needed))[what] is False
    assert what not in judged("mixtral-8x7b T16", 99.0)


def test_bars_of_routing(judged: Callable[..., dict[str, bool | None]]):
    fast, any_shape = "time / best peer, routing", "time / best peer, routing of any shape"
    assert judged("E128 k8 T64", 0.89, {"vllm": 1.0}) == {fast: True}
    assert judged("E512 k10 T1", 0.91, {"vllm": 1.0}) == {fast: False}
    assert judged("E8 k2 T64", 1.09, {"vllm": 1.0}) == {any_shape: True}
    assert judged("E512 k512 T1", 1.11, {"vllm": 1.0}) == {any_shape: False}
