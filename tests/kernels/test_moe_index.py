"""The sort of slots by expert, and the list of tiles that follows from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.moe_naive import GARBAGE, local_ids, poison


def naive_index(ids: Tensor, experts: int, options: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """(sorted slots, place of each slot, sizes)."""
    flat = local_ids(ids, experts, options).flatten().tolist()
    order = [s for e in range(experts) for s, found in enumerate(flat) if found == e]
    places = [-1] * len(flat)
    for place, slot in enumerate(order):
        places[slot] = place
    return order, places, [flat.count(e) for e in range(experts)]


def naive_tiles(sizes: list[int], rows: int, block_m: int) -> list[tuple[int, int, int, int]]:
    tiles, begin, first = [], 0, 0
    for e, size in enumerate(sizes):
        end = min(begin + max(size, 0), rows)
        count = -(-(end - begin) // block_m)
        tiles += [(e, begin, end, first)] * count
        begin, first = end, first + count
    return tiles


def check_tiles(tiles: Tensor, bound: int, wanted: list[tuple[int, int, int, int]]) -> None:
    records = tiles[: 4 + 4 * bound].view(-1, 4).cpu().tolist()
    assert records[0] == [len(wanted), 0, 0, 0]
    assert len(wanted) <= bound
    assert [tuple(r) for r in records[1 : 1 + len(wanted)]] == wanted
    assert all(r[1] == r[2] for r in records[1 + len(wanted) :]), "records behind the last tile must have no rows"


def check_index(device: torch.device, ids: Tensor, experts: int, block_m: int = 16, **options: Any) -> None:
    from hal.kernels.moe_index import index_slots
    from hal.kernels.moe_routing import Routing
    from hal.kernels.moe_tiles import most_tiles

    order, places, sizes = naive_index(ids, experts, options)
    spoken = options.pop("num_experts", options["expert_map"].shape[0] if "expert_map" in options else experts)
    options = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in options.items()}
    routing = Routing.of(ids.to(device), spoken, local=experts, **options)
    bound = most_tiles(routing.slots, experts, block_m)
    order_out, places_out, sizes_out, tiles = (
        torch.full((n,), 0x7F7F7F7F, dtype=torch.int32, device=device) for n in (routing.slots, routing.slots, experts, 4 + 4 * bound)
    )
    poison()
    for wanted in (None, sizes_out):  # without sizes, few slots take one launch
        index_slots(routing, order_out, places_out, wanted, tiles, block_m)
        assert order_out[: len(order)].tolist() == order
        assert places_out.tolist() == places
        check_tiles(tiles, bound, naive_tiles(sizes, routing.slots, block_m))
        for tensor in (order_out, places_out, tiles):
            tensor.fill_(0x7F7F7F7F)
    assert sizes_out.tolist() == sizes


@pytest.fixture(params=[(), ("TINY_SLOTS",), ("TINY_SLOTS", "FEW_SLOTS")], ids=["tiny", "few", "many"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to sort, whatever the number of slots."""
    for name in request.param:
        monkeypatch.setattr(f"hal.kernels.moe_index.{name}", ())


@pytest.mark.parametrize("experts", [1, 2, 3, 7, 13, 60, 128, 257, 1025])
@pytest.mark.parametrize("tokens", [1, 5, 33, 260])
def test_random_ids(device: torch.device, tokens: int, experts: int) -> None:
    g = torch.Generator().manual_seed(tokens + experts)
    check_index(device, torch.randint(0, experts, (tokens, 2), generator=g, dtype=torch.int32), experts)


@pytest.mark.parametrize("slots", [1, 31, 32, 33, 127, 128, 129, 255, 257, 512, 513, 1025])
def test_slot_counts_around_the_blocks(device: torch.device, slots: int) -> None:
    g = torch.Generator().manual_seed(slots)
    check_index(device, torch.randint(-1, 9, (slots, 1), generator=g, dtype=torch.int32), 8)


