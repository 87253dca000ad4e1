"""Choices of speed of the routing kernel, as data. None changes a result beyond the rounding of softmax's sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["SORT_CONFIG", "SORT_FROM", "RouteConfig", "route_config", "sort_warps"]


@dataclass(frozen=True)
class RouteConfig:
    """How the routing kernel runs.

    Attributes:
        vec: most neighbouring experts that a lane holds and loads together.
        rows: rows of a program.
        packed: how keys that leave no room for the id (see `hal.kernels.route_keys`) break ties: 64, packed into 64
            bits, or 0, by a second search.
        unroll: experts that are chosen in a straight line of code.
        early: let the next kernel be placed before this one's wait, not after it.
    """

    vec: int
    rows: int
    packed: int = 0
    unroll: int = 16
    early: bool = False


#: (most experts, padded; whether groups are left out; most tokens) -> config; the bests of one NVIDIA H200, microseconds in a CUDA graph
#: beside vLLM's topk_softmax: E 8 k 2 T 4096: 0.9 (1.7); E 128 k 8 T 1: 1.0 (3.6), T 1024: 1.6 (3.8), T 8192: 5.5 (9.6), fp32 6.3 (14.5);
#: E 512 k 10 T 16: 1.6 (5.0), T 256: 1.7 (5.2), T 4096: 7.7 (16.3). `vec` may not depend on the tokens: a row's bits would.
_ROUTE: dict[tuple[int, bool, int], RouteConfig] = {
    (16, False, 1 << 62): RouteConfig(8, 32),
    (256, False, 512): RouteConfig(1, 1, early=True),
    (256, False, 1 << 62): RouteConfig(1, 2),
    (1024, False, 64): RouteConfig(8, 1, early=True),
    (1024, False, 2048): RouteConfig(8, 1),
    (1024, False, 1 << 62): RouteConfig(8, 1, early=True),
    (256, True, 64): RouteConfig(8, 1, early=True),
    (1024, True, 1 << 62): RouteConfig(8, 1),
}


#: Of rows that are sorted; and the least k for which rows of more experts than one warp holds are.
SORT_CONFIG, SORT_FROM = RouteConfig(8, 1, packed=64), 32


def sort_warps(experts: int) -> int:
    """Warps that sort a row of `experts` experts (padding included): up to 8, with 4 experts or more in a lane."""
    return min(8, max(1, experts // 128))


@lru_cache(maxsize=4096)
def route_config(experts: int, grouped: bool, tokens: int) -> RouteConfig:
    """Return the config for `tokens` rows of `experts` experts (padding included), some groups left out if `grouped`."""
    return next(config for (most, of_groups, rows), config in _ROUTE.items() if experts <= most and grouped == of_groups and tokens <= rows)
