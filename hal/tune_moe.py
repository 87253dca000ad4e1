"""`hal tune moe`: measures candidates of `fused_moe` on this machine's GPU and writes the best of each shape to a file."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.errors import HalError
from hal.tuning import ExpertsEntry, Tuner, Tuning

__all__ = ["Timer", "TuneOptions", "tune_moe"]

#: The `Tuner` whose candidates are measured; a name, for it loads Triton.
_TUNER = "hal.backends.triton_tuning"
#: Bytes of weights that the calls of one graph read together, so that none is left in the L2 cache; most sets of them.
_LEAST_BYTES, _MOST_SETS = 400_000_000, 64
#: Largest difference from the config that serves without tuning, relative to the largest magnitude: other roundings.
_SAME = 3e-2

#: Calls on distinct weights -> microseconds of one, and its result (None if nothing was run).
Timer = Callable[[Sequence[Callable[[], Any]]], tuple[float, Tensor | None]]


@dataclass(frozen=True)
class TuneOptions:
    """What to measure.

    Attributes:
        experts: E.
        hidden: H.
        inner: I.
        top_k: k, at most E.
        tokens: numbers of tokens.
        dtype: bfloat16, float16 or float32.
        k_inner: weights are stored (E, N, K); else (E, K, N).
        device: where.
        output: file to write; entries of other shapes that it holds are kept.
        limit_seconds: start no candidate after that many seconds; None for no limit.
    """

    experts: int
    hidden: int
    inner: int
    top_k: int
    tokens: tuple[int, ...]
    dtype: str
    k_inner: bool
    device: str
    output: Path
    limit_seconds: float | None = None


def tune_moe(options: TuneOptions, *, timer: Timer | None = None, say: Callable[[str], None] = print) -> Tuning:
    """Measure, write the file after each number of tokens, and return what it holds.

    Args:
        options: what.
        timer: stands in for CUDA graphs; the device may be the CPU then.
        say: receives a line for each improvement and each candidate that failed.

    Raises:
        HalError: there is no GPU, or the file to extend is of another device.
        ConfigError: the file to extend is wrong.
    """
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise HalError(f"{options.device!r} is no device; write cuda:0, for example") from None
    if not options.output.absolute().parent.is_dir():
        raise HalError(f"{options.output} cannot be written: there is no folder {options.output.absolute().parent}; make it first")
    if timer is None and (device.type != "cuda" or not torch.cuda.is_available()):
        raise HalError(f"hal tune measures on a GPU, and {options.device!r} is none here; run it where fused_moe will run")
    tuner: Tuner = importlib.import_module(_TUNER)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kept = _kept(options.output, name)
    began = time.monotonic()
    for tokens in options.tokens:
        problem = _Problem(options, tuner, device, tokens)
        entry = problem.best(timer or _graph_timer, say, lambda: _over(began, options.limit_seconds))
        if entry is None:
            say(f"T {tokens}: the time is over; {options.output} has what was measured before")
            break
        kept = [e for e in kept if _key(e) != _key(entry)] + [entry]
        _write(Tuning(name, tuple(kept)), options.output)
    return Tuning(name, tuple(kept), str(options.output))


def _graph_timer(calls: Sequence[Callable[[], Any]]) -> tuple[float, Tensor | None]:
    from hal.bench.timer import graph_us

    return graph_us(calls)


def _over(began: float, limit: float | None) -> bool:
    return limit is not None and time.monotonic() - began > limit


def _key(entry: ExpertsEntry) -> tuple[Any, ...]:
    return entry.experts, entry.hidden, entry.inner, entry.top_k, entry.tokens, entry.dtype, entry.k_inner


def _kept(output: Path, device: str) -> list[ExpertsEntry]:
    if not output.exists():
        return []
    from hal.tuning_file import read_tuning

    found = read_tuning(output)
    if found.device != device:
        raise HalError(f"{output} holds measurements of {found.device!r}, and this is {device!r}; give another --output")
    return list(found.fused_moe)


def _write(tuning: Tuning, output: Path) -> None:
    from hal.tuning_file import write_tuning

    try:
        write_tuning(tuning, output)
    except OSError as error:
        raise HalError(f"{output} cannot be written: {error.strerror or error}") from error


class _Problem:
    """One number of tokens."""

    def __init__(self, options: TuneOptions, tuner: Tuner, device: torch.device, tokens: int) -> None:
        self.options, self.tuner, self.device, self.tokens = options, tuner, device, tokens
        self.experts = tuner.Experts(
            options.experts, options.hidden, options.inner, options.top_k, getattr(torch, options.dtype).itemsize, options.k_inner
        )

    def best(self, timer: Timer, say: Callable[[str], None], over: Callable[[], bool]) -> ExpertsEntry | None:
        """The best candidate, at least as good as what serves without tuning; None if the time was over before anything was measured."""
        if over():
            return None
        calls = self._calls()
        chosen = self.tuner.served(self.device, self.experts, self.tokens)
        least, wanted = self._timed(timer, calls, chosen)
        say(f"T {self.tokens}: {least:.1f} us as it is")
        of_kind, leader, kind = float("inf"), [chosen], None
        for config in self.tuner.candidates(self.device, self.experts, self.tokens, lambda: leader[0]):
            if over():
                break
            if (type(config), getattr(config, "block_m", None)) != kind:
                of_kind, leader[0], kind = float("inf"), config, (type(config), getattr(config, "block_m", None))
            try:
                spent, result = self._timed(timer, calls, config)
            except Exception as error:  # a tile too large for this device, in the words of its compiler
                say(f"T {self.tokens}: {config} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                continue
            if not _close(result, wanted):
                say(f"T {self.tokens}: {config} gives another result; left out")
                continue
            if spent < of_kind:
                of_kind, leader[0] = spent, config
            if spent < least:
                least, chosen = spent, config
                say(f"T {self.tokens}: {spent:.1f} us {config}")
        return self.tuner.entry_of(self.experts, self.options.dtype, self.tokens, chosen, least)

    def _timed(self, timer: Timer, calls: Sequence[Callable[[], Any]], config: Any) -> tuple[float, Tensor | None]:
        with self.tuner.fixed(self.device, self.experts, self.tokens, config):
            spent, result = timer(calls)
        return spent, None if result is None else result.float()

    def _calls(self) -> list[Callable[[], Any]]:
        """Calls on distinct weights, with distinct random choices for each token."""
        o, dtype = self.options, getattr(torch, self.options.dtype)
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=dtype) * 0.1

        share = 1 - (1 - o.top_k / o.experts) ** self.tokens
        touched = share * o.experts * 3 * o.hidden * o.inner * dtype.itemsize
        sets = min(_MOST_SETS, max(1, -(-_LEAST_BYTES // max(1, int(touched))))) if self.device.type == "cuda" else 1
        x, out = random(self.tokens, o.hidden), random(self.tokens, o.hidden)
        ids = torch.rand(self.tokens, o.experts, generator=generator, device=self.device).topk(o.top_k, 1).indices.to(torch.int32)
        weights = torch.full(ids.shape, 1 / o.top_k, dtype=torch.float32, device=self.device)
        calls: list[Callable[[], Any]] = []
        for _ in range(sets):
            up, down = random(o.experts, 2 * o.inner, o.hidden), random(o.experts, o.hidden, o.inner)
            if not o.k_inner:
                up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (up, down))
            calls.append(lambda up=up, down=down: self.tuner.layer(x, up, down, weights, ids, out))  # type: ignore[misc]
        return calls


def _close(result: Tensor | None, wanted: Tensor | None) -> bool:
    if result is None or wanted is None:
        return True
    return bool((result - wanted).abs().max() <= _SAME * wanted.abs().max())
