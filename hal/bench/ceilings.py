"""What the device itself reaches: the rate of reading memory and of a large matrix product."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hal.bench.timer import graph_us
from hal.errors import HalError

__all__ = ["Ceilings", "measure_ceilings"]

_READ_BYTES = 1 << 32
_MATRIX = 8192


@dataclass(frozen=True)
class Ceilings:
    """Rates that nothing beats by much.

    Attributes:
        read_gbps: streaming read, in 10^9 bytes a second.
        read_method: how it was reached.
        tried: each way to read and its rate; a way that failed has a sentence instead.
        matmul_tflops: a product of two random 8192 x 8192 bf16 matrices, in 10^12 operations a second.
    """

    read_gbps: float
    read_method: str
    tried: dict[str, float | str]
    matmul_tflops: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def floor_us(self, kv_bytes: int, flops: int) -> float:
        """Microseconds that reading and computing take at least, whichever is more."""
        return max(kv_bytes / self.read_gbps / 1e3, flops / self.matmul_tflops / 1e6)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure both, with 4 GB of random bf16."""
    x = torch.empty(_READ_BYTES // 2, dtype=torch.bfloat16, device=device).normal_()
    tried: dict[str, float | str] = {}
    for name, read in _readers(x):
        try:
            tried[name] = _READ_BYTES / graph_us([read])[0] / 1e3
        except Exception as error:  # one way less; the others count
            tried[name] = f"{type(error).__name__}: {error}"
    rates = {name: rate for name, rate in tried.items() if isinstance(rate, float)}
    if not rates:
        raise HalError(f"bench decode: the read ceiling could not be measured: {tried}")
    best = max(rates, key=rates.__getitem__)
    del x
    return Ceilings(rates[best], best, tried, _matmul_tflops(device))


def _readers(x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to read all of `x`. PyTorch's reductions come first: they are there without Triton, but a kernel of ours reads faster."""
    yield "torch sum of int64 words", x.view(torch.int64).sum
    yield "torch amax of bf16", x.amax
    if find_spec("triton") is not None:
        stream = importlib.import_module("hal.kernels.stream_read")  # by name: `hal` itself never imports Triton
        for config in stream.CONFIGS:
            yield f"stream_read, {config}", partial(stream.stream_read, x, config)


def _matmul_tflops(device: torch.device) -> float:
    a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    us, _ = graph_us([lambda: torch.matmul(a, b, out=out)])
    return 2 * _MATRIX**3 / us / 1e6
