"""A measured decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hal.bench.decode.cases import DecodeCase
from hal.bench.rows import Row

__all__ = ["DecodeRow"]


@dataclass
class DecodeRow(Row[DecodeCase]):
    """What one case took.

    Attributes:
        plan_us: microseconds of a call with a plan that was made before; None if the backend has none or it failed.
        no_plan_us: the same without.
        scratch_bytes: work memory that the kernels hold after this row and all before it; None if they do not tell.
    """

    plan_us: float | None = None
    no_plan_us: float | None = None
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
    def has_rivals(self) -> bool:
        """Whether a peers file may have a function for it."""
        return bool(self.case.peers)

    @property
    def gbps(self) -> float | None:
        """Keys and values read, in 10^9 bytes a second."""
        return None if self.us is None else self.case.kv_bytes / self.us / 1e3

    @property
    def of_read(self) -> float | None:
        """Fraction of the read ceiling."""
        return None if self.gbps is None else self.gbps / self.ceilings.read_gbps

    @property
    def ns_per_kb(self) -> float | None:
        """Nanoseconds per 1000 bytes of keys and values."""
        return None if self.us is None or not self.case.kv_bytes else self.us * 1e6 / self.case.kv_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **super().to_dict(),
            **_shape(self.case),
            "plan_us": self.plan_us,
            "no_plan_us": self.no_plan_us,
            "gbps": self.gbps,
            "of_read_ceiling": self.of_read,
            "scratch_bytes": self.scratch_bytes,
        }


def _shape(case: DecodeCase) -> dict[str, Any]:
    return {
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
