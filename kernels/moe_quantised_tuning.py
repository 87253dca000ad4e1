"""Choices of speed of quantised experts, as data beside `moe_tuning`. None changes a result beyond rounding.

What sets them apart from 16-bit ones: a step of K has 128 or 256 bytes of a row, as there, and so twice the columns, but no
more than the 128 columns of a scale; sums that are promoted to fp32 after each step need the registers of the accumulators
twice, so such tiles are half as large; and a tile of 128 activated columns can leave quantised by groups.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hal.kernels.moe_configs import GemmConfig, MoeConfig, SlotConfig, SlotPath
from hal.kernels.moe_tuning import few_tokens
from hal.kernels.tuning import is_hopper

__all__ = ["QUANTISED_CONFIGS", "QUANTISED_SLOT_CONFIGS", "quantised_config", "quantised_slot_path", "sums"]

#: (kind of device, how sums are kept) -> ((most rows of an expert on average, config), ...); the last serves all others.
#: "int32": in the matrix unit; "promoted": in fp32 after each step; "blocks": so too, by the scales of blocks.
QUANTISED_CONFIGS: dict[tuple[str, str], tuple[tuple[float, MoeConfig], ...]] = {
    ("hopper", "int32"): (
        (8, MoeConfig(16, GemmConfig(128, 256, 4, 3, swap=True), GemmConfig(128, 256, 4, 3, swap=True))),
        (20, MoeConfig(32, GemmConfig(128, 256, 4, 3), GemmConfig(128, 128, 4, 4, swap=True))),
        (40, MoeConfig(64, GemmConfig(128, 128, 4, 3, w_tma=True), GemmConfig(128, 128, 4, 3, w_tma=True, x_tma=True))),
        (0, MoeConfig(128, GemmConfig(256, 128, 8, 4, w_tma=True), GemmConfig(256, 128, 8, 4, w_tma=True, x_tma=True))),
    ),
    ("hopper", "promoted"): (
        (8, MoeConfig(16, GemmConfig(128, 256, 4, 3, swap=True), GemmConfig(128, 256, 4, 3, swap=True))),
        (20, MoeConfig(32, GemmConfig(128, 128, 4, 4, swap=True), GemmConfig(128, 128, 4, 4, swap=True))),
        (40, MoeConfig(64, GemmConfig(128, 128, 4, 3, w_tma=True), GemmConfig(128, 128, 4, 3, w_tma=True, x_tma=True))),
        (0, MoeConfig(128, GemmConfig(128, 128, 8, 4, w_tma=True), GemmConfig(128, 128, 8, 4, w_tma=True, x_tma=True))),
    ),
    ("hopper", "blocks"): (
        (8, MoeConfig(16, GemmConfig(256, 128, 4, 3, swap=True), GemmConfig(128, 128, 4, 4, swap=True))),
        (20, MoeConfig(32, GemmConfig(256, 128, 8, 3, swap=True), GemmConfig(128, 128, 4, 4, swap=True))),
        (40, MoeConfig(64, GemmConfig(256, 128, 8, 3, w_tma=True), GemmConfig(128, 128, 4, 3, w_tma=True, x_tma=True))),
        (0, MoeConfig(128, GemmConfig(128, 128, 8, 4, w_tma=True), GemmConfig(128, 128, 8, 4, w_tma=True, x_tma=True))),
    ),
    ("other", "int32"): (
        (8, MoeConfig(16, GemmConfig(64, 128, 4, 3), GemmConfig(64, 128, 4, 3))),
        (20, MoeConfig(32, GemmConfig(64, 128, 4, 3), GemmConfig(64, 128, 4, 3))),
        (80, MoeConfig(64, GemmConfig(128, 64, 4, 3), GemmConfig(128, 64, 4, 3))),
        (0, MoeConfig(128, GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 3))),
    ),
    ("other", "promoted"): (
        (8, MoeConfig(16, GemmConfig(64, 128, 4, 3), GemmConfig(64, 128, 4, 3))),
        (20, MoeConfig(32, GemmConfig(64, 128, 4, 3), GemmConfig(64, 128, 4, 3))),
        (0, MoeConfig(64, GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 3))),
    ),
    ("other", "blocks"): (
        (8, MoeConfig(16, GemmConfig(64, 128, 4, 3), GemmConfig(64, 128, 4, 3))),
        (20, MoeConfig(32, GemmConfig(64, 128, 4, 3), GemmConfig(64, 128, 4, 3))),
        (0, MoeConfig(64, GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 3))),
    ),
}

#: Config of the kernels for few tokens.
QUANTISED_SLOT_CONFIGS = SlotPath(SlotConfig(4, 1024, 4, 3), SlotConfig(4, 1024, 4))


def sums(dtype: torch.dtype, blocks: bool) -> str:
    """How sums of codes of `dtype` are kept: see `QUANTISED_CONFIGS`."""
    return "blocks" if blocks else "int32" if dtype == torch.int8 else "promoted"


@lru_cache(maxsize=4096)
def quantised_config(device: torch.device, dtype: torch.dtype, blocks: bool, slots: int, experts: int) -> MoeConfig:
    """Config of the sorted path.

    Args:
        device: where.
        dtype: of the codes.
        blocks: scales are those of blocks.
        slots: T * k.
        experts: E.
    """
    rows = slots / max(1, min(experts, slots))
    table = QUANTISED_CONFIGS["hopper" if is_hopper(device) else "other", sums(dtype, blocks)]
    return next((config for most, config in table if rows <= most), table[-1][1])


def quantised_slot_path(tokens: int, top_k: int, experts: int, k_inner: bool) -> SlotPath | None:
    """Configs of the kernels for few tokens, None where the sorted path serves.

    Args:
        tokens: T.
        top_k: k.
        experts: E.
        k_inner: K is the contiguous dimension of the weights.
    """
    return QUANTISED_SLOT_CONFIGS if k_inner and few_tokens(tokens, top_k, experts) else None
