"""Choices of speed of the experts, as data: tiles, warps, stages. None changes a result beyond rounding.

A config is chosen by the kind of device, the bytes of an element and the rows that an expert gets on average, which say
whether memory or arithmetic is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from hal.kernels.tuning import is_hopper

__all__ = [
    "EXPERT_CONFIGS",
    "SLOT_CONFIGS",
    "GemmConfig",
    "MoeConfig",
    "SlotConfig",
    "SlotPath",
    "moe_config",
    "multiprocessors",
    "row_blocks",
    "slot_path",
]


@dataclass(frozen=True)
class GemmConfig:
    """How one grouped product runs.

    Attributes:
        block_n: rows of the weights of a tile; with an activation half of them are gates.
        block_k: K of a step.
        warps: of a program.
        stages: of the load pipeline.
        swap: the weights are the wide operand of the matrix instruction.
        w_tma: weights come through a TMA descriptor where their strides allow.
        x_tma: rows that are already sorted do so too.
        programs: programs per multiprocessor that work through all tiles; 0 for a program per tile.
        group_m: row tiles of an expert that run side by side.
        ahead: columns of the weights that programs ask L2 for before the kernel before is done (down projection).
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    swap: bool = False
    w_tma: bool = False
    x_tma: bool = False
    programs: int = 0
    group_m: int = 8
    ahead: int = 0


@dataclass(frozen=True)
class MoeConfig:
    """Rows of a tile, the product with the gate and up projections, and that with the down projection."""

    block_m: int
    up: GemmConfig
    down: GemmConfig


@dataclass(frozen=True)
class SlotConfig:
    """How a kernel of `moe_slots` runs.

    Attributes:
        rows: outputs of a program.
        block_k: K of a step.
        warps: of a program.
        stages: of the load pipeline, 1 for none.
        prefetch: ask L2 for the weights before the kernel before is done (second kernel).
    """

    rows: int
    block_k: int
    warps: int
    stages: int = 1
    prefetch: bool = True


@dataclass(frozen=True)
class SlotPath:
    """The two kernels of `moe_slots`."""

    up: SlotConfig
    down: SlotConfig


#: (kind of device, bytes of an element) -> ((most rows of an expert on average, config), ...); the last serves all others.
EXPERT_CONFIGS: dict[tuple[str, int], tuple[tuple[float, MoeConfig], ...]] = {
    ("hopper", 2): (
        (8, MoeConfig(16, GemmConfig(128, 128, 4, 4, swap=True), GemmConfig(64, 128, 4, 4, swap=True))),
        (20, MoeConfig(32, GemmConfig(128, 128, 4, 4, swap=True), GemmConfig(128, 128, 4, 4, swap=True))),
        (80, MoeConfig(64, GemmConfig(128, 64, 4, 4, w_tma=True), GemmConfig(128, 64, 4, 4, w_tma=True, x_tma=True))),
        (0, MoeConfig(128, GemmConfig(256, 64, 8, 3, w_tma=True), GemmConfig(128, 64, 8, 4, w_tma=True, x_tma=True))),
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

#: (bytes of an element, K contiguous) -> config of the kernels for few tokens.
SLOT_CONFIGS: dict[tuple[int, bool], SlotPath] = {
    (2, True): SlotPath(SlotConfig(4, 1024, 4), SlotConfig(4, 1024, 4)),
    (2, False): SlotPath(SlotConfig(32, 64, 4), SlotConfig(64, 64, 4, prefetch=False)),
    (4, True): SlotPath(SlotConfig(4, 512, 4), SlotConfig(4, 512, 4)),
    (4, False): SlotPath(SlotConfig(32, 32, 4), SlotConfig(32, 64, 4, prefetch=False)),
}
#: Most tokens and choices that take the kernels for few tokens, and the share of slots that may expect to meet another on their expert.
_SLOT_TOKENS = 4
_SLOT_CHOICES = 16
_SLOT_SHARED = 0.08

_INTERPRETED_MULTIPROCESSORS = 4


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; a few stand in under the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else _INTERPRETED_MULTIPROCESSORS


@cache
def moe_config(device: torch.device, element_bytes: int, slots: int, experts: int) -> MoeConfig:
    """Config of the sorted path.

    Args:
        device: where.
        element_bytes: of x and the weights.
        slots: T * k.
        experts: E.
    """
    kind = "hopper" if is_hopper(device) and element_bytes == 2 else "other"
    rows = slots / max(1, min(experts, slots))
    table = EXPERT_CONFIGS[kind, element_bytes]
    return next((config for most, config in table if rows <= most), table[-1][1])


def slot_path(tokens: int, top_k: int, experts: int, element_bytes: int, k_inner: bool) -> SlotPath | None:
    """Configs of the kernels for few tokens, None where the sorted path is better.

    Args:
        tokens: T.
        top_k: k.
        experts: E.
        element_bytes: of x and the weights.
        k_inner: K is the contiguous dimension of the weights.
    """
    if tokens > _SLOT_TOKENS or top_k > _SLOT_CHOICES:
        return None
    # Expected share of slots whose expert an earlier slot has; choices of one token differ.
    shared = (tokens - 1) * top_k / (2 * max(1, experts))
    return SLOT_CONFIGS[element_bytes, k_inner] if shared <= _SLOT_SHARED else None


def row_blocks(device: torch.device, rows: int, columns: int) -> tuple[int, int]:
    """(columns of a program, warps) of kernels that walk over rows: small blocks where rows are few."""
    if rows * columns >= 2048 * multiprocessors(device):
        return 1024, 4
    return 256, 1
