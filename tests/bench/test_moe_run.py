"""`hal bench moe` on the CPU: data, peers, whole runs, their outputs and their errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hal
from hal.bench import timer
from hal.bench.ceilings import Ceilings, measure_ceilings
from hal.bench.guard import DeviceLost, relative
from hal.bench.moe import cases, measure
from hal.bench.moe import run as moe_run
from hal.bench.moe.cases import CPU_CASES, ExpertsCase, MoeCase, RoutingCase
from hal.bench.moe.experts import ExpertsWork
from hal.bench.moe.host import measure_host
from hal.bench.moe.measure import measure_case
from hal.bench.moe.peers import MoePeers
from hal.bench.moe.result import MoeResult
from hal.bench.moe.routing import RoutingWork
from hal.bench.moe.run import run
from hal.bench.run import Options
from hal.errors import HalError

CPU = torch.device("cpu")
CEILINGS = Ceilings(40.0, "made up", {"made up": 40.0}, 0.1, "fp32, 8^3")
EXPERTS = ExpertsCase("experts", "small", 6, 48, 20, 2, 5, "fp32")
ROUTING = RoutingCase("routing", 12, 3, 7, "fp32")
PEERS = """
import torch, hal

NAMES = {"fused_moe": "theirs"}

def moe_config(num_experts, intermediate, hidden, tokens):
    return (num_experts, intermediate, hidden, tokens)

def fused_moe(x, w_gate_up, w_down, weights, ids, config):
    assert config == (w_down.shape[0], w_down.shape[2], x.shape[1], x.shape[0])
    return hal.get_backend("reference").fused_moe(x, w_gate_up, w_down, weights, ids)

def topk_softmax(logits, top_k, renormalize):
    assert not renormalize
    return tuple(torch.softmax(logits.float(), -1).topk(top_k))
