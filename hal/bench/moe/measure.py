"""Measures one case: our call and every peer on the same data, each held to the exact result before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal.bench.ceilings import Ceilings
from hal.bench.fill import sets_needed
from hal.bench.guard import PEER_TOLERANCE, alive, guarded, made_with_fewer_sets, sentence
from hal.bench.moe.cases import ExpertsCase, MoeCase, RoutingCase
from hal.bench.moe.experts import ExpertsWork
from hal.bench.moe.peers import MoePeers
from hal.bench.moe.routing import RoutingWork
from hal.bench.moe.rows import MoeRow
from hal.bench.moe.work import Call, Maker, Work, spoil
from hal.bench.rows import PeerTime
from hal.bench.timer import device_us, kept, last_index
from hal.registry import REFERENCE
from hal.report import Report

__all__ = ["measure_case", "peak_bytes"]

_WORK: dict[type, Callable[[Any, int, torch.device], Work]] = {ExpertsCase: ExpertsWork.make, RoutingCase: RoutingWork.make}


def measure_case(backend: Any, case: MoeCase, ceilings: Ceilings, peers: MoePeers | None, device: torch.device) -> MoeRow:
    """Measure one case. What fails is noted in the row; only a lost device raises."""
    row = MoeRow(case, ceilings)
    with guarded(row, device):
        _measure(row, backend, peers, device)
    return row


def _measure(row: MoeRow, backend: Any, peers: MoePeers | None, device: torch.device) -> None:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    row.sets = sets_needed(row.case.bytes_expected, l2_bytes) if device.type == "cuda" else 2
    work = made_with_fewer_sets(row, lambda sets: _WORK[type(row.case)](row.case, sets, device))
    row.bytes_read, row.touched = work.bytes_read, work.touched
    positional, keywords = work.arguments(0)
    report = backend.explain(work.op, *positional, **keywords)
    row.served_by = report.chosen or "nobody"
    row.skipped = _refusal(report) if row.case.group == "quant" else ""
    if row.skipped:
        return
    maker = _ours(backend, work)
    expected = {index: kept(maker(index)()) for index in (0, last_index(work.sets))}
    row.error = work.exact_error(expected[0], 0)
    if not row.error <= work.tolerance:
        row.problem = f"our result is wrong: error {row.error:.1e} against float64, {work.tolerance:.0e} is accepted"
        return
    row.scratch_bytes = peak_bytes(maker(0), device)
    last = expected[last_index(work.sets)]
    us, returned = device_us(device)([maker(index) for index in range(work.sets)], before_last=spoil)
    difference = work.difference(returned, last)
    if not difference <= work.tolerance:
        row.problem = f"wrong when it was repeated: differs by {difference:.1e} of the largest value"
        return
    row.ours_us, row.same_bits = us, _same(returned, last)
    if not row.same_bits:
        row.notes.append("our result has other bits in the graph than eagerly")
    _measure_peers(row, work, peers, expected, device)


def _refusal(report: Report) -> str:
    """Why nobody serves the call, or only the reference stands in; empty if it is served as was asked."""
    if report.chosen is not None and not (report.chosen == REFERENCE and report.fell_back):
        return ""
    reasons = [f"{c.backend}: {'; '.join(map(str, c.reasons))}" for c in report.candidates if c.listed and c.reasons]
    return " | ".join(reasons)


def _ours(backend: Any, work: Work) -> Maker:
    def on(index: int) -> Call:
        positional, keywords = work.arguments(index)
        return partial(getattr(backend, work.op), *positional, **keywords)

    return on


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Most bytes that one captured call allocates at a time: its work memory, for it keeps none beyond a capture. None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before


def _same(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else ((found, expected),)
    return all(torch.equal(a, b) for a, b in pairs)


def _measure_peers(row: MoeRow, work: Work, peers: MoePeers | None, expected: dict[int, Any], device: torch.device) -> None:
    makers: dict[str, Maker] = {}
    if peers is not None:
        try:
            makers |= work.peers_of(peers)
        except Exception as error:
            row.notes.append(f"{peers.path.name}: {sentence(error)}")
            alive(device, row.notes[-1])
    row.against = tuple(makers)
    for name, maker in (makers | dict(work.peers_of_torch())).items():
        try:
            row.peers[name] = _measure_peer(maker, work, expected, device)
        except Exception as error:
            row.peers[name] = PeerTime(None, problem=sentence(error))
            alive(device, f"{name}: {row.peers[name].problem}")


def _measure_peer(maker: Maker, work: Work, expected: dict[int, Any], device: torch.device) -> PeerTime:
    last = last_index(work.sets)
    error = work.difference(_tensors(maker(last)()), expected[last])
    if not error <= PEER_TOLERANCE:
        what = "is not finite" if error == float("inf") else f"differs from ours by {error:.1e} of the largest value"
        return PeerTime(None, error, f"wrong: its result {what}")
    us, returned = device_us(device)([maker(index) for index in range(work.sets)], before_last=spoil)
    again = work.difference(_tensors(returned), expected[last])
    if not again <= PEER_TOLERANCE:
        return PeerTime(None, again, f"wrong when it was repeated: differs by {again:.1e} of the largest value")
    return PeerTime(us, error)


def _tensors(result: Any) -> Any:
    """A peer's result; TypeError unless it is a tensor or some."""
    found = tuple(result) if isinstance(result, (tuple, list)) else result
    if not all(isinstance(part, Tensor) for part in (found if isinstance(found, tuple) else (found,))):
        raise TypeError(f"the result is {type(result).__name__}, not a tensor")
    return found
