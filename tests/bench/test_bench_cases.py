"""The tables of cases and of bars: complete, consistent, and judged rightly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hal.bench.bars import Judgement, geometric_mean
from hal.bench.decode import cases
from hal.bench.decode.bars import judge
from hal.bench.decode.cases import CASES, GROUPS, DecodeCase, select
from hal.bench.decode.host import Scratch
from hal.bench.decode.rows import DecodeRow
from hal.bench.decode.view import TITLES
from hal.bench.host import HostRow
from hal.bench.rows import PeerTime

MakeRow = Callable[..., DecodeRow]

#: Published rows -> megabytes of keys and values.
MAIN_MB = {
    "seed B16 16/8 D128 4k p32 fp16": 268,
    "llama8b B1 1k": 4,
    "llama8b B1 8k": 34,
    "llama8b B1 128k": 537,
    "llama8b B8 8k": 268,
    "llama8b B64 1k": 268,
    "llama8b B64 8k": 2147,
    "llama8b B256 2k": 2147,
    "llama8b ragged B64 64..16k": 2156,
    "llama8b one 64k + 63 x 512": 401,
    "llama8b 1 x 128k + 31 x 4k": 1057,
    "llama70b/tp8 B64 8k": 268,
    "llama70b/tp8 B1 32k": 17,
    "mha llama2-7b B16 4k": 1074,
    "qwen3.5 16/2 D256 B16 16k": 537,
    "smollm 9/3 D64 B8 2k": 13,
    "mqa 32/1 D128 B32 4k p64": 67,
    "llama8b B64 8k p64": 2147,
}
MLA_MB = {
    "B1 H16 ctx4096 q1": 4.7,
    "B1 H128 ctx4096 q1": 4.7,
    "B1 H128 ctx32768 q1": 37.7,
    "B32 H16 ctx4096 q1": 151.0,
    "B128 H16 ctx4096 q1": 604.0,
    "B32 H128 ctx4096 q1": 151.0,
    "B128 H128 ctx4096 q1": 604.0,
    "B64 H16 ctx16384 q1": 1208.0,
    "B64 H128 ctx16384 q1": 1208.0,
    "B64 H128 ctx4096 q2": 302.0,
}


def named(group: str) -> dict[str, DecodeCase]:
    return {case.name: case for case in select((group,))}


def test_names_are_unique_and_bases_exist():
    assert [key for key, count in Counter((case.group, case.name) for case in CASES).items() if count > 1] == []
    for case in CASES:
        assert not case.base or (case.base in named(case.group) and case.base != case.name), case


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}-{case.name}")
def test_a_case_is_a_valid_call(case: DecodeCase):
    assert case.lengths
    assert min(case.lengths) >= case.q_len >= 1
    assert case.heads % case.kv_heads == 0
    assert set(case.peers) <= {"decode", "attend", "mla", "fp8"}
    assert ("decode" not in case.peers) or (case.q_len == 1 and case.window is None)
    assert case.group in TITLES


def test_groups_are_those_of_the_cases():
    assert GROUPS == ("main", "fp8", "mla", "invariant", "pages", "groups", "dims", "qlen", "window", "batch", "host")


def test_published_rows_are_there():
    main = {name: case for name, case in named("main").items() if case.peers}
    assert {name: round(case.kv_bytes / 1e6) for name, case in main.items()} == MAIN_MB
    assert {name: round(case.kv_bytes / 1e6, 1) for name, case in named("mla").items()} == MLA_MB
    flops = named("mla")["B64 H128 ctx16384 q1"].flops
    assert flops / 508.1e-6 / 1e12 == pytest.approx(574.8, rel=2e-3)


def test_sweeps_cover_what_is_promised():
    assert {case.page for case in select(("pages",))} == {1, 16, 48, 64, 128, 256}
    assert {case.heads // case.kv_heads for case in select(("groups",))} >= {1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 71}
    assert {case.head_dim for case in select(("dims",))} == {64, 96, 128, 192, 256}
    for kv_heads in (1, 8):
        assert [case.batch for case in select(("batch",)) if case.kv_heads == kv_heads] == list(range(1, 65))
    assert sum(case.batch_invariant for case in select(("invariant",))) == 6
    assert sorted(case.stored for case in select(("fp8",))) == ["e4m3"] * 6 + ["int8"]


def test_twins_have_the_bytes_of_their_ragged_rows():
    rows = named("main")
    for name in ("llama8b one 64k + 63 x 512", "llama8b 1 x 128k + 31 x 4k"):
        assert rows[rows[name].base].kv_bytes == rows[name].kv_bytes


def test_bytes_of_windows_blocks_and_scales():
    window = DecodeCase("window", "w", (5000, 10), 8, 2, 64, window=100, q_len=3)
    assert window.visible == (102, 10)
    assert window.kv_bytes == 112 * 2 * 128 * 2
    assert DecodeCase("fp8", "i", (7,), 8, 2, 64, kv_dtype="int8").kv_bytes == 7 * 2 * (128 + 8)


def test_select_takes_groups_and_parts_of_names():
    assert {case.group for case in select(("all",))} == set(GROUPS) - {"host"}
    assert [case.name for case in select(("main", "mla"), ("B1 8K", "h16 ctx16384"))] == ["llama8b B1 8k", "B64 H16 ctx16384 q1"]
    assert select(("host",)) == []


def judged(rows: list[DecodeRow], text: str) -> list[Judgement]:
    return [judgement for judgement in judge(rows) if text in judgement.what]


def test_ratio_counts_only_peers_that_ran_and_were_right(make_row: MakeRow):
    peers = ("decode",)
    beaten = make_row(9.0, peers={"fa3": 10.0, "other": 20.0}, **{"name": "beaten"})
    beaten.case.__dict__["peers"] = peers
    assert beaten.ratio == pytest.approx(0.9)
    wrong = make_row(9.0, peers={"fa3": 30.0})
    wrong.peers["fast but wrong"] = PeerTime(None, 0.5, "wrong: its result differs")
    assert wrong.best_peer == ("fa3", 30.0)
    alone = make_row(9.0, peers={"fa3": None})
    assert alone.best_peer is None
    assert alone.ratio is None


@pytest.mark.parametrize(
    ("us", "peers", "met"), [(9.0, {"fa3": 10.0}, True), (9.8, {"fa3": 10.0}, False), (1.0, {"fa3": None}, None), (1.0, {}, None)]
)
def test_bar_of_the_best_peer(make_row: MakeRow, us, peers, met):
    row = with_peers(make_row, us, peers)
    one, mean = judged([row], "best peer")
    assert one.met is met
    assert mean.met is (None if met is None else us / 10.0 <= 0.9)
    assert f"{0 if met is None else 1} of 1 rows" in mean.what


def with_peers(make_row: MakeRow, us: float | None, times: dict[str, float | None], name: str = "row") -> DecodeRow:
    made = make_row(us, name=name)
    shape = dict(made.case.__dict__) | {"peers": ("decode",)}
    timed = {peer: PeerTime(time, problem="" if time else "no") for peer, time in times.items()}
    return DecodeRow(DecodeCase(**shape), made.ceilings, plan_us=made.plan_us, peers=timed, problem=made.problem)


def test_our_own_failure_is_a_miss(make_row: MakeRow):
    row = with_peers(make_row, None, {"fa3": 10.0})
    assert row.ratio is None
    assert judged([row], "time / best peer")[0].met is False


@pytest.mark.parametrize(
    ("lengths", "gbps", "what", "met"),
    [
        ((8192,) * 64, 3900.0, "KV >= 1 GB", True),
        ((8192,) * 64, 3700.0, "KV >= 1 GB", False),
        ((8192,) * 8, 3500.0, "KV >= 250 MB", True),
        ((8192,) * 8, 3300.0, "KV >= 250 MB", False),
    ],
)
def test_bars_of_the_ceiling(make_row: MakeRow, lengths, gbps, what, met):
    assert [j.met for j in judged([make_row(None, gbps=gbps, lengths=lengths)], what)] == [met]


@pytest.mark.parametrize(("keys", "us", "met"), [(1024, 6.4, True), (1024, 6.6, False), (8192, 13.9, True), (8192, 14.1, False), (2048, 99.0, None)])
def test_bars_of_latency(make_row: MakeRow, keys, us, met):
    assert [j.met for j in judged([make_row(us, lengths=(keys,))], "microseconds, KV")] == ([] if met is None else [met])


def test_pages_are_held_to_the_fastest(make_row: MakeRow):
    rows = [make_row(us, group="pages", name=f"page {us}", lengths=(8,)) for us in (10.0, 10.9, 11.1)]
    assert [j.met for j in judged(rows, "fastest page size")] == [True, True, False]
    assert [j.met for j in judged(rows[:1], "fastest page size")] == [None]


def test_query_blocks_windows_and_batches_are_held_to_their_base(make_row: MakeRow):
    one = make_row(10.0, group="qlen", name="one")
    assert [j.met for j in judged([one, make_row(11.9, group="qlen", name="8", q_len=8, base="one")], "q_len 1")] == [True]
    assert [j.met for j in judged([one, make_row(12.1, group="qlen", name="8", q_len=8, base="one")], "q_len 1")] == [False]
    assert judged([one, make_row(99.0, group="qlen", name="8", q_len=8, heads=256, base="one")], "q_len 1") == []
    assert [j.met for j in judged([make_row(10.0, group="window", window=8, base="gone")], "context of the window")] == [None]
    rows = [
        make_row(us, group="batch", name=f"B{b}", lengths=(64,) * b, base=f"B{b - 1}" if b > 1 else "") for b, us in ((1, 10.0), (2, 20.5), (3, 31.7))
    ]
    assert [j.met for j in judged(rows, "one sequence less")] == [True, False]


def test_host_and_scratch_bars():
    host = [
        HostRow("hal", "narrow", 23.0, True),
        HostRow("hal", "wide", 25.0, True),
        HostRow("fa3", "narrow", 99.0),
        HostRow("hal", "x", None, True, "no"),
    ]
    found = {judgement.row: judgement.met for judgement in judge([], host, Scratch(10, 100, 100, 100))}
    assert found == {"hal: narrow": True, "hal: wide": False, "hal: x": False, "10 calls": True, "up to 16 rows": True}
    assert [j.met for j in judge([], (), Scratch(10, 100, 101, 50)) if "grown" in j.what] == [False]
    assert [j.met for j in judge([], (), Scratch(10, 2**26, 2**26, 50)) if j.what == "scratch bytes"] == [False]


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([]) is None


def test_module_lists_no_case_twice():
    assert len(cases.CASES) == len(set(cases.CASES))
