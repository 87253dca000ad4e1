"""Measured rows and what follows from them. Whatever was not measured is None, with the reason beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hal.bench.cases import Case
from hal.bench.ceilings import Ceilings

__all__ = ["PeerTime", "Row", "finite"]


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class PeerTime:
    """Time of a peer; `us` is None if it failed or was wrong, and `problem` then says why. `error` is its distance from our result."""

    us: float | None
    error: float | None = None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"us": self.us, "error": finite(self.error), "problem": self.problem}


@dataclass
class Row(Generic[C]):
    """What one case took.

    Attributes:
        case: the case.
        ceilings: of the device, from the same run.
        sets: distinct inputs in the graph.
        error: largest error of our result against the exact one, relative.
        peers: by name.
        notes: what of the peers could not be used, and why.
        problem: why our side has no time; empty if it has.
        skipped: why it was not tried; empty if it was.
        seconds: that measuring took.
    """

    case: C
    ceilings: Ceilings
    sets: int = 0
    error: float | None = None
    peers: dict[str, PeerTime] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    skipped: str = ""
    seconds: float = 0.0

    @property
    def us(self) -> float | None:
        """Our time."""
        raise NotImplementedError

    @property
    def floor_us(self) -> float:
        """What the ceilings allow."""
        raise NotImplementedError

    @property
    def has_rivals(self) -> bool:
        """Whether peers could be compared with."""
        raise NotImplementedError

    @property
    def of_floor(self) -> float | None:
        """Fraction of what the ceilings allow."""
        return None if self.us is None else self.floor_us / self.us

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """The fastest peer that was right, and its time; None without one."""
        right = {name: peer.us for name, peer in self.peers.items() if peer.us is not None}
        return min(right.items(), key=lambda item: item[1]) if right else None

    @property
    def ratio(self) -> float | None:
        """Our time over that of the best peer; None without a peer: nothing is beaten that did not run."""
        return None if self.us is None or self.best_peer is None else self.us / self.best_peer[1]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        best = self.best_peer
        return {
            "group": self.case.group,
            "case": self.case.name,
            "sets": self.sets,
            "us": self.us,
            "floor_us": self.floor_us,
            "of_floor": self.of_floor,
            "error_vs_float64": finite(self.error),
            "peers": {name: peer.to_dict() for name, peer in self.peers.items()},
            "best_peer": None if best is None else best[0],
            "ratio": self.ratio,
            "notes": self.notes,
            "problem": self.problem,
            "skipped": self.skipped,
            "seconds": self.seconds,
        }


def finite(value: float | None) -> float | None:
    """JSON has no infinity; a result that is not finite says so in its problem."""
    return None if value is None or value in (float("inf"), float("-inf")) or value != value else value
