"""Logits for routing: random, tied, bad."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance import moe_oracle as oracle
from hal.ops import OPS

__all__ = ["BAD_ROWS", "EXPERTS", "THRESHOLDS", "TOP_K", "levels", "separable"]

INF, NAN = math.inf, math.nan
#: Numbers of experts, powers of two and not, in and beyond what fits a tile.
EXPERTS = (1, 2, 3, 7, 13, 60, 64, 72, 96, 128, 144, 160, 200, 256, 257, 384, 512, 1000, 1025)
#: Experts per token, on both sides of fixed arrays that kernels had.
TOP_K = (1, 2, 8, 9, 10, 16, 17, 22, 32, 33, 64)
#: Numbers of tokens on both sides of where a backend may change its path.
THRESHOLDS = (0, 1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)

#: name -> what stands in a row of 8 logits.
BAD_ROWS = {
    "all-nan": [NAN] * 8,
    "one-nan": [0.5, NAN, 1.5, -1.0, 0.25, 2.0, -2.0, 0.0],
    "nan-but-one": [NAN, NAN, NAN, NAN, NAN, -50.0, NAN, NAN],
    "all-plus-inf": [INF] * 8,
    "all-minus-inf": [-INF] * 8,
    "one-plus-inf": [0.5, 1.0, 1.5, INF, 0.25, 2.0, -2.0, 0.0],
    "three-plus-inf": [0.5, INF, 1.5, INF, 0.25, INF, -2.0, 0.0],
    "one-minus-inf": [0.5, 1.0, -INF, -1.0, 0.25, 2.0, -2.0, 0.0],
    "minus-inf-but-one": [-INF, -INF, -INF, -INF, -INF, -INF, 0.5, -INF],
    "nan-and-minus-inf": [NAN, -INF, NAN, -INF, -INF, NAN, NAN, -INF],
    "mix": [NAN, INF, -INF, 1.0, NAN, -1.0, INF, -INF],
    "largest": [3e38, -3e38, 3e38, 0.0, -3e38, 3e38, 1e38, 2e38],
    "far-apart": [0.0, -200.0, -150.0, -250.0, -120.0, -119.0, -400.0, -300.0],
}


def levels(generator: torch.Generator, tokens: int, experts: int, count: int = 3) -> Tensor:
    """Logits of few different values, 0 to count - 1: ties everywhere."""
    return torch.randint(count, (tokens, experts), generator=generator).float()


def separable(make: Callable[[], dict[str, Any]], least: float = 1e-5) -> dict[str, Any]:
    """Draw `route` calls until fp32 can tell apart whatever decides who is chosen; equal scores remain."""
    for _ in range(50):
        args = make()
        if oracle.least_gap(vars(OPS["route"].bind((), args))) > least:
            return args
    raise AssertionError("no separable logits in 50 draws")
