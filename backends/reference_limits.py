"""How the reference backend cuts its work, and whether it may read values: the two things that depend on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Limits", "limits", "on_host"]


@dataclass(frozen=True)
class Limits:
    """Sizes of one step of the general path.

    Attributes:
        values: fp32 values of a gathered chunk of K and V, and of a tile of scores.
        least_keys: keys that a chunk should have before more sequences join its tile.
        keys: most keys of a chunk.
        rows: most query rows of a tile.
    """

    values: int
    least_keys: int
    keys: int
    rows: int


# A CPU wants chunks that stay in its cache: 2**19 values with 64 to 256 keys were fastest within noise among 2**17..2**22
# on two Zen 4 cores. An accelerator wants few launches.
_CPU = Limits(values=2**19, least_keys=64, keys=256, rows=256)
_ACCELERATOR = Limits(values=2**24, least_keys=256, keys=1024, rows=1024)


def on_host(t: Tensor) -> bool:
    """Whether reading values of `t` costs nothing. Elsewhere it would wait for the device, and break graph capture."""
    return t.device.type == "cpu"


def limits(t: Tensor) -> Limits:
    """Return the limits for the device of `t`."""
    return _CPU if t.device.type == "cpu" else _ACCELERATOR
