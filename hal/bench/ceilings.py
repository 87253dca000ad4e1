"""What the device itself reaches: the rate of reading memory and of large matrix products."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hal.bench.fill import DTYPES, fill_random
from hal.bench.timer import device_us
from hal.errors import HalError

__all__ = ["Ceilings", "measure_ceilings"]

#: Type of device -> bytes to read, rows and columns of a matrix, dtype of the product.
_SIZES = {"cuda": (1 << 32, 8192, "bf16"), "cpu": (1 << 24, 256, "fp32")}


@dataclass(frozen=True)
class Ceilings:
    """Rates that nothing beats by much.

    Attributes:
        read_gbps: streaming read, in 10^9 bytes a second.
        read_method: how it was reached.
        tried: each way to read and its rate; a way that failed has a sentence instead.
        matmul_tflops: a product of two random square matrices, in 10^12 operations a second.
        matmul: which product: dtype and size.
        quantised_tflops: the same by dtype of quantised operands; what failed has a sentence instead.
    """

    read_gbps: float
    read_method: str
    tried: dict[str, float | str]
    matmul_tflops: float
    matmul: str = "bf16, 8192^3"
    quantised_tflops: dict[str, float | str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def read_us(self, size: float) -> float:
        """Microseconds that reading `size` bytes takes at least."""
        return size / self.read_gbps / 1e3

    def compute_us(self, flops: float, dtype: str = "") -> float:
        """Microseconds that computing takes at least; 0 for quantised operands whose rate is not known."""
        rate = self.quantised_tflops.get(dtype, "") if dtype else self.matmul_tflops
        return flops / rate / 1e6 if isinstance(rate, float) else 0.0

    def floor_us(self, size: float, flops: float, dtype: str = "") -> float:
        """Microseconds that reading and computing take at least, whichever is more."""
        return max(self.read_us(size), self.compute_us(flops, dtype))


def measure_ceilings(device: torch.device, quantised: Sequence[str] = ()) -> Ceilings:
    """Measure the read rate, the rate of a product, and those of products of `quantised` dtypes."""
    size, rows, dtype = _SIZES[device.type]
    timed = device_us(device)
    x = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    tried: dict[str, float | str] = {}
    for name, read in _readers(x):
        tried[name] = _rate(lambda read=read: size / timed([read])[0] / 1e3)  # type: ignore[misc]
    rates = {name: rate for name, rate in tried.items() if isinstance(rate, float)}
    if not rates:
        raise HalError(f"the read ceiling could not be measured: {tried}")
    best = max(rates, key=rates.__getitem__)
    del x
    products = {name: _rate(lambda name=name: _tflops(name, rows, device)) for name in (dtype, *quantised)}  # type: ignore[misc]
    plain = products.pop(dtype)
    if not isinstance(plain, float):
        raise HalError(f"the rate of a {dtype} matrix product could not be measured: {plain}")
    return Ceilings(rates[best], best, tried, plain, f"{dtype}, {rows}^3", products)


def _rate(measure: Callable[[], float]) -> float | str:
    """A rate, or why there is none: one way less, the others count."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _readers(x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to read all of `x`. PyTorch's reductions come first: they are there without Triton, but a kernel of ours reads faster."""
    yield "torch sum of int64 words", x.view(torch.int64).sum
    yield "torch amax of bf16", x.amax
    if x.is_cuda and find_spec("triton") is not None:
        stream = importlib.import_module("hal.kernels.stream_read")  # by name: `hal` itself never imports Triton
        for config in stream.CONFIGS:
            yield f"stream_read, {config}", partial(stream.stream_read, x, config)


def _tflops(name: str, size: int, device: torch.device) -> float:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (fill_random(torch.empty(size, size, dtype=DTYPES[name], device=device), generator) for _ in range(2))
    us, _ = device_us(device)([_PRODUCTS.get(name, _plain_product)(a, b.T)])
    return 2 * size**3 / us / 1e6


def _plain_product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return partial(torch.matmul, a, b, out=out)


def _int8_product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    return partial(torch._int_mm, a, b, out=out)


def _e4m3_product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    one = torch.ones((), device=a.device)
    return partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


#: Products of dtypes that `matmul` does not take.
_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Callable[[], Tensor]]] = {"int8": _int8_product, "e4m3": _e4m3_product}
