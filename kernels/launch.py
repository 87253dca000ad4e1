# mypy: allow-untyped-defs
"""Programmatic dependent launch: a kernel's programs are placed while the kernel before it drains (Hopper and later).

Most kernels call `pdl_begin` first: every program waits there until all work before this kernel is done and its writes
are visible, and then lets the next kernel be placed, which waits in turn. So the order of memory is that of ordinary
launches; only the launch latency between two kernels is hidden. The reduction releases first and waits only where it
reads partials (program 0 always, so that its end means the end of the main kernel).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["pdl_begin", "pdl_options", "pdl_release", "pdl_wait", "prefetch", "prefetch_rows"]

#: Bytes that one prefetch asks for.
_SECTOR = tl.constexpr(32)


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all work before this kernel is done and visible."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_release(PDL: tl.constexpr):
    """Allow the next kernel to be placed once every program of this one has come here or returned."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    """What most kernels do first: what follows them may rely on everything before them."""
    pdl_wait(PDL)
    pdl_release(PDL)


@triton.jit
def prefetch(pointers):
    """Ask L2 for the sectors of memory at `pointers`; for what does not depend on the kernel before, ahead of the wait (NVIDIA)."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_rows(matrix, rows, depth, stride, COLUMNS: tl.constexpr):
    """Ask L2 for the first COLUMNS columns of rows (R,) that exist, of a matrix with `depth` contiguous columns; see `prefetch`."""
    SPAN: tl.constexpr = _SECTOR * 8 // matrix.dtype.element_ty.primitive_bitwidth
    sector = tl.minimum(tl.arange(0, COLUMNS // SPAN) * SPAN, depth - 1)
    prefetch(matrix + (rows.to(tl.int64)[:, None] * stride + sector[None, :]))


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel that takes part; the AMD backend does not know the option."""
    return {"launch_pdl": True} if pdl else {}
