"""Calls made ahead of time, so that the first real one neither compiles nor falls inside a graph capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.device import DeviceInfo
from hal.errors import ArgumentError, nearest
from hal.ops import Op
from hal.report import Report

__all__ = ["TensorSpec", "warmup"]

#: What made-up index tensors hold: a slot of -1 writes nothing, so real caches may take part. All else is zero.
_FILL = {"slot_mapping": -1}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to make up: shape, dtype and, if it is not contiguous, strides in elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    def make(self, device: torch.device, fill: int) -> Tensor:
        """Return such a tensor, filled."""
        if self.strides is None:
            return torch.full(self.shape, fill, device=device, dtype=torch.float32).to(self.dtype)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) if all(self.shape) else 0
        return torch.full((span,), fill, device=device, dtype=torch.float32).to(self.dtype).as_strided(self.shape, self.strides)


def _made(value: Any, device: torch.device, fill: int) -> Any:
    """The value with every `TensorSpec`, also inside a tuple such as `hal.MoeIndex`, turned into a tensor."""
    if isinstance(value, TensorSpec):
        return value.make(device, fill)
    if isinstance(value, tuple):
        parts = [_made(part, device, fill) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def warmup(
    op: Op, function: Callable[..., Any], explain: Callable[..., Report], specs: Sequence[Mapping[str, Any]], device: DeviceInfo
) -> list[Report]:
    """Make one eager call for each spec, see `hal.Backend.warmup`."""
    where = torch.device(device.type) if device.type == "cpu" else torch.device(device.type, device.index)
    reports = []
    for spec in specs:
        for name in spec:
            if name not in op.parameters.parameters:
                known = op.parameters.parameters
                raise ArgumentError("warmup", name, f"is no argument of {op.name}", ", ".join(known), nearest(name, known).strip())
        call = {name: _made(value, where, _FILL.get(name, 0)) for name, value in spec.items()}
        reports.append(explain(op.name, **call))
        function(**call)
    if device.type == "cuda":
        torch.cuda.synchronize(device.index)
    return reports