"""


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"_REPLAYS": 1, "_WARM_UP": 0, "_LEAST_CALLS": 3, "_HOST_CALLS": 2, "_HOST_ROUNDS": 1}.items():
        monkeypatch.setattr(timer, name, few)


@pytest.fixture
def backend() -> hal.Backend:
    return hal.get_backend("reference")


@pytest.fixture
def peers_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "moe_peers_under_test.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., MoeResult]:
    """Run a few tiny cases with the reference as backend, and with ceilings that take no time."""
    listed = (EXPERTS, ROUTING, *(case for case in CPU_CASES if case.group == "quant"))
    monkeypatch.setattr(cases, "CPU_CASES", listed)
    monkeypatch.setattr(moe_run, "measure_ceilings", lambda device, quantised: CEILINGS)

    def call(**options: Any) -> MoeResult:
        fields: dict[str, Any] = {"groups": ("all",), "json_path": tmp_path / "run.json", "device": "cpu"} | options
        return run(Options(**fields))

    return call


@pytest.mark.parametrize("case", [EXPERTS, replace(EXPERTS, dtype="bf16"), *(c for c in CPU_CASES if c.group == "quant")], ids=lambda c: c.name)
def test_exact_error_tells_right_from_wrong(case: ExpertsCase, backend: hal.Backend):
    work = ExpertsWork.make(case, 2, CPU)
    positional, keywords = work.arguments(1)
    result = backend.fused_moe(*positional, **keywords)
    assert work.exact_error(result, 1) <= work.tolerance
    assert work.exact_error(result, 0) > 0.1  # other weights and ids
    assert work.exact_error(torch.full_like(result, torch.nan), 1) == float("inf")
    assert 0.1 < result.float().std() < 10


def test_touched_experts_are_counted_from_the_ids():
    work = ExpertsWork.make(EXPERTS, 2, CPU)
    counts = [len(set(ids.flatten().tolist())) for ids in work.ids]
    assert work.touched == sum(counts) / 2
    assert work.bytes_read == work.touched * 3 * 48 * 20 * 4
    assert torch.allclose(work.weights.sum(-1), torch.ones(2, 5))


def test_exact_error_of_routing(backend: hal.Backend):
    work = RoutingWork.make(ROUTING, 2, CPU)
    positional, keywords = work.arguments(0)
    weights, ids = backend.topk_softmax(*positional, **keywords)
    assert work.exact_error((weights, ids), 0) <= work.tolerance
    assert work.exact_error((weights, ids.flip(1)), 0) == float("inf")
    assert work.exact_error((weights * 1.01, ids), 0) > work.tolerance


def test_peers_may_choose_among_equal_logits_only():
    work = RoutingWork.make(ROUTING, 1, CPU)
    work.logits[0] = torch.tensor([3.0, 2.0, 2.0, 1.0, *[0.0] * 8])
    weights = torch.softmax(work.logits[0], -1)[:, [0, 1, 3]]
    first, second, other = (torch.tensor([row] * 7, dtype=torch.int32) for row in ([0, 1, 3], [0, 2, 3], [0, 4, 3]))
    assert work.difference((weights, second), (weights, first)) == 0
    assert work.difference((weights, other), (weights, first)) > 0.5


def test_torch_computes_the_same_over_its_grouped_product(backend: hal.Backend):
    work = ExpertsWork.make(EXPERTS, 1, CPU)
    makers = work.peers_of_torch()
    if not hasattr(torch, "_grouped_mm"):
        assert makers == {}
        pytest.skip("this PyTorch has no grouped product")
    positional, _ = work.arguments(0)
    assert relative(makers["torch_grouped_mm"](0)(), backend.fused_moe(*positional)) < 1e-5


def test_a_run_with_peers(small_run: Callable[..., MoeResult], peers_file: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = small_run(against=peers_file(PEERS), markdown_path=tmp_path / "run.md")
    assert [row.case.group for row in result.rows] == ["experts", "routing", "quant", "quant", "quant"]
    assert all(not row.problem and not row.skipped and row.us and (row.error or 0) < 8e-2 and row.same_bits for row in result.rows)
    experts, routing = result.rows[:2]
    assert experts.peers["theirs"].us is not None
    assert experts.against == ("theirs",)
    assert experts.against_ratio == experts.ratio
    assert set(routing.peers) == {"moe_peers_under_test", "torch_ops"}
    assert all(not row.peers for row in result.rows[2:])
    assert {(row.who, row.problem) for row in result.host} >= {("reference", ""), ("theirs", ""), ("torch_ops", "")}
    assert result.judgements == []  # the bars are for a GPU
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["schema"] == "hal.bench.moe/1"
    first = data["rows"][0]
    assert first["ratio"] == pytest.approx(first["us"] / first["peers"][first["best_peer"]]["us"])
    assert first["of_floor"] == pytest.approx(first["floor_us"] / first["us"])
    assert first["flops"] == 2 * 5 * 2 * 3 * 48 * 20
    assert first["shape"]["experts"] == 6
    assert first["scratch_bytes"] is None
    assert data["machine"]["served_by"] == "reference"
    lines = capsys.readouterr().out
    assert "experts   small T5 fp32" in lines
    text = (tmp_path / "run.md").read_text()
    assert "| case | touched | MB | floor us |" in text
    assert "| tiny T16 fp32 e4m3 block |" in text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("torch.zeros_like(x)", "wrong: its result differs from ours by 1.0e+00 of the largest value"),
        ("x * float('nan')", "wrong: its result is not finite"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("None", "TypeError: the result is NoneType, not a tensor"),
    ],
)
def test_peers_that_fail_never_count_as_beaten(
    small_run: Callable[..., MoeResult], peers_file: Callable[[str], Path], body: str, problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    path = peers_file(f"import torch\ndef fused_moe(x, *rest): return {body}")
    (row,) = small_run(against=path, groups=("experts",)).rows
    assert row.peers["moe_peers_under_test"].us is None
    assert row.peers["moe_peers_under_test"].problem == problem
    assert row.ratio is row.against_ratio is None


def test_a_broken_config_of_the_peers_is_noted(small_run: Callable[..., MoeResult], peers_file: Callable[[str], Path]):
    path = peers_file("def fused_moe(*a): ...\ndef moe_config(*a): raise KeyError('E=6')")
    (row,) = small_run(against=path, groups=("experts",)).rows
    assert row.notes == ["moe_peers_under_test.py: KeyError: 'E=6'"]
    assert row.us is not None


def test_bad_peers_files_are_errors(peers_file: Callable[[str], Path]):
    with pytest.raises(HalError, match="defines none of: fused_moe, topk_softmax"):
        MoePeers(peers_file("def decode(): ..."))


def test_a_wrong_result_of_ours_has_no_time(small_run: Callable[..., MoeResult], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_ours", lambda backend, work: lambda index: lambda: work.out.zero_())
    (row,) = small_run(groups=("experts",)).rows
    assert row.us is None
    assert "our result is wrong: error 1.0e+00 against float64" in row.problem


def test_a_result_that_is_not_written_again_has_no_time(small_run: Callable[..., MoeResult], monkeypatch: pytest.MonkeyPatch):
    real = measure._ours

    def once(backend: Any, work: Any) -> Any:
        real(backend, work)(0)()
        return lambda index: lambda: work.out

    monkeypatch.setattr(measure, "_ours", once)
    monkeypatch.setattr(measure, "sets_needed", lambda *a: 1)
    monkeypatch.setattr(measure, "last_index", lambda sets: 0)
    (row,) = small_run(groups=("experts",)).rows
    assert row.us is None
    assert row.problem.startswith("wrong when it was repeated")


def test_a_failing_row_costs_only_itself(small_run: Callable[..., MoeResult], monkeypatch: pytest.MonkeyPatch):
    def fails(case: MoeCase, sets: int, device: torch.device) -> Any:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setitem(measure._WORK, ExpertsCase, fails)
    result = small_run(groups=("experts", "routing"))
    assert [row.problem for row in result.rows] == ["RuntimeError: no memory at all", ""]


def test_quantised_rows_that_a_backend_refuses_are_skipped_with_the_reason(tmp_path: Path):
    config = tmp_path / "chain.yaml"
    config.write_text("name: chain\nbackends: [ixformer, reference]\n")
    chained = hal.get_backend(config=config)
    quant = next(case for case in CPU_CASES if case.group == "quant")
    row = measure_case(chained, quant, CEILINGS, None, CPU)
    assert row.us is None
    assert not row.problem
    assert row.skipped.startswith("ixformer: NOT_")
    nobody = config.with_name("nobody.yaml")
    nobody.write_text("name: nobody\nbackends: [ixformer]\n")
    assert measure_case(hal.get_backend(config=nobody), quant, CEILINGS, None, CPU).skipped.startswith("ixformer: NOT_")
    assert measure_case(chained, EXPERTS, CEILINGS, None, CPU).us is not None  # others are measured as they are served


def test_limit_lists_what_was_not_run(small_run: Callable[..., MoeResult], capsys: pytest.CaptureFixture[str]):
    result = small_run(groups=("experts", "host"), limit_seconds=-1.0)
    assert result.rows == []
    assert result.not_run == [("experts", "small T5 fp32"), ("host", "all")]
    assert "Not run: 2 rows (after -1 seconds)" in capsys.readouterr().out


def test_a_lost_device_ends_the_run_and_keeps_the_rows(small_run: Callable[..., MoeResult], monkeypatch: pytest.MonkeyPatch):
    def lost(backend: Any, case: MoeCase, *rest: Any) -> Any:
        if case.group == "routing":
            raise DeviceLost("cuda:0 answers no more")
        return measure_case(backend, case, *rest)

    monkeypatch.setattr(moe_run, "measure_case", lost)
    result = small_run(groups=("experts", "routing"))
    assert [row.case.group for row in result.rows] == ["experts"]
    assert result.not_run == [("routing", "E12 k3 T7 fp32")]
    assert result.stopped == "cuda:0 answers no more"


def test_plot_of_a_run_and_of_its_json(small_run: Callable[..., MoeResult], peers_file: Callable[[str], Path], tmp_path: Path):
    pytest.importorskip("matplotlib")
    from hal.bench.plot import draw_file

    small_run(against=peers_file(PEERS), groups=("experts",), plot_path=tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    draw_file(tmp_path / "run.json", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").stat().st_size > 10_000
    small_run(groups=("routing",))
    with pytest.raises(HalError, match="no row of group experts has a time"):
        draw_file(tmp_path / "run.json", tmp_path / "none.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ("exprts",)}, "no such group; did you mean 'experts'"),
        ({"only": ("no such row",), "groups": ("experts",)}, "no case of group experts has such a name"),
        ({"against": Path("/nowhere/peers.py")}, "there is no such file"),
        ({"device": "tpu"}, "accepted are cuda, cuda:N and cpu"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(HalError, match=message):
        run(Options(**({"groups": ("experts",), "device": "cpu"} | options)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so():
    with pytest.raises(HalError, match="bench moe: PyTorch sees no CUDA device here"):
        run(Options(groups=("experts",)))


def test_host_rows_name_what_failed(backend: hal.Backend, peers_file: Callable[[str], Path]):
    peers = MoePeers(peers_file("def fused_moe(*a): raise RuntimeError('boom')"))
    rows = {row.name: row for row in measure_host(backend, peers, CPU)}
    assert rows["moe_peers_under_test: fused_moe, tiny T1 fp32"].problem == "RuntimeError: boom"
    assert all(row.us and row.us > 0 for row in rows.values() if row.who != "moe_peers_under_test")
    assert "reference: topk_softmax, E8 k2 T1 fp32, outputs given" in rows


def test_ceilings_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    from hal.bench import ceilings

    monkeypatch.setitem(ceilings._SIZES, "cpu", (1 << 16, 32, "fp32"))
    found = measure_ceilings(CPU, ("int8",))
    assert found.read_gbps == max(rate for rate in found.tried.values() if isinstance(rate, float)) > 0
    assert found.matmul == "fp32, 32^3"
    assert found.compute_us(2e6) == pytest.approx(2e6 / found.matmul_tflops / 1e6)
    assert found.quantised_tflops["int8"]


def test_the_command(small_run: Callable[..., MoeResult], tmp_path: Path):
    from typer.testing import CliRunner

    from hal.cli import app

    done = CliRunner().invoke(app, ["bench", "moe", "-d", "cpu", "--only", "e12", "--json", f"{tmp_path}/a.json", "--markdown", f"{tmp_path}/b.md"])
    assert done.exit_code == 0, done.output
    assert [row["case"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == ["E12 k3 T7 fp32"]
    assert "### Routing" in (tmp_path / "b.md").read_text()
