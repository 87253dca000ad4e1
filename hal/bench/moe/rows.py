"""A measured call of `fused_moe` or `topk_softmax`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hal.bench.moe.cases import ExpertsCase, MoeCase
from hal.bench.rows import Row

__all__ = ["MoeRow"]


@dataclass
class MoeRow(Row[MoeCase]):
    """What one case took.

    Attributes:
        ours_us: microseconds of our call; None if it failed.
        bytes_read: that the call has to read, on average over the sets: weights of the experts touched by the actual ids.
        touched: experts touched, on average over the sets; None where there are none.
        scratch_bytes: most memory that our call has allocated at a time, its result apart; None on a CPU.
        same_bits: the replayed graph gave the same bits as an eager call.
        served_by: backend that computed our side.
        against: names of those peers that come from the peers file.
    """

    ours_us: float | None = None
    bytes_read: float = 0.0
    touched: float | None = None
    scratch_bytes: int | None = None
    same_bits: bool | None = None
    served_by: str = ""
    against: tuple[str, ...] = ()

    @property
    def us(self) -> float | None:
        """Our time."""
        return None if self.problem else self.ours_us

    @property
    def experts_case(self) -> ExpertsCase | None:
        """The case, if it is one of the expert layer."""
        return self.case if isinstance(self.case, ExpertsCase) else None

    @property
    def flops(self) -> int:
        """Operations of the products; those of routing do not count."""
        return self.experts_case.flops if self.experts_case else 0

    @property
    def memory_us(self) -> float:
        """What the read ceiling allows."""
        return self.ceilings.read_us(self.bytes_read)

    @property
    def compute_us(self) -> float:
        """What the rate of matrix products of the weights' dtype allows."""
        return self.ceilings.compute_us(self.flops, self.experts_case.quantised if self.experts_case else "")

    @property
    def floor_us(self) -> float:
        """What the ceilings allow."""
        return max(self.memory_us, self.compute_us)

    @property
    def has_rivals(self) -> bool:
        """Whether there is a peer at all."""
        return bool(self.peers)

    @property
    def tflops(self) -> float | None:
        """Rate of computing, in 10^12 operations a second."""
        return None if self.us is None else self.flops / self.us / 1e6

    @property
    def of_matmul(self) -> float | None:
        """Fraction of the rate of a large matrix product."""
        return None if self.us is None else self.compute_us / self.us

    @property
    def scratch_ratio(self) -> float | None:
        """Work memory over what the results of the two products take."""
        return None if self.scratch_bytes is None or not self.experts_case else self.scratch_bytes / self.experts_case.activation_bytes

    @property
    def against_ratio(self) -> float | None:
        """Our time over that of the best peer; None unless one from the peers file was right."""
        return self.ratio if any(self.peers[name].us is not None for name in self.against) else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **super().to_dict(),
            "shape": asdict(self.case),
            "bytes_read": self.bytes_read,
            "flops": self.flops,
            "touched": self.touched,
            "memory_us": self.memory_us,
            "compute_us": self.compute_us,
            "tflops": self.tflops,
            "activation_bytes": self.experts_case.activation_bytes if self.experts_case else None,
            "scratch_bytes": self.scratch_bytes,
            "same_bits": self.same_bits,
            "served_by": self.served_by,
            "against": list(self.against),
        }
