"""How calls are timed: by replaying a CUDA graph, by the host's clock while the device lags behind, or on a CPU by the clock alone."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["clock_us", "device_us", "graph_us", "host_us", "kept", "last_index", "method"]

#: Replays that count; replays and seconds before them (clocks fall while the host compiles); fewest calls in a graph (so that its own launch
#: does not show).
_REPLAYS, _WARM_UP, _WARM_UP_SECONDS, _LEAST_CALLS = 7, 2, 0.02, 8
_HOST_CALLS, _HOST_ROUNDS = 300, 9

Call = Callable[[], Any]
#: Gets what the last call returned.
Spoil = Callable[[Any], Any]


def method(rotated: str, data: str) -> str:
    """How times were taken, in words: what the calls rotate over, and what the data are."""
    return (
        f"GPU microseconds per call: the calls are captured in one CUDA graph that rotates over distinct {rotated}, together several times the "
        f"L2 cache; median of {_REPLAYS} replays after {_WARM_UP} or more of warm-up; {data}. Host microseconds per eager call: {_HOST_CALLS} calls "
        f"queued without waiting, median of {_HOST_ROUNDS} rounds. On a CPU: microseconds per call, median of {_REPLAYS} rounds after {_WARM_UP}."
    )


def graph_us(calls: Sequence[Call], before_last: Spoil | None = None) -> tuple[float, Any]:
    """Time calls inside one CUDA graph.

    Args:
        calls: the same work on distinct buffers; repeated until there are at least 8.
        before_last: run before one more replay that is not timed, with what the last call returned: it may spoil outputs, so
            that the caller sees that the graph really writes them.

    Returns:
        Median microseconds of a call, and what the last call returned when captured (its tensors hold the last result).
    """
    for call in calls:
        call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    count = max(len(calls), _LEAST_CALLS)
    graph, last = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            last = call()
    times, began = [], time.perf_counter()
    replays = 0
    while replays < _WARM_UP or time.perf_counter() - began < _WARM_UP_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
        replays += 1
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    if before_last is not None:
        before_last(last)
        graph.replay()
        torch.cuda.synchronize()
        last = kept(last)
    return statistics.median(times), last


def clock_us(calls: Sequence[Call], before_last: Spoil | None = None) -> tuple[float, Any]:
    """Time calls on a CPU; arguments and results as of `graph_us`."""
    count, times, last = max(len(calls), _LEAST_CALLS), [], None
    for _ in range(_WARM_UP + _REPLAYS):
        start = time.perf_counter()
        for call in itertools.islice(itertools.cycle(calls), count):
            last = call()
        times.append((time.perf_counter() - start) / count * 1e6)
    if before_last is not None:
        before_last(last)
        last = calls[last_index(len(calls))]()
    return statistics.median(times[_WARM_UP:]), last


def device_us(device: torch.device) -> Callable[..., tuple[float, Any]]:
    """Return what times calls on a device: `graph_us` or `clock_us`."""
    return graph_us if device.type == "cuda" else clock_us


def last_index(sets: int) -> int:
    """Which of `sets` calls was captured last by `graph_us`."""
    return (max(sets, _LEAST_CALLS) - 1) % sets


def kept(returned: Any) -> Any:
    """Copy tensors out of the graph's memory, which goes with the graph."""
    if isinstance(returned, torch.Tensor):
        return returned.clone()
    return tuple(kept(item) for item in returned) if isinstance(returned, (tuple, list)) else returned


def host_us(call: Call, synchronize: Callable[[], None]) -> float:
    """Median host microseconds of one call, 300 of them queued at a time; the device is waited for between rounds."""
    times = []
    for _ in range(_HOST_ROUNDS + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        times.append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
    synchronize()
    return statistics.median(times[1:])
