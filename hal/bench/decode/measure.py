"""Measures one case: our calls with and without a plan, and every peer, on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hal.bench.ceilings import Ceilings
from hal.bench.decode.buffers import Buffers
from hal.bench.decode.cases import DecodeCase
from hal.bench.decode.exact import TOLERANCES, exact_error
from hal.bench.decode.host import scratch_bytes
from hal.bench.decode.peers import Peers
from hal.bench.decode.rows import DecodeRow
from hal.bench.fill import DTYPES, sets_needed
from hal.bench.guard import PEER_TOLERANCE, alive, guarded, made_with_fewer_sets, relative, sentence
from hal.bench.rows import PeerTime
from hal.bench.timer import graph_us, last_index
from hal.errors import ResolutionError

__all__ = ["measure_case"]

#: In the place of PEER_TOLERANCE: peers that compute in fp8 round the weights to 4 bits as well.
_FP8_PEER_TOLERANCE = 5e-2
#: Peers' own buffers of all sets may take that part of the free memory.
_MEMORY_SHARE = 0.7


def measure_case(backend: Any, case: DecodeCase, ceilings: Ceilings, peers: Peers | None, device: torch.device) -> DecodeRow:
    """Measure one case. What fails is noted in the row; only a lost device raises."""
    row = DecodeRow(case, ceilings)
    with guarded(row, device):
        _measure(row, backend, peers, device)
    held = scratch_bytes()
    row.scratch_bytes = None if held is None else sum(held)
    return row


def _measure(row: DecodeRow, backend: Any, peers: Peers | None, device: torch.device) -> None:
    case = row.case
    row.sets = sets_needed(case.kv_bytes, torch.cuda.get_device_properties(device).L2_cache_size)
    buffers = made_with_fewer_sets(row, lambda sets: Buffers.make(case, sets, device))
    first, function = _bind_first(row, peers, buffers)
    plan = _plan(backend, buffers)
    calls = {
        name: _ours(backend, buffers, given) for name, given in (("plan_us", plan), ("no_plan_us", None)) if name == "no_plan_us" or given is not None
    }
    expected: dict[int, Tensor] = {}
    for index in {0, last_index(row.sets)}:
        expected[index] = calls["no_plan_us"](index)().clone()
    row.error = exact_error(buffers, expected[0], 0)
    if not row.error <= TOLERANCES[case.dtype]:
        row.problem = f"our result is wrong: error {row.error:.1e} against float64, {TOLERANCES[case.dtype]:.0e} is accepted"
        return
    for name, call in calls.items():
        us, problem, _ = _timed(call, row.sets, buffers, expected)
        setattr(row, name, us)
        if problem:
            row.problem = f"{name.removesuffix('_us').replace('_', ' ')}: {problem}"
            return
    if peers is not None and function:
        _measure_peers(row, peers, function, first, buffers, expected)


def _ours(backend: Any, buffers: Buffers, plan: Any) -> Callable[[int], Callable[[], Tensor]]:
    """Return a maker of our call on a set."""
    case, flash_decode = buffers.case, backend.flash_decode

    def on(index: int) -> Callable[[], Tensor]:
        k, v = buffers.keys(index), buffers.values(index)
        keywords = {
            "q_len": case.q_len,
            "window": case.window,
            "k_scale": buffers.key_scale(index),
            "v_scale": buffers.value_scale(index),
            "out": buffers.out,
            "plan": plan,
            "batch_invariant": case.batch_invariant,
        }
        return lambda: flash_decode(buffers.q, k, v, buffers.seq_lens, buffers.tables, **keywords)

    return on


def _plan(backend: Any, buffers: Buffers) -> Any:
    """Return a plan of the step, None if no backend makes one."""
    case = buffers.case
    try:
        return backend.plan_decode(
            buffers.seq_lens,
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            page_size=case.page,
            max_seq_len=buffers.max_seq_len,
            q_len=case.q_len,
            window=case.window,
            kv_dtype=DTYPES[case.kv_dtype] if case.kv_dtype else None,
            batch_invariant=case.batch_invariant,
        )
    except ResolutionError:
        return None


def _timed(
    maker: Callable[[int], Callable[[], Any]], sets: int, buffers: Buffers, expected: dict[int, Tensor]
) -> tuple[float | None, str, float | None]:
    """Return (microseconds, problem, error): the replayed graph must have written what is expected of its last call."""
    out = buffers.out
    us, returned = graph_us([maker(index) for index in range(sets)], before_last=lambda _: out.fill_(torch.nan))
    error = relative(_result(returned, out), expected[last_index(sets)])
    if not error <= _peer_tolerance(buffers):
        return None, f"wrong when replayed in a CUDA graph: differs by {error:.1e} of the largest value", error
    return us, "", error


def _peer_tolerance(buffers: Buffers) -> float:
    return _FP8_PEER_TOLERANCE if buffers.case.kv_dtype == "e4m3" else PEER_TOLERANCE


def _result(returned: Any, out: Tensor) -> Tensor:
    """What a call computed, shaped as `out`: what it returned if that is such a tensor, else what it wrote."""
    found = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if isinstance(found, Tensor) and found.numel() == out.numel():
        return found.reshape(out.shape)
    return out


def _bind_first(row: DecodeRow, peers: Peers | None, buffers: Buffers) -> tuple[Mapping[str, Callable[[], Any]], str]:
    """Bind the first function of the peers file that works to set 0; lower the number of sets if the peers' own buffers are large."""
    if peers is None:
        return {}, ""
    for function in row.case.peers:
        if function not in peers.functions:
            row.notes.append(f"{peers.path.name} has no function {function}")
            continue
        before = torch.cuda.memory_allocated()
        try:
            first = peers.bind(function, buffers, 0)
        except Exception as error:
            row.notes.append(f"{function} of {peers.path.name}: {sentence(error)}")
            alive(buffers.q.device, row.notes[-1])
            continue
        each = torch.cuda.memory_allocated() - before
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if each * (row.sets - 1) > _MEMORY_SHARE * free:
            row.sets = 1 + int(_MEMORY_SHARE * free / each)
            row.notes.append(f"{row.sets} caches: the peers need {each >> 20} MiB for each")
        return first, function
    return {}, ""


def _measure_peers(
    row: DecodeRow, peers: Peers, function: str, first: Mapping[str, Callable[[], Any]], buffers: Buffers, expected: dict[int, Tensor]
) -> None:
    try:
        bound = [first, *(peers.bind(function, buffers, index) for index in range(1, row.sets))]
    except Exception as error:
        row.notes.append(f"{function} of {peers.path.name}, {row.sets} caches: {sentence(error)}")
        alive(buffers.q.device, row.notes[-1])
        return
    for name in first:
        try:
            row.peers[name] = _measure_peer([calls[name] for calls in bound], buffers, expected)
        except Exception as error:
            row.peers[name] = PeerTime(None, problem=sentence(error))
            alive(buffers.q.device, f"{name}: {row.peers[name].problem}")


def _measure_peer(calls: list[Callable[[], Any]], buffers: Buffers, expected: dict[int, Tensor]) -> PeerTime:
    buffers.out.fill_(torch.nan)
    error = relative(_result(calls[0](), buffers.out), expected[0])
    if not error <= _peer_tolerance(buffers):
        what = "is not finite" if error == float("inf") else f"differs from ours by {error:.1e} of the largest value"
        return PeerTime(None, error, f"wrong: its result {what}")
    us, problem, error_again = _timed(calls.__getitem__, len(calls), buffers, expected)
    return PeerTime(us, error_again if problem else error, problem)
