"""Random data, made on the device in parts so that no large temporary is needed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DTYPES", "fill_random", "sets_needed"]

#: Names of dtypes in cases.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
#: Bytes that the calls of one graph read together, at least this and this many L2 caches; most sets.
_LEAST_BYTES, _L2_TIMES, _MOST_SETS = 400_000_000, 6, 64
_CHUNK = 1 << 28  # elements converted at a time


def sets_needed(bytes_read: int, l2_bytes: int) -> int:
    """Return over how many distinct sets of data a graph of calls that read that much each rotates."""
    wanted = max(_LEAST_BYTES, _L2_TIMES * l2_bytes)
    return min(_MOST_SETS, max(1, -(-wanted // max(1, bytes_read))))


def fill_random(x: Tensor, generator: torch.Generator, deviation: float = 1.0) -> Tensor:
    """Fill a contiguous tensor with N(0, deviation), e4m3 within its range; int8 with any code of -127..127. Returns it."""
    flat = x.view(-1)
    if x.dtype == torch.int8:
        flat.random_(-127, 128, generator=generator)
    elif x.dtype == torch.float8_e4m3fn:
        for part in flat.split(_CHUNK):
            values = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.bfloat16)
            part.copy_(values.mul_(deviation).clamp_(-448, 448))
    else:
        for part in flat.split(_CHUNK):
            part.normal_(std=deviation, generator=generator)
    return x
