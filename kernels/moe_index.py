# mypy: allow-untyped-defs
"""Which rows go to which expert: a stable counting sort of slots (token, choice) by expert, on the device.

Slot `s = t * k + j` is choice j of token t. Sorted, experts ascend and inside one expert slots ascend, so that the result is
a function of the ids alone. Skipped slots (id out of range or foreign, padding tokens) count as expert E and end up last.

Up to `FEW_SLOTS` slots one launch does it: a slot's place is the number of slots whose (expert, slot) is smaller, counted by
comparing each with all, while a few other programs make the histogram and what follows from it. More slots take three
launches: a histogram per block of slots; its prefix sums over the blocks, per expert; places inside the blocks.

The list of tiles that `moe_gemm` works on comes out of the same launch: int32 records of 4, a header (number of tiles, 0, 0,
0), then for each tile (expert, the expert's first sorted row, its end row, its first tile). Records behind the last tile
have no rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.scratch import current_device, scratch
from hal.kernels.tuning import supports_pdl

__all__ = [
    "FEW_SLOTS", "Routing", "block_counts_kernel", "block_prefix_kernel", "few_slots_kernel", "index_slots", "list_tiles", "local_expert",
    "many_slots_kernel", "moe_index", "most_tiles", "tiles_kernel",
]  # fmt: skip

#: Most slots that are compared each with all.
FEW_SLOTS = 4096
#: Slots whose places one program finds: few, so that all multiprocessors take part.
_PLACED = 16
_CHUNK = 256
#: Slots of a block where they are many.
_BLOCK = 512
_COMPARED = 16
#: Programs that write the list of tiles; each knows all of it and writes every so manieth record of an expert.
_WRITERS = 4
_NO_RECORD = 1024


@dataclass(frozen=True)
class Routing:
    """What ids mean.

    Attributes:
        ids: (T, k) int32, last dimension contiguous.
        num_experts: experts that the ids speak of.
        start: id of the first local expert, without a map.
        local: E, experts held here.
        expert_map: (num_experts,) int32 id -> local expert or -1, or None.
        num_valid_tokens: int32 of one element, or None for all: later tokens are padding.
    """

    ids: Tensor
    num_experts: int
    start: int
    local: int
    expert_map: Tensor | None = None
    num_valid_tokens: Tensor | None = None

    @classmethod
    def of(
        cls,
        ids: Tensor,
        num_experts: int,
        *,
        local: int | None = None,
        expert_range: tuple[int, int] | None = None,
        expert_map: Tensor | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Routing:
        """From the arguments of the ops; `local` is needed with a map."""
        start, end = expert_range or (0, num_experts)
        held = end - start if expert_map is None else num_experts if local is None else local
        return cls(ids, num_experts, start, held, expert_map, num_valid_tokens)

    @property
    def slots(self) -> int:
        """T * k."""
        return self.ids.shape[0] * self.ids.shape[1]

    def arguments(self) -> tuple[object, ...]:
        """What `local_expert` is given after the slots."""
        tokens, top_k = self.ids.shape
        return (
            self.ids, self.expert_map, self.num_valid_tokens, tokens * top_k, top_k, self.ids.stride(0), self.num_experts, self.start, self.local,
        )  # fmt: skip


@triton.jit
def local_expert(slot, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local):
    """Local expert of each slot; `local` for slots that are skipped or beyond the last.

    Loads go past L1, so that a kernel may call this before it waits for the one before it.
    """
    token = slot // top_k
    ok = slot < slots
    if valid_ptr is not None:
        ok = ok & (token < tl.load(valid_ptr, cache_modifier=".cg"))
    expert = tl.load(ids_ptr + token.to(tl.int64) * stride_it + slot % top_k, mask=ok, other=-1, cache_modifier=".cg")
    ok = ok & (expert >= 0) & (expert < num_experts)
    expert = tl.where(ok, expert, 0) - start if map_ptr is None else tl.load(map_ptr + expert, mask=ok, other=-1, cache_modifier=".cg")
    ok = ok & (expert >= 0) & (expert < local)
    return tl.where(ok, expert, local)


@triton.jit
def _write_tiles(tiles_ptr, sizes_ptr, counts, writer, writers, rows, local, bound, BINS: tl.constexpr, BLOCK_M: tl.constexpr, FILL: tl.constexpr):
    """Sizes (unless None) and records of all experts, from their `counts` (BINS,); rows from `rows` on do not exist."""
    bin = tl.arange(0, BINS)
    counts = tl.where(bin < local, counts, 0)
    if sizes_ptr is not None:
        tl.store(sizes_ptr + bin, counts, mask=bin < tl.where(writer == 0, local, 0))
    if tiles_ptr is not None:
        sums = tl.cumsum(counts, 0)
        begin = tl.minimum(sums - counts, rows).to(tl.int32)
        end = tl.minimum(sums, rows).to(tl.int32)
        tiles = tl.cdiv(end - begin, BLOCK_M)
        first = tl.cumsum(tiles, 0) - tiles
        total = tl.sum(tiles, 0)
        most = tl.max(tiles, 0)
        if writer == 0:
            field = tl.arange(0, 4)
            tl.store(tiles_ptr + field, tl.where(field == 0, total, 0))
        for i in range(writer, most, writers):
            at = tiles_ptr + 4 * (1 + first + i)
            ok = i < tiles
            tl.store(at, bin, mask=ok)
            tl.store(at + 1, begin, mask=ok)
            tl.store(at + 2, end, mask=ok)
            tl.store(at + 3, first, mask=ok)
        for base in range(total + writer * FILL, bound, writers * FILL):
            empty = base + tl.arange(0, FILL)
            ok = empty < bound
            tl.store(tiles_ptr + 4 * (1 + empty) + 1, tl.zeros((FILL,), tl.int32), mask=ok)
            tl.store(tiles_ptr + 4 * (1 + empty) + 2, tl.zeros((FILL,), tl.int32), mask=ok)


@triton.jit(do_not_specialize=["slots", "top_k", "num_experts", "start", "local", "bound", "placers", "stride_it"])
def few_slots_kernel(
    sorted_ptr, places_ptr, sizes_ptr, tiles_ptr, bound, placers,
    ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, PLACED: tl.constexpr, CHUNK: tl.constexpr, FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `placers` programs find places, the others write sizes and tiles."""
    pdl_begin(PDL)
    program = tl.program_id(0)
    if program < placers:
        mine = program * PLACED + tl.arange(0, PLACED)
        own = local_expert(mine, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
        smaller = tl.zeros((PLACED, CHUNK), tl.int32)
        for begin in range(0, slots, CHUNK):
            other = begin + tl.arange(0, CHUNK)
            expert = local_expert(other, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
            before = (expert[None, :] < own[:, None]) | ((expert[None, :] == own[:, None]) & (other[None, :] < mine[:, None]))
            smaller += (before & (other < slots)[None, :]).to(tl.int32)
        place = tl.sum(smaller, 1)
        exists = mine < slots
        tl.store(places_ptr + mine, tl.where(own < local, place, -1), mask=exists)
        tl.store(sorted_ptr + place, mine, mask=exists)
    else:
        counts = tl.zeros((BINS,), tl.int32)
        for begin in range(0, slots, CHUNK):
            other = begin + tl.arange(0, CHUNK)
            expert = local_expert(other, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
            counts += tl.histogram(expert, BINS)
        writer = program - placers
        _write_tiles(tiles_ptr, sizes_ptr, counts, writer, tl.num_programs(0) - placers, slots, local, bound, BINS, BLOCK_M, FILL)


@triton.jit(do_not_specialize=["slots", "top_k", "num_experts", "start", "local", "stride_it"])
def block_counts_kernel(
    counts_ptr, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Histogram of one block of slots -> counts (block, BINS)."""
    pdl_begin(PDL)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = local_expert(slot, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
    counts = tl.histogram(expert, BINS)
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["blocks"])
def block_prefix_kernel(counts_ptr, totals_ptr, blocks, BINS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """counts (blocks, BINS) -> in each column the sum of the rows before, and their total."""
    pdl_begin(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, blocks, ROWS):
        row = begin + tl.arange(0, ROWS)
        at = counts_ptr + row.to(tl.int64)[:, None] * BINS + column[None, :]
        ok = (row < blocks)[:, None]
        counts = tl.load(at, mask=ok, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=ok)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + column, total)


@triton.jit(do_not_specialize=["slots", "top_k", "num_experts", "start", "local", "bound", "blocks", "stride_it"])
def many_slots_kernel(
    sorted_ptr, places_ptr, sizes_ptr, tiles_ptr, bound, counts_ptr, totals_ptr, blocks,
    ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, COMPARED: tl.constexpr, FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs place a block of slots each, the others write sizes and tiles."""
    pdl_begin(PDL)
    bin = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bin)
    program = tl.program_id(0)
    if program < blocks:
        mine = program * BLOCK + tl.arange(0, BLOCK)
        own = local_expert(mine, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
        place = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, BLOCK, COMPARED):
            other = program * BLOCK + begin + tl.arange(0, COMPARED)
            expert = local_expert(other, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
            before = (expert[None, :] == own[:, None]) & (other[None, :] < mine[:, None])
            place += tl.sum(before.to(tl.int32), 1)
        place += tl.gather(tl.cumsum(totals, 0) - totals, own, 0)
        exists = mine < slots
        place += tl.load(counts_ptr + program.to(tl.int64) * BINS + own, mask=exists, other=0)
        tl.store(places_ptr + mine, tl.where(own < local, place, -1), mask=exists)
        tl.store(sorted_ptr + place, mine, mask=exists)
    else:
        _write_tiles(tiles_ptr, sizes_ptr, totals, program - blocks, tl.num_programs(0) - blocks, slots, local, bound, BINS, BLOCK_M, FILL)


@triton.jit(do_not_specialize=["rows", "local", "bound"])
def tiles_kernel(tiles_ptr, sizes_ptr, rows, local, bound, BINS: tl.constexpr, BLOCK_M: tl.constexpr, FILL: tl.constexpr, PDL: tl.constexpr):
    """The list of tiles for given sizes; a negative size counts as 0, rows from `rows` on do not exist."""
    pdl_begin(PDL)
    bin = tl.arange(0, BINS)
    counts = tl.maximum(tl.load(sizes_ptr + bin, mask=bin < local, other=0), 0).to(tl.int64)  # sums of any sizes fit
    _write_tiles(tiles_ptr, None, counts, tl.program_id(0), tl.num_programs(0), rows, local, bound, BINS, BLOCK_M, FILL)


def most_tiles(rows: int, experts: int, block_m: int) -> int:
    """Most tiles that `rows` rows of `experts` experts can make: all but one row of each expert's last tile may be empty."""
    return (rows + min(rows, experts) * (block_m - 1)) // block_m


def _bins(experts: int) -> int:
    """Histogram bins: one for each expert and one for skipped slots."""
    return max(16, triton.next_power_of_2(experts + 1))


def _warps(bins: int) -> int:
    return 4 if bins <= 512 else 8


def index_slots(routing: Routing, sorted_slots: Tensor, places: Tensor, sizes: Tensor | None, tiles: Tensor | None, block_m: int = 16) -> None:
    """Sort the slots.

    Args:
        routing: what the ids mean.
        sorted_slots: (T * k,) int32, written: slots by place, skipped ones last.
        places: (T * k,) int32, written: place of each slot, -1 for skipped ones.
        sizes: (E,) int32, written: rows of each expert; None if nobody asks.
        tiles: (4 + 4 * most_tiles(...),) int32, written: the list of tiles of `block_m` rows; None if nobody asks.
        block_m: rows of a tile.
    """
    slots, bins, device = routing.slots, _bins(routing.local), routing.ids.device
    bound = 0 if tiles is None else most_tiles(slots, routing.local, block_m)
    pdl = supports_pdl(device)
    options = {"num_warps": _warps(bins), "num_stages": 1, "enable_fp_fusion": True, **pdl_options(pdl)}
    with current_device(device):
        if slots <= FEW_SLOTS:
            placers = triton.cdiv(slots, _PLACED)
            few_slots_kernel[(placers + _WRITERS,)](
                sorted_slots, places, sizes, tiles, bound, placers, *routing.arguments(), bins, block_m, _PLACED, _CHUNK, _NO_RECORD, pdl, **options
            )
            return
        blocks = triton.cdiv(slots, _BLOCK)
        counts = scratch("moe_counts", blocks * bins, torch.int32, device)
        totals = scratch("moe_totals", bins, torch.int32, device)
        block_counts_kernel[(blocks,)](counts, *routing.arguments(), bins, _BLOCK, pdl, **options)
        block_prefix_kernel[(bins // 16,)](counts, totals, blocks, bins, 16, 64, pdl, **options)
        many_slots_kernel[(blocks + _WRITERS,)](
            sorted_slots, places, sizes, tiles, bound, counts, totals, blocks, *routing.arguments(),
            bins, block_m, _BLOCK, _COMPARED, _NO_RECORD, pdl, **options,
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
    experts, bins, pdl = sizes.shape[0], _bins(sizes.shape[0]), supports_pdl(sizes.device)
    bound = most_tiles(rows, experts, block_m)
    tiles = scratch("moe_tiles", 4 + 4 * bound, torch.int32, sizes.device)
    with current_device(sizes.device):
        tiles_kernel[(_WRITERS,)](
            tiles, sizes, rows, experts, bound, bins, block_m, _NO_RECORD, pdl,
            num_warps=_warps(bins), num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
        )  # fmt: skip
    return tiles


def moe_index(routing: Routing, dst_to_src: Tensor, src_to_dst: Tensor, expert_sizes: Tensor) -> None:
    """The op `moe_index`: write the sorted order, its inverse and the rows of each expert.

    Args:
        routing: what the ids mean.
        dst_to_src: (T * k,) int32.
        src_to_dst: (T * k,) int32.
        expert_sizes: (E,) int32.
    """
    if routing.slots == 0 or routing.local == 0:
        src_to_dst.fill_(-1)
        expert_sizes.zero_()
        return
    index_slots(routing, dst_to_src, src_to_dst, expert_sizes, None)
