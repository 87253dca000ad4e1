"""The CPU comparison, on sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hal
from hal.bench.decode import cpu_step
from hal.bench.decode.cpu_step import CPU_CASES, CpuCase, measure_cpu_step
from hal.bench.decode.run import run
from hal.bench.run import Options
from hal.errors import HalError

TINY = CpuCase(2, 6, 2, 16, 21)


def test_cases_are_those_promised():
    assert {(c.batch, c.context) for c in CPU_CASES} == {(1, 2048), (4, 2048), (16, 2048)}
    assert {(c.heads, c.kv_heads, c.head_dim) for c in CPU_CASES} == {(9, 3, 64), (32, 8, 128)}


def test_both_sides_agree_and_have_times():
    pytest.importorskip("transformers")
    row = measure_cpu_step(hal.get_backend("reference"), TINY, seconds=0)
    assert 0 <= row.worst <= 2e-5
    assert row.rounds == 7
    assert row.ours_us > 0 < row.transformers_us
    assert row.ratio == row.ours_us / row.transformers_us
    assert row.to_dict()["case"] == "6/2 D16 B2 ctx 21"


def test_a_wrong_result_is_an_error():
    pytest.importorskip("transformers")
    real = hal.get_backend("reference")

    def zeros(q: torch.Tensor, *a: object, **k: object) -> torch.Tensor:
        return torch.zeros_like(q)

    wrong = SimpleNamespace(kv_cache_spec=real.kv_cache_spec, write_kv=real.write_kv, flash_decode=zeros)
    with pytest.raises(HalError, match="our attention differs from transformers' by 1.0e"):
        measure_cpu_step(wrong, TINY, seconds=0)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers.cache_utils", None)
    with pytest.raises(HalError, match=r"hal-kernels\[transformers\]"):
        run(Options(device="cpu"))


def test_command_writes_json_and_markdown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    monkeypatch.setattr(cpu_step, "CPU_CASES", (TINY,))
    run(Options(device="cpu", json_path=tmp_path / "cpu.json", markdown_path=tmp_path / "cpu.md"))
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert data["schema"] == cpu_step.SCHEMA
    assert data["rows"][0]["ratio"] > 0
    assert "6/2 D16 B2 ctx 21" in capsys.readouterr().out
    assert "| 6/2 D16 B2 ctx 21 |" in (tmp_path / "cpu.md").read_text()
