"""What `measure` asks of a case: data on the device, our call, the peers' calls, and how results are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hal.bench.moe.peers import MoePeers

__all__ = ["Call", "Maker", "Work", "spoil"]

Call = Callable[[], Any]
#: Index of a set -> the call on it.
Maker = Callable[[int], Call]


class Work(Protocol):
    """The data of a case and what is done with them. Results are a tensor or a tuple of tensors."""

    @property
    def op(self) -> str:
        """Name of our op."""

    @property
    def sets(self) -> int:
        """Distinct inputs."""

    @property
    def bytes_read(self) -> float:
        """Bytes that a call has to read, on average over the sets."""

    @property
    def touched(self) -> float | None:
        """Experts touched, on average over the sets."""

    @property
    def tolerance(self) -> float:
        """Largest error that `exact_error` may find."""

    def arguments(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of our call on a set, outputs included."""

    def exact_error(self, result: Any, index: int) -> float:
        """Error of a result on a set against float64."""

    def difference(self, result: Any, expected: Any) -> float:
        """Relative difference of two results on the set that was captured last; infinite if one is not finite."""

    def peers_of_torch(self) -> Mapping[str, Maker]:
        """PyTorch's own implementations."""

    def peers_of(self, file: MoePeers) -> Mapping[str, Maker]:
        """Those of a peers file."""


def spoil(result: Any) -> None:
    """Overwrite a result: NaN, and -1 in integers."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, Tensor):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
