"""Fixtures of the benchmark's tests: a GPU made of the CPU, without graphs, and rows with made-up times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hal.bench.ceilings import Ceilings
from hal.bench.decode import host, measure, run
from hal.bench.decode.cases import DecodeCase
from hal.bench.decode.rows import DecodeRow
from hal.bench.host import HostRow
from hal.bench.rows import PeerTime
from hal.bench.timer import last_index

CEILINGS = Ceilings(4000.0, "made up", {"made up": 4000.0}, 800.0)


@pytest.fixture
def make_row() -> Callable[..., DecodeRow]:
    """Return a row of a case with a time of ours and of peers; a peer's time None means that it failed."""

    def make(us: float | None, *, gbps: float | None = None, peers: dict[str, float | None] | None = None, **fields: Any) -> DecodeRow:
        shape: dict[str, Any] = {"group": "main", "name": "row", "lengths": (1024,), "heads": 32, "kv_heads": 8, "head_dim": 128}
        case = DecodeCase(**(shape | fields))
        us = case.kv_bytes / gbps / 1e3 if gbps else us
        timed = {name: PeerTime(time, problem="" if time else "RuntimeError: no") for name, time in (peers or {}).items()}
        return DecodeRow(case, CEILINGS, plan_us=us, no_plan_us=us, peers=timed, problem="" if us else "failed")

    return make


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the measuring code run on CPU tensors: calls are made one by one, and each takes 1, 2, 3, ... microseconds."""
    facts = SimpleNamespace(name="Test GPU", L2_cache_size=1, multi_processor_count=2, total_memory=1 << 30)
    ticks = itertools.count(1)

    def graph_us(calls: Sequence[Callable[[], Any]], before_last: Callable[[Any], Any] | None = None) -> tuple[float, Any]:
        for call in calls:
            last = call()
        if before_last is not None:
            before_last(last)
        return float(next(ticks)), calls[last_index(len(calls))]()

    for name, fake in {
        "get_device_properties": lambda device: facts,
        "mem_get_info": lambda *a: (1 << 40, 1 << 40),
        "memory_allocated": lambda *a: 0,
        "memory_reserved": lambda *a: 0,
        "synchronize": lambda *a: None,
        "empty_cache": lambda: None,
        "device": lambda device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(measure, "graph_us", graph_us)
    monkeypatch.setattr(measure, "sets_needed", lambda size, l2: 2)
    monkeypatch.setattr(run, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(run, "cuda_device", lambda text, command: torch.device("cpu"))
    monkeypatch.setattr(run, "measure_scratch", lambda backend, device: host.Scratch(10, 64, 64, 64))
    monkeypatch.setattr(run, "measure_host", lambda *a: [HostRow("hal", "table of 4 columns", 12.0, True)])
