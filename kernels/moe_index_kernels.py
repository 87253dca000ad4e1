# mypy: allow-untyped-defs
"""Kernels of the stable counting sort of slots by expert; `moe_index` says which run when.

All of them count by comparing slots with slots. Where every slot is compared with every other, `expert * N + slot` orders
slots as the sort does, so that a slot's place is the number of smaller keys. A comparison whose sum runs down a column
stays inside a thread; one along a row ends in shuffles, and is used where the column would not fit the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.launch import pdl_begin
from hal.kernels.moe_routing import ROUTED, local_expert
from hal.kernels.moe_tiles import fill_tiles, store_tile, write_tiles

__all__ = ["block_kernel", "few_kernel", "place_kernel", "prefix_kernel", "tiny_kernel"]


@triton.jit(do_not_specialize=[*ROUTED, "bound"])
def tiny_kernel(
    sorted_ptr, places_ptr, tiles_ptr, bound, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    N: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Places and the list of tiles in one program, up to N slots, whatever the number of experts: the first slot of a tile writes its record."""
    pdl_begin(PDL)
    slot = tl.arange(0, N)
    expert = local_expert(slot, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
    key = expert * N + slot
    less = expert[:, None] < expert[None, :]
    place = tl.sum((key[:, None] < key[None, :]).to(tl.int32), 0)
    begin = tl.sum(less.to(tl.int32), 0)
    count = tl.sum((expert[:, None] == expert[None, :]).to(tl.int32), 0)
    rank = place - begin
    used = expert < local
    tl.store(places_ptr + slot, tl.where(used, place, -1), mask=slot < slots)
    tl.store(sorted_ptr + place, slot, mask=used)
    head = used & (rank % BLOCK_M == 0)
    first = tl.sum((less & head[:, None]).to(tl.int32), 0)
    store_tile(tiles_ptr, first + rank // BLOCK_M, expert, begin, begin + count, first, head)
    fill_tiles(tiles_ptr, tl.sum(head.to(tl.int32), 0), bound, 0, 1, N)


@triton.jit(do_not_specialize=[*ROUTED, "placers"])
def few_kernel(
    sorted_ptr, places_ptr, sizes_ptr, placers, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    PLACED: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to N slots, all loaded at once: the first `placers` programs place PLACED slots each, the others count PLACED experts each."""
    pdl_begin(PDL)
    other = tl.arange(0, N)
    program = tl.program_id(0)
    mine = program * PLACED + tl.arange(0, PLACED)
    expert = local_expert(other, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
    own = local_expert(mine, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
    if program < placers:
        smaller = (expert * N + other)[None, :] < (own * N + mine)[:, None]
        place = tl.sum(smaller.to(tl.int32), 1)
        used = own < local
        tl.store(places_ptr + mine, tl.where(used, place, -1), mask=mine < slots)
        tl.store(sorted_ptr + place, mine, mask=used)
    else:
        bin = (program - placers) * PLACED + tl.arange(0, PLACED)
        count = tl.sum((expert[None, :] == bin[:, None]).to(tl.int32), 1)
        tl.store(sizes_ptr + bin, count, mask=bin < local)


@triton.jit(do_not_specialize=[*ROUTED, "columns"])
def block_kernel(
    ranks_ptr, counts_ptr, columns, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    BLOCK: tl.constexpr, FILL: tl.constexpr, ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of slots -> ranks (slots,): `expert * BLOCK + rank inside the block` or -1; counts (block, columns) of its experts.

    Without ZERO the counts are zero before: a barrier orders a program's stores on NVIDIA, but does not wait for them on AMD.
    """
    pdl_begin(PDL)
    place = tl.arange(0, BLOCK)
    slot = tl.program_id(0) * BLOCK + place
    row_ptr = counts_ptr + tl.program_id(0).to(tl.int64) * columns
    expert = local_expert(slot, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
    if ZERO:
        for base in range(0, columns, FILL):
            at = base + tl.arange(0, FILL)
            tl.store(row_ptr + at, tl.zeros((FILL,), tl.int32), mask=at < columns)
    # Earlier slots of the same expert have the `place` keys just below the own one.
    key = expert * BLOCK + place
    below = (key[None, :] - 1 - key[:, None]).to(tl.uint32, bitcast=True)
    rank = tl.sum((below < place[None, :].to(tl.uint32, bitcast=True)).to(tl.int32), 0)
    used = expert < local
    tl.store(ranks_ptr + slot, tl.where(used, expert * BLOCK + rank, -1), mask=slot < slots)
    if ZERO:
        tl.debug_barrier()
    tl.atomic_add(row_ptr + expert, 1, mask=used, sem="relaxed")


@triton.jit(do_not_specialize=["blocks", "columns", "local"])
def prefix_kernel(counts_ptr, sizes_ptr, blocks, columns, local, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """counts (blocks, columns) -> in each column the sum of the rows before, and their total."""
    pdl_begin(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, blocks, ROWS):
        row = begin + tl.arange(0, ROWS)
        at = counts_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        ok = (row < blocks)[:, None]
        counts = tl.load(at, mask=ok, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=ok)
        total += tl.sum(counts, 0)
    tl.store(sizes_ptr + column, total, mask=column < local)


@triton.jit(do_not_specialize=["bound", "writers", "columns", "slots", "local"])
def place_kernel(
    sorted_ptr, places_ptr, tiles_ptr, bound, writers, ranks_ptr, counts_ptr, sizes_ptr, columns, slots, local,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `writers` programs write the list of tiles, the others place PLACED slots each."""
    pdl_begin(PDL)
    program = tl.program_id(0)
    bin = tl.arange(0, BINS)
    sizes = tl.load(sizes_ptr + bin, mask=bin < local, other=0)
    if program < writers:
        if tiles_ptr is not None:  # else there are no writers
            write_tiles(tiles_ptr, sizes, program, writers, slots, bound, BINS, BLOCK_M, FILL, False)
    else:
        slot = (program - writers) * PLACED + tl.arange(0, PLACED)
        exists = slot < slots
        rank = tl.load(ranks_ptr + slot, mask=exists, other=-1)
        used = rank >= 0
        expert = tl.where(used, rank // BLOCK, 0)
        offset = tl.load(counts_ptr + (slot // BLOCK).to(tl.int64) * columns + expert, mask=used, other=0)
        place = tl.gather(tl.cumsum(sizes, 0) - sizes, expert, 0) + offset + rank % BLOCK
        tl.store(places_ptr + slot, tl.where(used, place, -1), mask=exists)
        tl.store(sorted_ptr + place, slot, mask=used)
