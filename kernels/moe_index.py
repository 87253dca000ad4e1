"""Which rows go to which expert: a stable counting sort of slots (token, choice) by expert, on the device.

Slot `s = t * k + j` is choice j of token t. Sorted, experts ascend and inside one expert slots ascend, so that the result is
a function of the ids alone. Skipped slots (id out of range or foreign, padding tokens) have no place.

| slots | launches |
|---|---|
| up to 128, without sizes | one program does all (`tiny_kernel`) |
| up to 4096 | places and sizes, each slot compared with all (`few_kernel`); list of tiles (`tiles_kernel`) |
| more | ranks and counts in blocks (`block_kernel`); prefix sums over the blocks (`prefix_kernel`); places and list of tiles (`place_kernel`) |

What bounds all of them is the latency of a load, of a reduction and of a launch, not throughput: no kernel loops over
loads that it could have asked for at once.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from hal.kernels.launch import pdl_options
from hal.kernels.moe_index_kernels import block_kernel, few_kernel, place_kernel, prefix_kernel, tiny_kernel
from hal.kernels.moe_routing import Routing
from hal.kernels.moe_tiles import FILL, WRITERS, bins, most_tiles, write_list
from hal.kernels.scratch import current_device, scratch
from hal.kernels.tuning import supports_pdl

__all__ = [
    "BLOCK",
    "BLOCKS",
    "COLUMNS",
    "COUNTED",
    "FEW_SLOTS",
    "PLACED",
    "TINY_SLOTS",
    "WARPS",
    "few_warps",
    "index_slots",
    "moe_index",
    "slot_warps",
    "sorted_index",
]

#: Most slots that one program sorts, by the kernel's variant.
TINY_SLOTS = (32, 128)
#: Most slots that are compared each with all, by the kernel's variant, and slots or experts of one of its programs.
FEW_SLOTS = (256, 512, 2048, 4096)
COUNTED = 16
#: Most experts for which `expert * slots + slot` surely fits 31 bits.
_MOST_EXPERTS = 1 << 18
#: Where slots are many: slots whose ranks one program finds, experts and blocks of one step of the prefix sums, slots that one program places.
BLOCK, COLUMNS, BLOCKS, PLACED = 128, 8, 512, 512
#: Warps of the programs that add up and place there.
WARPS = 8
#: Elements between whose multiples a list begins: an address of another alignment would be another variant of a kernel.
_ALIGNED = 32


def slot_warps(slots: int) -> int:
    """Warps of a program in which each thread has one slot."""
    return slots // 32


def few_warps(width: int) -> int:
    """Warps of `few_kernel` that compares `width` slots."""
    return 4 if width <= 256 else 8


def index_slots(routing: Routing, sorted_slots: Tensor, places: Tensor, sizes: Tensor | None, tiles: Tensor | None, block_m: int = 16) -> None:
    """Sort the slots.

    Args:
        routing: what the ids mean.
        sorted_slots: (T * k,) int32, written: slots by place; entries beyond the places that are taken keep what they hold.
        places: (T * k,) int32, written: place of each slot, -1 for skipped ones.
        sizes: (E,) int32, written: rows of each expert; None if nobody asks.
        tiles: (4 + 4 * most_tiles(...),) int32, written: the list of tiles of `block_m` rows (`moe_tiles`); None if nobody asks.
        block_m: rows of a tile.
    """
    slots, experts, device = routing.slots, routing.local, routing.ids.device
    bound = 0 if tiles is None else most_tiles(slots, experts, block_m)
    pdl = supports_pdl(device)
    options = {"num_stages": 1, "enable_fp_fusion": True, **pdl_options(pdl)}
    with current_device(device):
        width = next((most for most in TINY_SLOTS if slots <= most and sizes is None and tiles is not None), None)
        if width is not None:
            tiny_kernel[(1,)](sorted_slots, places, tiles, bound, *routing.arguments(), width, block_m, pdl, num_warps=slot_warps(width), **options)
            return
        if sizes is None:
            sizes = scratch("moe_sizes", experts, torch.int32, device)
        width = next((most for most in FEW_SLOTS if slots <= most and experts <= _MOST_EXPERTS), None)
        if width is not None:
            placers = triton.cdiv(slots, COUNTED)
            few_kernel[(placers + triton.cdiv(experts, COUNTED),)](
                sorted_slots, places, sizes, placers, *routing.arguments(), COUNTED, width, pdl, num_warps=few_warps(width), **options
            )
            if tiles is not None:
                write_list(tiles, sizes, slots, experts, bound, block_m, trusted=True)
            return
        blocks, columns = triton.cdiv(slots, BLOCK), triton.cdiv(experts, COLUMNS) * COLUMNS
        counts = scratch("moe_counts", blocks * columns, torch.int32, device)
        ranks = scratch("moe_ranks", slots, torch.int32, device)
        zero = torch.version.hip is None
        if not zero:
            counts.zero_()
        block_kernel[(blocks,)](ranks, counts, columns, *routing.arguments(), BLOCK, FILL, zero, pdl, num_warps=slot_warps(BLOCK), **options)
        prefix_kernel[(columns // COLUMNS,)](counts, sizes, blocks, columns, experts, COLUMNS, BLOCKS, pdl, num_warps=WARPS, **options)
        writers = 0 if tiles is None else WRITERS
        place_kernel[(writers + triton.cdiv(slots, PLACED),)](
            sorted_slots, places, tiles, bound, writers, ranks, counts, sizes, columns, slots, experts,
            bins(experts), block_m, PLACED, BLOCK, FILL, pdl, num_warps=WARPS, **options,
        )  # fmt: skip


def sorted_index(routing: Routing, block_m: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sort the slots into scratch memory.

    Args:
        routing: what the ids mean.
        block_m: rows of a tile.

    Returns:
        (sorted_slots, places, tiles, bound): the lists of `index_slots`, and the most tiles that the list of tiles can hold.
    """
    slots, device = routing.slots, routing.ids.device
    bound = most_tiles(slots, routing.local, block_m)
    second = -(-slots // _ALIGNED) * _ALIGNED
    lists = scratch("moe_index", second + slots, torch.int32, device)
    sorted_slots, places = lists[:slots], lists[second : second + slots]
    tiles = scratch("moe_tiles", 4 + 4 * bound, torch.int32, device)
    index_slots(routing, sorted_slots, places, None, tiles, block_m)
    return sorted_slots, places, tiles, bound


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
