"""Choices of speed, as data: which tile, how many warps, stages and programs. None changes a result beyond rounding.

The figures behind the rows of compute capability 9 are in docs/flash_decode.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

__all__ = [
    "INVARIANT_CHUNK",
    "STEP",
    "DecodeConfig",
    "decode_config",
    "decode_programs",
    "interpreting",
    "is_hopper",
    "packed_rows",
    "supports_pdl",
]

#: Keys of one step of the partition: every tile divides it.
STEP = 64
#: Keys of one chunk of a batch-invariant call: a constant, so that no row's sum depends on anything but its own keys.
INVARIANT_CHUNK = 512
#: Enough to split long sequences of the tests under the interpreter, at about 10 ms a program.
_INTERPRETED_PROGRAMS = 8


@dataclass(frozen=True)
class DecodeConfig:
    """How the main kernel runs.

    Attributes:
        tile: keys of a tile (portable kernel; that of Hopper is one step).
        warps: of a program.
        stages: of the load pipeline.
        residents: programs that a multiprocessor holds at once.
        copy_warps: warps that only copy (Hopper kernel).
        copy_registers: registers of a thread of those.
        merge_registers: registers of a thread that hold partials while a cut unit is merged (Hopper kernel).
        short_pieces: whether much work ends in short pieces (Hopper kernel).
        lone_pieces: whether little work takes one program per multiprocessor, however many fit (Hopper kernel).
        wide: whether rows are the wide side of the matrix products (Hopper kernel, units of 64 rows).
    """

    tile: int
    warps: int
    stages: int
    residents: int
    copy_warps: int = 4
    copy_registers: int = 88
    merge_registers: int = 64
    short_pieces: bool = False
    lone_pieces: bool = True
    wide: bool = False

    @property
    def registers(self) -> int:
        """Registers of a thread at which `residents` programs fit (Hopper kernel)."""
        return min(240, 65536 // (32 * (self.warps + self.copy_warps) * self.residents) // 8 * 8)


#: (kernel, width class, bytes of a K/V element, most rows of a unit) -> config. Width is the larger head dim, rounded up.
_DECODE: dict[tuple[str, int, int, int], DecodeConfig] = {
    ("hopper", 64, 1, 32): DecodeConfig(64, 4, 4, 2, merge_registers=32),
    ("hopper", 64, 1, 64): DecodeConfig(64, 4, 4, 1, copy_registers=120),
    ("hopper", 64, 2, 16): DecodeConfig(64, 4, 3, 3, copy_registers=56, merge_registers=16, short_pieces=True, lone_pieces=False),
    ("hopper", 64, 2, 32): DecodeConfig(64, 4, 3, 2, merge_registers=32),
    ("hopper", 64, 2, 64): DecodeConfig(64, 4, 4, 1, copy_registers=120, wide=True),
    ("hopper", 128, 1, 16): DecodeConfig(64, 4, 4, 2, short_pieces=True),
    ("hopper", 128, 1, 64): DecodeConfig(64, 4, 4, 1, copy_registers=120),
    ("hopper", 128, 2, 16): DecodeConfig(64, 4, 3, 2, copy_registers=80, short_pieces=True),
    ("hopper", 128, 2, 32): DecodeConfig(64, 4, 6, 1, copy_registers=120),
    ("hopper", 128, 2, 64): DecodeConfig(64, 4, 4, 1, copy_registers=120, wide=True),
    ("hopper", 192, 1, 64): DecodeConfig(64, 4, 4, 1, copy_registers=120),
    ("hopper", 192, 2, 64): DecodeConfig(64, 4, 3, 1, copy_registers=120),
    ("hopper", 256, 1, 64): DecodeConfig(64, 4, 2, 1, copy_registers=120, merge_registers=32),
    ("hopper", 256, 2, 64): DecodeConfig(64, 4, 3, 1, copy_warps=8, merge_registers=32),
    ("hopper", 576, 2, 32): DecodeConfig(64, 4, 2, 1, copy_registers=168, merge_registers=32),
    ("hopper", 576, 2, 64): DecodeConfig(64, 8, 2, 1, copy_registers=104, merge_registers=32, wide=True),
    ("portable", 64, 1, 64): DecodeConfig(64, 4, 3, 2),
    ("portable", 64, 2, 64): DecodeConfig(64, 4, 3, 2),
    ("portable", 64, 4, 64): DecodeConfig(32, 8, 2, 2),
    ("portable", 128, 1, 64): DecodeConfig(64, 4, 2, 2),
    ("portable", 128, 2, 64): DecodeConfig(64, 4, 2, 2),
    ("portable", 128, 4, 64): DecodeConfig(16, 8, 2, 2),
    ("portable", 256, 1, 64): DecodeConfig(32, 4, 2, 2),
    ("portable", 256, 2, 64): DecodeConfig(32, 4, 2, 2),
    ("portable", 256, 4, 64): DecodeConfig(16, 4, 2, 2),
    ("portable", 576, 1, 64): DecodeConfig(16, 8, 2, 1),
    ("portable", 576, 2, 64): DecodeConfig(16, 8, 2, 1),
    ("portable", 576, 4, 64): DecodeConfig(16, 8, 1, 1),
}
_WIDTHS = (64, 128, 192, 256, 576)
_ROWS = (16, 32, 64)


def interpreting() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` is an NVIDIA GPU of compute capability 9.0: `wgmma` exists there and nowhere else."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` can be placed while the one before drains: NVIDIA from compute capability 9.0 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def decode_programs(device: torch.device, config: DecodeConfig) -> int:
    """Programs of the main kernel that fill the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * config.residents


@cache
def decode_config(kernel: str, head_dim: int, head_dim_v: int, kv_bytes: int, compute_bytes: int, rows: int) -> DecodeConfig:
    """Return the config of a main kernel.

    Args:
        kernel: `hopper` or `portable`.
        head_dim: D.
        head_dim_v: Dv.
        kv_bytes: bytes of a K or V element.
        compute_bytes: bytes of an operand of `tl.dot`.
        rows: of a unit.
    """
    size = 4 if compute_bytes == 4 else kv_bytes
    widths = [w for w in _WIDTHS if w >= max(head_dim, head_dim_v)]
    keys = ((kernel, width, size, most) for width in widths for most in _ROWS if most >= rows)
    return next(_DECODE[key] for key in keys if key in _DECODE)


#: (kernel, widest head dim, most rows of a unit): what the registers hold of the accumulator.
_MOST_ROWS = (("hopper", 128, 64), ("hopper", 256, 32), ("hopper", 576, 64), ("portable", 128, 64), ("portable", 256, 32), ("portable", 576, 16))


#: Wide units (head dim above 256) that are worth 64 rows each: fewer are better spread over more programs, 32 rows at a time.
_FEW_WIDE_UNITS = 32


def packed_rows(kernel: str, rows: int, head_dim: int, sequences: int) -> int:
    """Rows of a unit: 16, 32 or 64.

    Args:
        kernel: `hopper` or `portable`.
        rows: (token, head) pairs of a sequence and kv head.
        head_dim: the larger of D and Dv.
        sequences: B.
    """
    most = next(most for name, width, most in _MOST_ROWS if name == kernel and head_dim <= width)
    if head_dim > 256 and sequences * -(-rows // 64) < _FEW_WIDE_UNITS:
        most = min(most, 32)
    return min(most, max(16, 1 << max(0, rows - 1).bit_length()))
