"""`hal bench decode` without a GPU: buffers, peers files, a whole run on a stand-in, its outputs, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hal
from hal.bench import timer
from hal.bench.decode import cases, measure
from hal.bench.decode import run as decode
from hal.bench.decode.buffers import Buffers
from hal.bench.decode.cases import DecodeCase
from hal.bench.decode.exact import exact_error
from hal.bench.decode.host import measure_host, measure_scratch
from hal.bench.decode.peers import load_peers
from hal.bench.decode.result import DecodeResult
from hal.bench.decode.run import run
from hal.bench.fill import sets_needed
from hal.bench.guard import DeviceLost, relative
from hal.bench.run import Options
from hal.errors import HalError

CPU = torch.device("cpu")
SMALL = DecodeCase("main", "small", (37, 5, 1), 4, 2, 16, peers=("decode", "attend"))
SHAPES = {
    "plain": SMALL,
    "fp16 page 3": replace(SMALL, dtype="fp16", page=3),
    "q_len 3": replace(SMALL, lengths=(37, 5, 3), q_len=3),
    "window": replace(SMALL, lengths=(100, 5), window=7),
    "mla": DecodeCase("mla", "m", (70, 3), 4, 1, 576, 64, mla=True, peers=("mla",)),
    "e4m3": replace(SMALL, kv_dtype="e4m3", peers=("fp8",)),
    "int8": replace(SMALL, kv_dtype="int8", peers=()),
}
PEERS = """
import hal

def decode(q, k_cache, v_cache, seq_lens, block_tables, out, scale=None):
    step = hal.get_backend("reference").flash_decode
    def boom():
        raise RuntimeError("boom")
    return {
        "right": lambda: step(q, k_cache, v_cache, seq_lens, block_tables, out=out),
        "zeros": lambda: out.zero_(),
        "idle": lambda: None,
        "boom": boom,
    }

def mla(q, kv_cache, seq_lens, block_tables, scale):
    b, t, h, d = q.shape
    step = hal.get_backend("reference").flash_decode
    rows, values = q.reshape(b * t, h, d), kv_cache[..., :512]
    return lambda: (step(rows, kv_cache, values, seq_lens, block_tables, q_len=t, scale=scale).view(b, t, h, 512), None)

def fp8(q8, k8, v8, seq_lens, block_tables, out, q_scale, k_scale, v_scale):
    step = hal.get_backend("reference").flash_decode
    return {"right8": lambda: step((q8.float() * q_scale).to(out.dtype), k8, v8, seq_lens, block_tables, k_scale=k_scale, v_scale=v_scale, out=out)}
"""


@pytest.fixture
def peers_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "peers_under_test.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def backend() -> hal.Backend:
    return hal.get_backend("reference")


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_exact_error_tells_right_from_wrong(case: DecodeCase, backend: hal.Backend):
    buffers = Buffers.make(case, 2, CPU)
    out = measure._ours(backend, buffers, None)(1)()
    assert exact_error(buffers, out, 1) < 2e-2
    assert exact_error(buffers, out, 0) > 0.1  # other keys
    out.fill_(torch.nan)
    assert exact_error(buffers, out, 1) == float("inf")


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_buffers_are_what_a_case_says(case: DecodeCase):
    buffers = Buffers.make(case, 2, CPU)
    seen = [
        table[max(0, n - v) // case.page : -(-n // case.page)].tolist()
        for table, n, v in zip(buffers.tables, case.lengths, case.visible, strict=True)
    ]
    used = [page for pages in seen for page in pages]
    assert sorted(used) == list(range(buffers.keys(0).shape[0]))
    assert torch.isfinite(buffers.caches.float()).all()
    assert not torch.equal(buffers.keys(0), buffers.keys(1))
    assert buffers.values(1).shape[-1] == case.head_dim_v


def test_enough_sets_to_exceed_the_cache():
    case = replace(SMALL, lengths=(8192,) * 8, kv_heads=8, heads=8, head_dim=128)  # 268 MB
    assert sets_needed(case.kv_bytes, 1) == 2
    assert sets_needed(case.kv_bytes, 400_000_000) == 9
    assert sets_needed(SMALL.kv_bytes, 1) == 64


def test_relative_sees_what_is_not_finite():
    one = torch.ones(3)
    assert relative(one * 1.5, one) == pytest.approx(0.5)
    assert relative(torch.tensor([1.0, torch.nan, 1.0]), one) == float("inf")


@pytest.mark.parametrize(("sets", "index"), [(1, 0), (2, 1), (3, 1), (64, 63)])
def test_last_captured_set(sets: int, index: int):
    order = [i % sets for i in range(max(sets, 8))]
    assert timer.last_index(sets) == order[-1] == index


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("def decode(:", "SyntaxError"),
        ("x = 1", "defines none of: decode, attend, mla, fp8"),
    ],
)
def test_bad_peers_files_are_errors(peers_file: Callable[[str], Path], text: str, message: str):
    with pytest.raises(HalError, match=message):
        load_peers(peers_file(text))


def test_missing_peers_file(tmp_path: Path):
    with pytest.raises(HalError, match="there is no such file"):
        load_peers(tmp_path / "gone.py")


def test_peers_must_return_callables(peers_file: Callable[[str], Path]):
    peers = load_peers(peers_file("def decode(*a): return 3"))
    with pytest.raises(TypeError, match=r"must return \{name: callable\}, not int"):
        peers.bind("decode", Buffers.make(SMALL, 1, CPU), 0)


@pytest.fixture
def small_run(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a few tiny cases on the stand-in, with the reference as backend."""
    listed = (
        SMALL,
        replace(SMALL, name="other"),
        replace(SHAPES["mla"], heads=16),
        replace(SHAPES["e4m3"], group="fp8"),
        replace(SHAPES["int8"], group="fp8", name="int8"),
    )
    monkeypatch.setattr(cases, "CASES", listed)

    def call(**options: Any) -> Any:
        fields: dict[str, Any] = {"backend": "reference", "groups": ("all",), "json_path": tmp_path / "run.json"} | options
        return run(Options(**fields))

    return call