@pytest.mark.parametrize("block_m", [16, 128])
def test_all_on_one_expert(device: torch.device, block_m: int) -> None:
    for expert in (0, 4, 8):
        check_index(device, torch.full((300, 1), expert, dtype=torch.int32), 9, block_m)


def test_bad_ids(device: torch.device) -> None:
    ids = torch.tensor([[0, -1, 6], [7, 5, 5], [*GARBAGE], [6, 1, 0]], dtype=torch.int32)
    check_index(device, ids, 7)
    check_index(device, torch.full((20, 2), -1, dtype=torch.int32), 7)


def test_strided_ids(device: torch.device) -> None:
    g = torch.Generator().manual_seed(3)
    check_index(device, torch.randint(0, 5, (9, 7), generator=g, dtype=torch.int32)[:, :3], 5)


def test_range_map_and_valid_tokens(device: torch.device) -> None:
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(-2, 12, (40, 3), generator=g, dtype=torch.int32)
    check_index(device, ids, 4, expert_range=(3, 7), num_experts=10)
    expert_map = torch.tensor([3, -1, 0, 7, 1, -1, 2, 10**6, -9, 4], dtype=torch.int32)
    check_index(device, ids, 5, expert_map=expert_map)
    for valid in (0, 1, 17, 40, 99, -1, -(2**30) + 5, 2**31 - 1):
        check_index(device, ids, 10, num_valid_tokens=torch.tensor([valid], dtype=torch.int32))


def test_op_fills_what_it_defines(device: torch.device) -> None:
    from hal.kernels.moe_index import moe_index
    from hal.kernels.moe_routing import Routing

    for shape, experts in (((0, 2), 3), ((3, 2), 0)):
        slots = shape[0] * shape[1]
        lists = [torch.full((n,), 77, dtype=torch.int32, device=device) for n in (slots, slots, experts)]
        moe_index(Routing.of(torch.zeros(shape, dtype=torch.int32, device=device), experts), *lists)
        assert lists[1].tolist() == [-1] * slots
        assert lists[2].tolist() == [0] * experts
    ids = torch.tensor([[2, 0], [2, -1]], dtype=torch.int32, device=device)
    lists = [torch.full((n,), 77, dtype=torch.int32, device=device) for n in (4, 4, 3)]
    moe_index(Routing.of(ids, 3), *lists)
    assert [lists[0][:3].tolist(), lists[1].tolist(), lists[2].tolist()] == [[1, 0, 2], [1, 0, 2, -1], [1, 0, 2]]


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([3, 0, 20, 16], 39),
        ([0, 0, 0], 8),
        ([5], 5),
        ([8, 8, 8], 10),
        ([-4, 3, 2**20], 20),
        ([17] * 20, 400),
        ([2**31 - 1] * 3, 40),
        ([2**31 - 1, 1, -(2**31)], 20),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles_of_given_sizes(device: torch.device, sizes: list[int], rows: int, block_m: int) -> None:
    from hal.kernels.moe_tiles import list_tiles, most_tiles

    poison()
    tiles = list_tiles(torch.tensor(sizes, dtype=torch.int32, device=device), rows, block_m)
    check_tiles(tiles, most_tiles(rows, len(sizes), block_m), naive_tiles(sizes, rows, block_m))


def test_bound_is_enough_and_tight() -> None:
    from hal.kernels.moe_tiles import most_tiles

    def worst(rows: int, experts: int, block_m: int) -> int:
        """By trying: one row each for as many experts as possible, the rest on one of them."""
        used = min(rows, experts)
        return max((others + -(-(rows - others) // block_m) for others in range(used)), default=0)

    for rows in range(70):
        for experts in (1, 2, 5, 60):
            for block_m in (16, 32):
                assert worst(rows, experts, block_m) <= most_tiles(rows, experts, block_m) <= worst(rows, experts, block_m) + experts
