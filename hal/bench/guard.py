"""Measuring one row so that whatever fails costs that row alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from hal.bench.rows import Row
from hal.errors import HalError

__all__ = ["PEER_TOLERANCE", "DeviceLost", "alive", "guarded", "made_with_fewer_sets", "relative", "sentence"]

#: A peer's result may differ from ours by that much of the largest value; each rounds in its own order.
PEER_TOLERANCE = 2e-2

R = TypeVar("R", bound=Row[Any])
M = TypeVar("M")


class DeviceLost(HalError):
    """The device answers no more; nothing else can be measured in this process."""


@contextmanager
def guarded(row: Row[Any], device: torch.device) -> Iterator[None]:
    """Note in the row what fails inside, and how long it took; give the memory back. Only a lost device raises."""
    start = time.perf_counter()
    try:
        with torch.no_grad():
            yield
    except Exception as error:
        row.problem = sentence(error)
        alive(device, row.problem)
    gc.collect()  # peers may hold their buffers in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    row.seconds = time.perf_counter() - start


def made_with_fewer_sets(row: Row[Any], make: Callable[[int], M]) -> M:
    """Return `make(row.sets)`, with fewer and fewer sets while the memory does not suffice."""
    while True:
        try:
            return make(row.sets)
        except torch.cuda.OutOfMemoryError:
            if row.sets == 1:
                raise
            torch.cuda.empty_cache()
            row.sets //= 2


def sentence(error: Exception) -> str:
    """Say in one line what an exception says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def alive(device: torch.device, problem: str) -> None:
    """Raise DeviceLost if an error left the device unusable."""
    try:
        torch.cuda.synchronize(device) if device.type == "cuda" else None
        torch.zeros(1, device=device).add_(1).item()
    except Exception as error:
        raise DeviceLost(f"{device} answers no more after: {problem}") from error


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected magnitude; infinite if a value is not finite."""
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(error.nan_to_num(nan=torch.inf)) if torch.isfinite(found).all() else float("inf")
