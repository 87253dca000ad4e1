"""Choices of speed, as data: which tile, how many warps and stages, how many programs. None changes a result beyond rounding.

Numbers of compute capability 9 come from a sweep on one H200 (Triton 3.6.0, page 16, bf16, one program per sequence,
kv head and split): at D = 128 a tile of 64 keys with 2 warps and 3 or 4 stages reached 0.82 to 0.98 of the read
ceiling from batch 8 on; at D = 256 a tile of 32, 4 warps and 3 stages 0.81; batch 1 was fastest with about 512
programs in all, four per multiprocessor. Other rows keep the tile and lower the stages until K and V fit 99 KB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton

__all__ = [
    "INVARIANT_CHUNK",
    "MIN_SPLIT_KEYS",
    "DecodeConfig",
    "decode_config",
    "device_class",
    "interpreting",
    "packed_rows",
    "target_programs",
]

#: Keys of one chunk of a batch-invariant call: a constant, so that no row's sum depends on anything but its own keys.
INVARIANT_CHUNK = 512
#: A split shorter than this costs more in the reduction than it gains.
MIN_SPLIT_KEYS = 128
_PROGRAMS_PER_MULTIPROCESSOR = 4
#: Enough to split long sequences of the tests under the interpreter, at about 10 ms a program.
_INTERPRETED_PROGRAMS = 8


@dataclass(frozen=True)
class DecodeConfig:
    """Keys of a tile, warps of a program, stages of the load pipeline."""

    tile: int
    warps: int
    stages: int


#: (device class, width class, bytes of a K/V element) -> config. Width is the larger head dim, rounded up.
_DECODE: dict[tuple[str, int, int], DecodeConfig] = {
    ("hopper", 64, 1): DecodeConfig(64, 2, 4),
    ("hopper", 64, 2): DecodeConfig(64, 2, 4),
    ("hopper", 64, 4): DecodeConfig(32, 8, 2),
    ("hopper", 128, 1): DecodeConfig(64, 4, 3),
    ("hopper", 128, 2): DecodeConfig(64, 2, 3),
    ("hopper", 128, 4): DecodeConfig(16, 8, 2),
    ("hopper", 256, 1): DecodeConfig(32, 4, 3),
    ("hopper", 256, 2): DecodeConfig(32, 4, 3),
    ("hopper", 256, 4): DecodeConfig(16, 4, 2),
    ("hopper", 576, 1): DecodeConfig(32, 8, 2),
    ("hopper", 576, 2): DecodeConfig(32, 8, 2),
    ("hopper", 576, 4): DecodeConfig(16, 8, 1),
    ("other", 64, 1): DecodeConfig(64, 4, 3),
    ("other", 64, 2): DecodeConfig(64, 4, 3),
    ("other", 64, 4): DecodeConfig(32, 8, 2),
    ("other", 128, 1): DecodeConfig(64, 4, 2),
    ("other", 128, 2): DecodeConfig(64, 4, 2),
    ("other", 128, 4): DecodeConfig(16, 8, 2),
    ("other", 256, 1): DecodeConfig(32, 4, 2),
    ("other", 256, 2): DecodeConfig(32, 4, 2),
    ("other", 256, 4): DecodeConfig(16, 4, 2),
    ("other", 576, 1): DecodeConfig(16, 8, 2),
    ("other", 576, 2): DecodeConfig(16, 8, 2),
    ("other", 576, 4): DecodeConfig(16, 8, 1),
}


def interpreting() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


@cache
def device_class(device: torch.device) -> str:
    """`hopper` for NVIDIA devices with its 227 KB of shared memory (compute capability 9 and 10), else `other`."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "other"
    return "hopper" if torch.cuda.get_device_capability(device)[0] in (9, 10) else "other"


@cache
def target_programs(device: torch.device) -> int:
    """Programs of a decode call that fill the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_MULTIPROCESSOR


@cache
def decode_config(kind: str, head_dim: int, head_dim_v: int, kv_bytes: int, compute_bytes: int, *, heavy: bool) -> DecodeConfig:
    """Return the config of the main kernel.

    Args:
        kind: device class.
        head_dim: D.
        head_dim_v: Dv.
        kv_bytes: bytes of a K or V element.
        compute_bytes: bytes of an operand of `tl.dot`.
        heavy: more than 16 rows, a tree mask, or a batch-invariant call: registers then ask for 4 warps.
    """
    width = max(head_dim, head_dim_v)
    step = next(w for w in (64, 128, 256, 576) if width <= w)
    config = _DECODE[kind, step, 4 if compute_bytes == 4 else kv_bytes]
    return replace(config, warps=max(4, config.warps)) if heavy else config


def packed_rows(rows: int, head_dim: int) -> int:
    """Rows of a `tl.dot` tile for `rows` (token, head) pairs: 16, 32 or 64; at most 32 where the accumulator is wide."""
    most = 64 if head_dim <= 256 else 32
    return min(most, max(16, 1 << max(0, rows - 1).bit_length()))
