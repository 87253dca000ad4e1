"""The report of one decision: what runs, every rejected candidate with its reasons, and who decided."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.config import Choice
from hal.device import DeviceInfo
from hal.reasons import Reason
from hal.version import API_VERSION, CONTRACT_VERSION, __version__

__all__ = ["Candidate", "Report"]


@dataclass(frozen=True)
class Candidate:
    """One backend's answer.

    Attributes:
        backend: its name.
        reasons: why it does not serve; empty if it can.
        listed: it is in the chain; the others are shown for completeness.
        gated: its answer also depends on the call.
        target: what would be called.
        host_sync: it waits for the device, so it cannot be captured in a CUDA graph.
        packages: versions of the libraries that it needs.
    """

    backend: str
    reasons: tuple[Reason, ...]
    listed: bool = True
    gated: bool = False
    target: str = ""
    host_sync: bool = False
    packages: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """Who serves an op on a device, and why. `call` is None for a report made without call arguments."""

    op: str
    device: DeviceInfo
    chosen: str | None
    candidates: tuple[Candidate, ...]
    choice: Choice
    fallback: str
    call: Any = field(default=None, compare=False)

    @property
    def winner(self) -> Candidate | None:
        """The chosen candidate."""
        return next((c for c in self.candidates if c.backend == self.chosen), None)

    @property
    def fell_back(self) -> bool:
        """A backend earlier in the chain was rejected."""
        return self.chosen is not None and self.choice.backends[0] != self.chosen

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as plain data, versions included, for bug reports."""
        return {
            "op": self.op,
            "device": self.device.to_dict(),
            "chosen": self.chosen,
            "explicit": self.choice.explicit,
            "decided_by": {"kind": self.choice.source.kind, "where": self.choice.source.where, "reason": self.choice.reason},
            "chain": list(self.choice.backends),
            "fallback": self.fallback,
            "candidates": [
                {
                    "backend": c.backend,
                    "chosen": c.backend == self.chosen,
                    "listed": c.listed,
                    "gated": c.gated,
                    "target": c.target,
                    "host_sync": c.host_sync,
                    "packages": dict(c.packages),
                    "reasons": [r.to_dict() for r in c.reasons],
                }
                for c in self.candidates
            ],
            "call": None if self.call is None else {k: _plain(v) for k, v in vars(self.call).items()},
            "versions": {
                "hal": __version__,
                "api": API_VERSION,
                "contract": CONTRACT_VERSION,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        }

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}: {self.chosen or 'nothing can serve it'}", f"  decided by {self.choice.source}"]
        if self.choice.reason:
            lines.append(f"  because {self.choice.reason}")
        for c in (c for c in self.candidates if c.listed):
            mark = "runs" if c.backend == self.chosen else "available" if not c.reasons else "rejected"
            notes = [word for word, on in (("depends on the call", c.gated and self.call is None), ("waits for the device", c.host_sync)) if on]
            lines.append(f"  {c.backend}: {mark}" + (f" ({', '.join(notes)})" if notes else ""))
            lines += [f"    {reason}" for reason in c.reasons]
        others = [c.backend for c in self.candidates if not c.listed]
        if others:
            lines.append(f"  not asked for: {', '.join(others)}")
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(str(v) for v in value)
    return str(value)
