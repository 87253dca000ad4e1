# mypy: allow-untyped-defs
"""A streaming read: how fast this GPU reads memory when nothing else is to be done.

Each program walks over blocks of the tensor, adds up 16-byte loads as int32 and stores one number, so that no load can
be left out. Which block, warps and programs per multiprocessor are best differs between devices: the caller tries
`CONFIGS` and keeps the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.compile_case import CompileCase, pointer
from hal.kernels.scratch import current_device

__all__ = ["CONFIGS", "ReadConfig", "compile_cases", "stream_read"]


@dataclass(frozen=True)
class ReadConfig:
    """int32 elements of a block, warps of a program, programs per multiprocessor (0: one program per block)."""

    block: int
    warps: int
    programs: int

    def __str__(self) -> str:
        programs = f"{self.programs} programs/SM" if self.programs else "a program per block"
        return f"blocks of {self.block * 4} bytes, {self.warps} warps, {programs}"


CONFIGS = (
    ReadConfig(2048, 4, 0),
    ReadConfig(4096, 4, 0),
    ReadConfig(8192, 8, 0),
    ReadConfig(16384, 8, 0),
    ReadConfig(4096, 4, 8),
    ReadConfig(8192, 8, 4),
    ReadConfig(4096, 8, 8),
)
#: A tensor's bytes must be a multiple of this.
_UNIT = 4 * max(config.block for config in CONFIGS)


@triton.jit
def _read_kernel(x_ptr, out_ptr, blocks, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        total += tl.load(x_ptr + tl.cast(block, tl.int64) * BLOCK + offsets)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def stream_read(x: Tensor, config: ReadConfig = CONFIGS[1]) -> Tensor:
    """Read every byte of a tensor once.

    Args:
        x: contiguous, of any dtype, its bytes a multiple of 65536.
        config: how to read.

    Returns:
        (programs,) int32, the sums of each program: their total is the sum of the tensor's 32-bit words, modulo 2**32.
    """
    if not x.is_contiguous() or x.nbytes % _UNIT:
        raise ValueError(f"stream_read: a contiguous tensor of a multiple of {_UNIT} bytes is needed, this one has {x.nbytes}")
    words = x.view(-1).view(torch.int32)
    blocks = words.shape[0] // config.block
    programs = blocks
    if config.programs and x.is_cuda:
        programs = min(blocks, config.programs * torch.cuda.get_device_properties(x.device).multi_processor_count)
    out = torch.empty(programs, dtype=torch.int32, device=x.device)
    if programs:
        with current_device(x.device):
            _read_kernel[(programs,)](words, out, blocks, config.block, num_warps=config.warps, num_stages=1, enable_fp_fusion=True)
    return out


def compile_cases() -> list[CompileCase]:
    """Every variant that `stream_read` may ask for."""
    types = {"x_ptr": pointer(torch.int32), "out_ptr": pointer(torch.int32), "blocks": "i32"}
    shapes = sorted({(config.block, config.warps) for config in CONFIGS})
    return [CompileCase(f"stream_read/{block}/w{warps}", _read_kernel, types, {"BLOCK": block}, warps, 1, no_spills=True) for block, warps in shapes]
