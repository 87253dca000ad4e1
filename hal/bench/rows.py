"""Measured rows and what follows from them. Whatever was not measured is None, with the reason beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hal.bench.cases import DecodeCase
from hal.bench.ceilings import Ceilings

__all__ = ["PeerTime", "Row"]


@dataclass(frozen=True)
class PeerTime:
    """Time of a peer; `us` is None if it failed or was wrong, and `problem` then says why. `error` is its distance from our result."""

    us: float | None
    error: float | None = None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"us": self.us, "error": _finite(self.error), "problem": self.problem}


@dataclass
class Row:
    """What one case took.

    Attributes:
        case: the case.
        ceilings: of the device, from the same run.
        sets: distinct caches in the graph.
        plan_us: microseconds of a call with a plan that was made before; None if the backend has none or it failed.
        no_plan_us: the same without.
        error: largest error of our result against float64, relative.
        peers: by name.
        notes: functions of the peers file that could not be used, and why.
        problem: why our side has no time; empty if it has.
        seconds: that measuring took.
        scratch_bytes: work memory that the kernels hold after this row and all before it; None if they do not tell.
    """

    case: DecodeCase
    ceilings: Ceilings
    sets: int = 0
    plan_us: float | None = None
    no_plan_us: float | None = None
    error: float | None = None
    peers: dict[str, PeerTime] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0
    scratch_bytes: int | None = None

    @property
    def us(self) -> float | None:
        """Our time: with a plan, as a model's layers call it, if there is one."""
        if self.problem:
            return None
        return self.no_plan_us if self.plan_us is None else self.plan_us

    @property
    def floor_us(self) -> float:
        """What the ceilings allow."""
        return self.ceilings.floor_us(self.case.kv_bytes, self.case.flops)

    @property
    def gbps(self) -> float | None:
        """Keys and values read, in 10^9 bytes a second."""
        return rate(self.case, self.us)

    @property
    def of_read(self) -> float | None:
        """Fraction of the read ceiling."""
        return None if self.gbps is None else self.gbps / self.ceilings.read_gbps

    @property
    def of_floor(self) -> float | None:
        """Fraction of what both ceilings allow."""
        return None if self.us is None else self.floor_us / self.us

    @property
    def ns_per_kb(self) -> float | None:
        """Nanoseconds per 1000 bytes of keys and values."""
        return None if self.us is None or not self.case.kv_bytes else self.us * 1e6 / self.case.kv_bytes

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
            **_shape(self.case),
            "sets": self.sets,
            "plan_us": self.plan_us,
            "no_plan_us": self.no_plan_us,
            "us": self.us,
            "floor_us": self.floor_us,
            "gbps": self.gbps,
            "of_read_ceiling": self.of_read,
            "of_floor": self.of_floor,
            "error_vs_float64": _finite(self.error),
            "peers": {name: peer.to_dict() for name, peer in self.peers.items()},
            "best_peer": None if best is None else best[0],
            "ratio": self.ratio,
            "notes": self.notes,
            "problem": self.problem,
            "seconds": self.seconds,
            "scratch_bytes": self.scratch_bytes,
        }


def rate(case: DecodeCase, us: float | None) -> float | None:
    """Keys and values of a case over a time, in 10^9 bytes a second."""
    return None if us is None else case.kv_bytes / us / 1e3


def _shape(case: DecodeCase) -> dict[str, Any]:
    return {
        "group": case.group,
        "case": case.name,
        "batch": case.batch,
        "keys": sum(case.lengths),
        "longest": max(case.lengths, default=0),
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "page": case.page,
        "q_len": case.q_len,
        "dtype": case.dtype,
        "kv_dtype": case.stored,
        "window": case.window,
        "batch_invariant": case.batch_invariant,
        "kv_bytes": case.kv_bytes,
        "flops": case.flops,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; a result that is not finite says so in its problem."""
    return None if value is None or value in (float("inf"), float("-inf")) or value != value else value
