"""What the Triton backend does with measured choices, and the candidates that `hal tune moe` measures: a `hal.tuning.Tuner`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from hal.kernels.moe_configs import Experts, GemmConfig, Measured, MoeConfig, SlotConfig, SlotPath
from hal.kernels.moe_fused import fused_moe
from hal.kernels.moe_tuning import expert_config, few_tokens, use_measured
from hal.kernels.tuning import is_hopper
from hal.ops.moe_activations import OAI_ALPHA
from hal.tuning import ExpertsEntry, Tuning

__all__ = ["Experts", "apply", "candidates", "entry_of", "experts_of", "fixed", "layer", "served"]

Config = MoeConfig | SlotPath

#: Rows per expert up to which these heights of a tile are tried; the last serve all others.
_HEIGHTS: tuple[tuple[float, tuple[int, ...]], ...] = ((3, (16,)), (10, (16, 32)), (40, (32, 64)), (128, (64, 128)), (0, (128,)))
_FLAT = (
    GemmConfig(128, 128, 4, 4, swap=True, w_tma=True),
    GemmConfig(128, 128, 4, 3, swap=True),
    GemmConfig(128, 128, 4, 3),
    GemmConfig(64, 128, 4, 4, swap=True, w_tma=True),
    GemmConfig(64, 256, 4, 3, w_tma=True),
    GemmConfig(128, 64, 4, 6, swap=True),
    GemmConfig(128, 64, 4, 6, swap=True, w_tma=True),
    GemmConfig(128, 64, 4, 4, swap=True),
)
_TALL = (
    GemmConfig(256, 64, 8, 4, w_tma=True, x_tma=True),
    GemmConfig(256, 64, 8, 3, w_tma=True, x_tma=True),
    GemmConfig(256, 64, 8, 4, w_tma=True, x_tma=True, programs=1),
    GemmConfig(256, 64, 8, 3, w_tma=True, x_tma=True, programs=1),
    GemmConfig(256, 64, 8, 4, w_tma=True, x_tma=True, programs=1, ahead=256),
    GemmConfig(128, 64, 8, 3, w_tma=True, x_tma=True),
    GemmConfig(128, 64, 4, 3, w_tma=True, x_tma=True),
    GemmConfig(128, 64, 4, 3),
)
#: Where there is neither wgmma nor TMA.
_PORTABLE = tuple(GemmConfig(n, k, w, s) for n, w in ((64, 4), (128, 4), (128, 8)) for k in (32, 64) for s in (2, 3, 4))
_SLOT_UP = (SlotConfig(4, 512, 4, 3), SlotConfig(8, 256, 4, 4), SlotConfig(8, 512, 4, 3), SlotConfig(4, 1024, 4))
_SLOT_DOWN = tuple(SlotConfig(*c, prefetch=p) for c in ((2, 1024, 2), (4, 1024, 4), (8, 1024, 4)) for p in (False, True))


def apply(tuning: Tuning) -> None:
    """Let the measurements of a device config decide; they hold for the process."""
    use_measured(tuning.device, [Measured(experts_of(e), e.tokens, _config(e), e.microseconds) for e in tuning.fused_moe])


def experts_of(entry: ExpertsEntry) -> Experts:
    """What an entry is about."""
    size = getattr(torch, entry.dtype).itemsize
    return Experts(entry.experts, entry.hidden, entry.inner, entry.top_k, size, entry.k_inner)


def entry_of(experts: Experts, dtype: str, tokens: int, config: Config, microseconds: float) -> ExpertsEntry:
    """The entry of a config."""
    tall = isinstance(config, MoeConfig)
    return ExpertsEntry(
        experts.experts, experts.hidden, experts.inner, experts.top_k, tokens, dtype, experts.k_inner, "sorted" if tall else "slots",  # type: ignore[arg-type]
        config.block_m if isinstance(config, MoeConfig) else None, asdict(config.up), asdict(config.down), round(microseconds, 1),
    )  # fmt: skip


def _config(entry: ExpertsEntry) -> Config:
    up, down = (dict[str, Any](options) for options in (entry.up, entry.down))
    if entry.block_m is None:
        return SlotPath(SlotConfig(**up), SlotConfig(**down))
    return MoeConfig(entry.block_m, GemmConfig(**up), GemmConfig(**down))


def _with(config: Config, **products: Any) -> Config:
    """The config with another product."""
    return replace(config, **products)


def served(device: torch.device, experts: Experts, tokens: int) -> Config:
    """The config that serves now: by a measurement that a device config has named, by one that ships, or by the model."""
    return expert_config(device, experts, tokens)


def candidates(device: torch.device, experts: Experts, tokens: int, best: Callable[[], Config]) -> Iterator[Config]:
    """Configs to measure, one product after the other: each beside the best so far of the other.

    Args:
        device: where.
        experts: the experts.
        tokens: T.
        best: the best config so far of the height of tile, or the path, that was yielded last.
    """
    rows = experts.rows(tokens)
    wide = is_hopper(device) and experts.element_bytes == 2
    for height in next((heights for most, heights in _HEIGHTS if rows <= most), _HEIGHTS[-1][1]):
        options = (_FLAT if height <= 32 else _TALL) if wide else _PORTABLE
        yield MoeConfig(height, options[0], options[0])
        for up in options[1:]:
            yield _with(best(), up=up)
        for down in options[1:]:
            yield _with(best(), down=down)
    if experts.k_inner and few_tokens(tokens, experts.top_k, experts.experts):
        yield SlotPath(_SLOT_UP[0], _SLOT_DOWN[0])
        for slot in _SLOT_UP[1:]:
            yield _with(best(), up=slot)
        for slot in _SLOT_DOWN[1:]:
            yield _with(best(), down=slot)


@contextmanager
def fixed(device: torch.device, experts: Experts, tokens: int, config: Config) -> Iterator[None]:
    """Serve these experts and tokens by one config, and as before afterwards."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    earlier = use_measured(name, [Measured(experts, tokens, config, 0.0)])
    try:
        yield
    finally:
        use_measured(name, earlier)


def layer(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """One call of the op, with silu and gates before ups."""
    fused_moe(x, w_gate_up, w_down, weights, ids, out, activation="silu", gate_up="concat", alpha=OAI_ALPHA, limit=None)
    return out
