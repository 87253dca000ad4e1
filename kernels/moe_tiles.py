# mypy: allow-untyped-defs
"""The list of tiles that `moe_gemm` works on, from the rows of each expert.

int32 records of 4: a header (number of tiles, 0, 0, 0), then for each tile (expert, the expert's first sorted row, its end
row, its first tile). Records behind the last tile have no rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.scratch import current_device, scratch
from hal.kernels.tuning import supports_pdl

__all__ = [
    "FILL",
    "WRITERS",
    "bins",
    "fill_tiles",
    "list_tiles",
    "most_tiles",
    "store_tile",
    "tiles_kernel",
    "tiles_warps",
    "write_list",
    "write_tiles",
]

#: Programs that write the list of tiles; each knows all of it and writes every so manieth record of an expert.
WRITERS = 8
#: Records without rows, or counts of zero, that a program writes at once.
FILL = 512


@triton.jit
def store_tile(tiles_ptr, at, expert, begin, end, first, ok):
    """Records `at`, where `ok`."""
    record = tiles_ptr + 4 * (1 + at)
    tl.store(record, expert, mask=ok)
    tl.store(record + 1, begin, mask=ok)
    tl.store(record + 2, end, mask=ok)
    tl.store(record + 3, first, mask=ok)


@triton.jit
def fill_tiles(tiles_ptr, total, bound, writer, writers, FILL: tl.constexpr):
    """Header (writer 0), and records without rows from `total` to `bound`."""
    if writer == 0:
        field = tl.arange(0, 4)
        tl.store(tiles_ptr + field, tl.where(field == 0, total, 0))
    nothing = tl.zeros((FILL,), tl.int32)
    for base in range(total + writer * FILL, bound, writers * FILL):
        at = base + tl.arange(0, FILL)
        store_tile(tiles_ptr, at, nothing, nothing, nothing, nothing, at < bound)


@triton.jit
def write_tiles(tiles_ptr, counts, writer, writers, rows, bound, BINS: tl.constexpr, BLOCK_M: tl.constexpr, FILL: tl.constexpr, WIDE: tl.constexpr):
    """Records of all experts from their `counts` (BINS,), which add up to `rows` at most unless `WIDE`: rows from `rows` on do not exist."""
    bin = tl.arange(0, BINS)
    if WIDE:
        sums = tl.cumsum(counts.to(tl.int64), 0)
        begin = tl.minimum(sums - counts, rows).to(tl.int32)
        end = tl.minimum(sums, rows).to(tl.int32)
    else:
        end = tl.cumsum(counts, 0)
        begin = end - counts
    tiles = tl.cdiv(end - begin, BLOCK_M)
    first = tl.cumsum(tiles, 0) - tiles
    for i in range(writer, tl.max(tiles, 0), writers):
        store_tile(tiles_ptr, first + i, bin, begin, end, first, i < tiles)
    fill_tiles(tiles_ptr, tl.sum(tiles, 0), bound, writer, writers, FILL)


@triton.jit(do_not_specialize=["rows", "local", "bound"])
def tiles_kernel(
    tiles_ptr, sizes_ptr, rows, local, bound, BINS: tl.constexpr, BLOCK_M: tl.constexpr, FILL: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    """The list of tiles for given sizes; a negative size counts as 0."""
    pdl_begin(PDL)
    bin = tl.arange(0, BINS)
    counts = tl.maximum(tl.load(sizes_ptr + bin, mask=bin < local, other=0), 0)
    write_tiles(tiles_ptr, counts, tl.program_id(0), tl.num_programs(0), rows, bound, BINS, BLOCK_M, FILL, WIDE)


def most_tiles(rows: int, experts: int, block_m: int) -> int:
    """Most tiles that `rows` rows of `experts` experts can make: all but one row of each expert's last tile may be empty."""
    return (rows + min(rows, experts) * (block_m - 1)) // block_m


def bins(experts: int) -> int:
    """Width of a vector over the experts."""
    return max(16, triton.next_power_of_2(experts))


def tiles_warps(width: int) -> int:
    """Warps of `tiles_kernel` for a vector of `width` experts."""
    return 4 if width <= 512 else 8


def write_list(tiles: Tensor, sizes: Tensor, rows: int, experts: int, bound: int, block_m: int, *, trusted: bool) -> None:
    """Launch `tiles_kernel`; `trusted`: no size is negative and they add up to `rows` at most."""
    width, pdl = bins(experts), supports_pdl(sizes.device)
    tiles_kernel[(min(WRITERS, triton.cdiv(bound, 16)),)](
        tiles, sizes, rows, experts, bound, width, block_m, FILL, not trusted, pdl,
        num_warps=tiles_warps(width), num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
    )  # fmt: skip


def list_tiles(sizes: Tensor, rows: int, block_m: int) -> Tensor:
    """The list of tiles for sizes that are on the device.

    Args:
        sizes: (E,) int32.
        rows: of the sorted tensor; sizes that add up to more are cut.
        block_m: rows of a tile.

    Returns:
        (4 + 4 * most_tiles(...),) int32 of the scratch memory.
    """
    experts = sizes.shape[0]
    bound = most_tiles(rows, experts, block_m)
    tiles = scratch("moe_tiles", 4 + 4 * bound, torch.int32, sizes.device)
    with current_device(sizes.device):
        write_list(tiles, sizes, rows, experts, bound, block_m, trusted=False)
    return tiles
