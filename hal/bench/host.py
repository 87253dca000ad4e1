"""What one eager call costs the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hal.bench.guard import sentence
from hal.bench.timer import host_us

__all__ = ["HostRow", "host_row", "wait"]


@dataclass(frozen=True)
class HostRow:
    """Median host microseconds of one eager call; `us` is None if it failed, and `problem` says why. `judged` rows have a limit."""

    who: str
    what: str
    us: float | None
    judged: bool = False
    problem: str = ""

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.who}: {self.what}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def host_row(who: str, what: str, make: Callable[[], Callable[[], Any]], device: torch.device, *, judged: bool = False) -> HostRow:
    """Time the call that `make` returns."""
    try:
        with torch.no_grad():
            return HostRow(who, what, host_us(make(), lambda: wait(device)), judged)
    except Exception as error:
        return HostRow(who, what, None, judged, sentence(error))


def wait(device: torch.device) -> None:
    """Wait for the device; a CPU never lags behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
