"""Choices of speed of the experts, as data: tiles, warps, stages. None changes a result beyond rounding.

`expert_config` looks for a measurement of the same experts first (`moe_measured`: those that ship, and those that a
device config names). Without one within a factor of 4 in tokens, a model decides: the kind of device, the bytes of an
element and the rows that an expert with any row gets on average say whether memory or arithmetic is the limit; the sizes
of a product cut its tiles where they would leave them half empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache

import torch

from hal.kernels.moe_configs import Experts, GemmConfig, Measured, MoeConfig, SlotConfig, SlotPath
from hal.kernels.moe_measured import HOPPER
from hal.kernels.tuning import is_hopper

__all__ = [
    "EXPERT_CONFIGS",
    "ROW_BLOCKS",
    "SLOT_CONFIGS",
    "expert_config",
    "few_tokens",
    "fitted",
    "moe_config",
    "multiprocessors",
    "row_blocks",
    "slot_path",
    "use_measured",
]


_TINY = GemmConfig(128, 128, 4, 4, swap=True, w_tma=True)
_LARGE = GemmConfig(256, 64, 8, 4, w_tma=True, x_tma=True)
#: (kind of device, bytes of an element) -> ((most rows of an expert, config), ...); the last serves all others. Hopper's are those that
#: are at most 2 % behind the best on each shape of `moe_measured` that they are for.
EXPERT_CONFIGS: dict[tuple[str, int], tuple[tuple[float, MoeConfig], ...]] = {
    ("hopper", 2): (
        (8, MoeConfig(16, _TINY, GemmConfig(128, 128, 4, 3, swap=True))),
        (24, MoeConfig(32, GemmConfig(128, 128, 4, 3), GemmConfig(128, 128, 4, 3))),
        (40, MoeConfig(64, GemmConfig(128, 64, 4, 3, w_tma=True), GemmConfig(128, 64, 4, 3, w_tma=True, x_tma=True))),
        (200, MoeConfig(128, _LARGE, _LARGE)),
        (0, MoeConfig(128, replace(_LARGE, stages=3), replace(_LARGE, programs=1, ahead=256))),
    ),
    ("other", 2): (
        (8, MoeConfig(16, GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3))),
        (20, MoeConfig(32, GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3))),
        (80, MoeConfig(64, GemmConfig(128, 32, 4, 3), GemmConfig(128, 32, 4, 3))),
        (0, MoeConfig(128, GemmConfig(128, 32, 8, 3), GemmConfig(128, 32, 8, 3))),
    ),
    ("other", 4): (
        (20, MoeConfig(16, GemmConfig(32, 32, 4, 2), GemmConfig(32, 32, 4, 2))),
        (0, MoeConfig(64, GemmConfig(64, 16, 4, 2), GemmConfig(64, 16, 4, 2))),
    ),
}

_SLOT_UP = SlotConfig(4, 512, 4, 3)
#: (bytes of an element, K contiguous) -> ((most I, config of the kernels for few tokens), ...); the last serves all others.
SLOT_CONFIGS: dict[tuple[int, bool], tuple[tuple[int, SlotPath], ...]] = {
    (2, True): (
        (512, SlotPath(_SLOT_UP, SlotConfig(2, 1024, 2, prefetch=False))),
        (2048, SlotPath(_SLOT_UP, SlotConfig(4, 1024, 4, prefetch=False))),
        (0, SlotPath(_SLOT_UP, SlotConfig(8, 1024, 4, prefetch=False))),
    ),
    (2, False): ((0, SlotPath(SlotConfig(32, 64, 4), SlotConfig(64, 64, 4, prefetch=False))),),
    (4, True): ((0, SlotPath(SlotConfig(4, 512, 4), SlotConfig(4, 512, 4))),),
    (4, False): ((0, SlotPath(SlotConfig(32, 32, 4), SlotConfig(32, 64, 4, prefetch=False))),),
}
#: Most tokens and choices that take the kernels for few tokens, and the share of slots that may expect to meet another on their expert.
_SLOT_TOKENS = 4
_SLOT_CHOICES = 16
_SLOT_SHARED = 0.08
#: A measurement serves numbers of tokens up to this factor away.
_NEAR = 4.0
_LEAST_N, _LEAST_K = 32, 32
#: (columns of a program, warps) of kernels that walk over rows: where rows are many, and where they are few.
ROW_BLOCKS = ((1024, 4), (256, 1))
#: Name of a device -> what a device config has named for it.
_USED: dict[str, tuple[Measured, ...]] = {}

_INTERPRETED_MULTIPROCESSORS = 4


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; a few stand in under the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else _INTERPRETED_MULTIPROCESSORS


def use_measured(device_name: str, measured: Iterable[Measured]) -> tuple[Measured, ...]:
    """Let measurements decide on devices of this name, before those that ship; they hold for the process. Returns those that they replace."""
    earlier = _USED.get(device_name, ())
    _USED[device_name] = tuple(measured)
    expert_config.cache_clear()
    return earlier


def fitted(config: GemmConfig, columns: int, depth: int) -> GemmConfig:
    """Cut the tiles of a product of N = `columns` and K = `depth` where more of them would be wasted than a narrower tile costs."""
    n, k, stages = config.block_n, config.block_k, config.stages
    while n > _LEAST_N and -(-columns // n) * n > 1.05 * (-(-columns // (n // 2)) * (n // 2)):
        n //= 2
    while k > _LEAST_K and k > 64 and 2 * k > depth:
        k, stages = k // 2, max(stages, 4)
    return replace(config, block_n=n, block_k=k, stages=stages)


@lru_cache(maxsize=4096)
def expert_config(device: torch.device, experts: Experts, tokens: int) -> MoeConfig | SlotPath:
    """Config of the sorted path or of the path for few tokens: the nearest measurement, else the model.

    Args:
        device: where.
        experts: the experts.
        tokens: T, at least 1.
    """
    found = _measured(device, experts, tokens)
    if found is not None:
        return found.config
    slots = slot_path(tokens, experts.top_k, experts.experts, experts.element_bytes, experts.k_inner, experts.inner)
    if slots is not None:
        return slots
    config = _by_rows(device, experts.element_bytes, experts.rows(tokens))
    up, down = fitted(config.up, 2 * experts.inner, experts.hidden), fitted(config.down, experts.hidden, experts.inner)
    return MoeConfig(config.block_m, up, down)


def _measured(device: torch.device, experts: Experts, tokens: int) -> Measured | None:
    """The nearest measurement of the same experts; those of a device config before those that ship."""

    def distance(entry: Measured) -> float:
        return abs(math.log(entry.tokens / tokens))

    named = _USED.get(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, ())
    for table in (named, HOPPER if is_hopper(device) else ()):
        near = [e for e in table if e.experts == experts and distance(e) <= math.log(_NEAR)]
        if near:
            return min(near, key=distance)
    return None


def _by_rows(device: torch.device, element_bytes: int, rows: float) -> MoeConfig:
    kind = "hopper" if is_hopper(device) and element_bytes == 2 else "other"
    table = EXPERT_CONFIGS[kind, element_bytes]
    return next((config for most, config in table if rows <= most), table[-1][1])


@lru_cache(maxsize=4096)
def moe_config(device: torch.device, element_bytes: int, rows: int, experts: int) -> MoeConfig:
    """Config by the model alone, for `rows` rows of `experts` experts of which no more is known.

    Args:
        device: where.
        element_bytes: of x and the weights.
        rows: of the sorted tensor.
        experts: E.
    """
    return _by_rows(device, element_bytes, rows / max(1, min(experts, rows)))


def few_tokens(tokens: int, top_k: int, experts: int) -> bool:
    """Whether the kernels for few tokens are the better ones: slots are few, and seldom share an expert.

    Args:
        tokens: T.
        top_k: k.
        experts: E.
    """
    # Expected share of slots whose expert an earlier slot has; choices of one token differ.
    shared = (tokens - 1) * top_k / (2 * max(1, experts))
    return tokens <= _SLOT_TOKENS and top_k <= _SLOT_CHOICES and shared <= _SLOT_SHARED


def slot_path(tokens: int, top_k: int, experts: int, element_bytes: int, k_inner: bool, inner: int) -> SlotPath | None:
    """Configs of the kernels for few tokens, None where the sorted path is better.

    Args:
        tokens: T.
        top_k: k.
        experts: E.
        element_bytes: of x and the weights.
        k_inner: K is the contiguous dimension of the weights.
        inner: I.
    """
    if not few_tokens(tokens, top_k, experts):
        return None
    table = SLOT_CONFIGS[element_bytes, k_inner]
    return next((path for most, path in table if inner <= most), table[-1][1])


def row_blocks(device: torch.device, rows: int, columns: int) -> tuple[int, int]:
    """One of `ROW_BLOCKS`: small blocks where rows are few."""
    many, few = ROW_BLOCKS
    return many if rows * columns >= 2048 * multiprocessors(device) else few
