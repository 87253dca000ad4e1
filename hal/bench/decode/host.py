"""What one eager decode step costs the host, and what many leave allocated."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hal.bench.decode.buffers import Buffers
from hal.bench.decode.cases import DecodeCase
from hal.bench.decode.peers import Peers
from hal.bench.guard import sentence
from hal.bench.host import HostRow, host_row, wait

__all__ = ["Scratch", "measure_host", "measure_scratch", "scratch_bytes"]

#: Keys of the one sequence, and table columns of 16 slots each.
_KEYS, _NARROW, _WIDE = 64, 4, 8192
_CALLS, _BATCHES, _ROWS_OF_TILE = 10_000, (1, 2, 3, 5, 8), 16
_CASE = DecodeCase("host", "B1, 64 keys", (_KEYS,), 32, 8, 128)


@dataclass(frozen=True)
class Scratch:
    """Work memory of the kernels, in bytes: before and after many calls, and the largest buffer."""

    calls: int
    before: int
    after: int
    largest: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def measure_host(backend: Any, peers: Peers | None, device: torch.device) -> Iterator[HostRow]:
    """Measure eager calls through the backend, then those of the peers (whose plans and outputs are made before)."""
    b = Buffers.make(_CASE, 1, device)
    wide = torch.zeros(1, _WIDE, dtype=torch.int32, device=device)
    wide[:, : b.tables.shape[1]] = b.tables
    k, v, ours = b.keys(0), b.values(0), backend.name

    def call(tables: Tensor, **keywords: Any) -> Callable[[], Any]:
        return lambda: backend.flash_decode(b.q, k, v, b.seq_lens, tables, **keywords)

    def planned() -> Callable[[], Any]:
        facts = {"num_heads": _CASE.heads, "num_kv_heads": _CASE.kv_heads, "head_dim": _CASE.head_dim, "page_size": _CASE.page}
        return call(wide, plan=backend.plan_decode(b.seq_lens, max_seq_len=_WIDE * _CASE.page, **facts))

    rows: tuple[tuple[str, bool, Callable[[], Callable[[], Any]]], ...] = (
        (f"table of {_NARROW} columns, no plan", True, lambda: call(b.tables)),
        (f"table of {_WIDE} columns, plan given", True, planned),
        (f"table of {_WIDE} columns, no plan", False, lambda: call(wide)),
        (f"table of {_NARROW} columns, no plan, out given", False, lambda: call(b.tables, out=b.out)),
    )
    for what, judged, make in rows:
        yield host_row(ours, what, make, device, judged=judged)
    if peers is None or "decode" not in peers.functions:
        return
    try:
        bound = peers.bind("decode", b, 0)
    except Exception as error:
        yield HostRow(peers.path.name, "decode", None, problem=sentence(error))
        return
    for name, function in bound.items():
        yield host_row(name, f"table of {_NARROW} columns, out given", partial(_given, function), device)


def _given(function: Callable[[], Any]) -> Callable[[], Any]:
    return function


def measure_scratch(backend: Any, device: torch.device, calls: int = _CALLS) -> Scratch | None:
    """Call with changing batches and lengths, largest first, and look at the work memory; None if the backend tells of none."""
    if scratch_bytes() is None:
        return None
    longest = 4096
    case = DecodeCase("host", "scratch", (longest,) * max(_BATCHES), 32, 8, 128)
    b = Buffers.make(case, 1, device)
    k, v = b.keys(0), b.values(0)
    lens = [torch.randint(1, longest + 1, (n,), dtype=torch.int32, device=device) for n in _BATCHES]

    def call(n: int, given: Tensor) -> None:
        backend.flash_decode(b.q[:n], k, v, given, b.tables[:n], out=b.out[:n])

    with torch.no_grad():
        call(max(_BATCHES), b.seq_lens)
        before = sum(scratch_bytes() or ())
        for index in range(calls):
            turn = index % len(_BATCHES)
            call(_BATCHES[turn], lens[turn])
        wait(device)
    after = scratch_bytes() or [0]
    return Scratch(calls, before, sum(after), max(after, default=0))


def scratch_bytes() -> list[int] | None:
    """Bytes of each work buffer that the Triton kernels keep; None without Triton or without such a list."""
    if find_spec("triton") is None:
        return None
    try:
        module = importlib.import_module("hal.kernels.scratch")
        return [buffer.nbytes for buffer in module.buffers()]
    except (ImportError, AttributeError):
        return None