def test_a_run_with_peers(small_run: Callable[..., Any], peers_file: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = small_run(against=peers_file(PEERS), markdown_path=tmp_path / "run.md")
    main, _, mla, e4m3, int8 = result.rows
    assert all(not row.problem and row.us and row.error < 2e-2 for row in result.rows)
    assert main.peers["right"].us is not None
    assert {name: peer.us for name, peer in main.peers.items() if name != "right"} == {"zeros": None, "idle": None, "boom": None}
    assert main.peers["zeros"].problem.startswith("wrong: its result differs from ours by 1.0e+00")
    assert main.peers["idle"].problem == "wrong: its result is not finite"
    assert main.peers["boom"].problem == "RuntimeError: boom"
    assert main.best_peer[0] == "right"
    assert mla.peers["flashmla"].us
    assert e4m3.peers["right8"].us
    assert int8.peers == {}
    assert result.host[0].us == 12.0
    lines = capsys.readouterr().out
    assert "boom failed" in lines
    text = (tmp_path / "run.md").read_text()
    assert "| case | KV MB |" in text
    assert "| small |" in text
    assert "Geometric mean of ours / best peer, main:" in text


def test_json_holds_everything(small_run: Callable[..., Any], peers_file: Callable[[str], Path], tmp_path: Path):
    result = small_run(against=peers_file(PEERS))
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["schema"] == DecodeResult.schema
    assert set(data["machine"]) >= {"gpu", "torch", "triton", "cuda", "date", "backend", "hal"}
    assert "CUDA graph" in data["method"]
    assert data["ceilings"]["read_gbps"] == 4000.0
    assert [row["case"] for row in data["rows"]] == [row.case.name for row in result.rows]
    first = data["rows"][0]
    assert first["gbps"] == pytest.approx(first["kv_bytes"] / first["us"] / 1e3)
    assert first["ratio"] == pytest.approx(first["us"] / first["peers"][first["best_peer"]]["us"])
    assert first["peers"]["idle"] == {"us": None, "error": None, "problem": "wrong: its result is not finite"}
    assert {bar["met"] for bar in data["bars"]} <= {True, False, None}
    assert data["scratch"]["after"] == 64
    assert data["machine"]["served_by"] == "reference"


def test_peers_that_fail_never_count_as_beaten(small_run: Callable[..., Any], peers_file: Callable[[str], Path]):
    text = "def decode(*a): raise ValueError('no kernels')\ndef attend(*a): return {'late': lambda: None}"
    result = small_run(against=peers_file(text), only=("small",), groups=("main",))
    (row,) = result.rows
    assert row.notes == ["decode of peers_under_test.py: ValueError: no kernels"]
    assert row.peers["late"].us is None
    assert row.ratio is None
    assert {j.what: j.met for j in result.judgements}["time / best peer"] is None
    assert list(result.means()) == []


def test_a_wrong_result_of_ours_has_no_time(small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_ours", lambda backend, buffers, plan: lambda index: lambda: buffers.out.zero_())
    result = small_run(only=("small",))
    assert result.rows[0].us is None
    assert "our result is wrong: error 1.0e+00 against float64" in result.rows[0].problem


def test_a_failing_row_costs_only_itself(small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    make = Buffers.make

    def fails(case: DecodeCase, *rest: Any) -> Buffers:
        if case.name == "small":
            raise RuntimeError("no memory\nat all")
        return make(case, *rest)

    monkeypatch.setattr(measure.Buffers, "make", fails)
    result = small_run(groups=("main",))
    assert [(row.case.name, row.problem) for row in result.rows] == [("small", "RuntimeError: no memory at all"), ("other", "")]


def test_limit_lists_what_was_not_run(small_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = small_run(groups=("main",), limit_seconds=-1.0)
    assert result.rows == []
    assert result.not_run == [("main", "small"), ("main", "other")]
    assert "Not run: 2 rows" in capsys.readouterr().out
    assert json.loads((tmp_path / "run.json").read_text())["not_run"][1] == {"group": "main", "case": "other"}


def test_a_lost_device_ends_the_run_and_keeps_the_rows(small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    real = decode.measure_case

    def lost(backend: Any, case: DecodeCase, *rest: Any) -> Any:
        if case.name == "other":
            raise DeviceLost("cuda:0 answers no more")
        return real(backend, case, *rest)

    monkeypatch.setattr(decode, "measure_case", lost)
    result = small_run()
    assert [row.case.name for row in result.rows] == ["small"]
    assert ("main", "other") in result.not_run
    assert result.stopped == "cuda:0 answers no more"


def test_plot_of_a_run_and_of_its_json(small_run: Callable[..., Any], peers_file: Callable[[str], Path], tmp_path: Path):
    pytest.importorskip("matplotlib")
    from hal.bench.plot import draw_file

    small_run(against=peers_file(PEERS), plot_path=tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    draw_file(tmp_path / "run.json", tmp_path / "again.svg")
    assert "read ceiling" in (tmp_path / "again.svg").read_text() or (tmp_path / "again.svg").stat().st_size > 10_000
    with pytest.raises(HalError, match="cannot be written"):
        draw_file(tmp_path / "run.json", tmp_path / "run.wrong")


def test_plot_refuses_other_files(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from hal.bench.plot import draw_file

    other = tmp_path / "other.json"
    other.write_text('{"schema": "else"}')
    with pytest.raises(HalError, match="its schema is 'else'"):
        draw_file(other, tmp_path / "x.png")
    other.write_text("no json")
    with pytest.raises(HalError, match="cannot be read as JSON"):
        draw_file(other, tmp_path / "x.png")


def test_plot_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    from hal.bench import plot

    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(HalError, match=r"hal-kernels\[plots\]"):
        run(Options(plot_path=Path("x.png")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ("mian",)}, "no such group; did you mean 'main'"),
        ({"only": ("no such row",)}, "no case of group main has such a name"),
        ({"against": Path("/nowhere/peers.py")}, "there is no such file"),
        ({"json_path": Path("/nowhere/x.json")}, "folder /nowhere is not there"),
        ({"device": "tpu"}, "accepted are cuda, cuda:N and cpu"),
        ({"device": "cpu", "only": ("no such row",)}, "no CPU case has such a name"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(HalError, match=message):
        run(Options(**options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "hal", "bench", "decode"], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "hal: bench decode: PyTorch sees no CUDA device here; run it on a machine with one, or give --device cpu"


def test_host_rows_and_scratch(monkeypatch: pytest.MonkeyPatch, backend: hal.Backend, peers_file: Callable[[str], Path]):
    monkeypatch.setattr(timer, "_HOST_CALLS", 2)
    monkeypatch.setattr(timer, "_HOST_ROUNDS", 1)
    rows = {row.name: row for row in measure_host(backend, load_peers(peers_file(PEERS)), CPU)}
    assert [name for name, row in rows.items() if row.judged] == [
        "reference: table of 4 columns, no plan",
        "reference: table of 8192 columns, plan given",
    ]
    assert all(row.us and row.us > 0 for row in rows.values() if row.who != "boom")
    assert rows["boom: table of 4 columns, out given"].problem == "RuntimeError: boom"
    scratch = measure_scratch(backend, CPU, calls=3)
    assert scratch is None or scratch.calls == 3
