"""Where the reference finds the keys of plain calls on a CPU, and that it attends to the same keys wherever they are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.backends import reference_attention, reference_places
from hal.backends.reference_places import Places, find
from tests.backends.reference_cases import Case, check, naive

#: 3 kv heads of 16 with pages of 4: a page of one head holds 64 values.
HEADS, PAGE_VALUES = (6, 3), 64


def places_of(case: Case, lows: list[int]) -> Places | None:
    return find(case.k_cache, case.v_cache, case.tables, lows, case.lengths)


def some_out_of_order() -> Case:
    """Four sequences, the second one empty; pages of the first and the last follow one another, those of the third do not."""
    case = Case([9, 0, 14, 3], heads=HEADS, in_order=True)
    swapped = case.tables[2, [0, 2]]
    case.k_cache[swapped.flip(0)], case.v_cache[swapped.flip(0)] = case.k_cache[swapped], case.v_cache[swapped]
    case.used[swapped.flip(0)] = case.used[swapped]
    case.tables[2, [0, 2]] = swapped.flip(0)
    return case.poison()


def test_only_pages_out_of_order_are_copied() -> None:
    case = some_out_of_order()
    places = places_of(case, [0, 0, 5, 0])
    assert places is not None
    assert [origin is None for origin in places.origins] == [False, False, True, False]
    (whole,) = places.pieces(0)
    assert (whole.k, whole.v, whole.origin) == (case.k_cache, case.v_cache, int(case.tables[0, 0]) * 4)
    (copy,) = places.pieces(2)
    assert (copy.k.shape[0], copy.origin) == (3, -4)  # the window leaves out the first of four pages
    for cache, keys in ((copy.k, case.k[2]), (copy.v, case.v[2])):
        assert torch.equal(cache.flatten(0, 1)[: 14 + copy.origin].double(), keys[-copy.origin :])


@pytest.mark.parametrize(("fits", "heads"), [(4, [1, 1, 1]), (8, [2, 1]), (11, [2, 1]), (12, [3])])
def test_a_copy_holds_the_heads_that_fit(fits: int, heads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_places, "_COPY_VALUES", fits * PAGE_VALUES)
    case = some_out_of_order()
    places = places_of(case, [0] * 4)
    assert places is not None
    head = 0
    for piece, count in zip(places.pieces(2), heads, strict=True):
        assert (piece.head, piece.k.shape[2], piece.v.shape[2]) == (head, count, count)
        assert torch.equal(piece.k.flatten(0, 1)[:14].double(), case.k[2][:, head : head + count])
        assert torch.equal(piece.rows_of(torch.arange(6.0).view(1, 6, 1), 3).flatten(), torch.arange(2.0 * head, 2.0 * (head + count)))
        head += count


def test_what_is_left_to_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    case = some_out_of_order()
    case.tables[0, 1] = case.k_cache.shape[0]
    assert places_of(case, [0] * 4) is None
    assert places_of(case, [8, 0, 0, 0]) is not None  # that page is out of the window
    monkeypatch.setattr(reference_places, "_COPY_VALUES", 3 * PAGE_VALUES)
    case = some_out_of_order()
    assert places_of(case, [0] * 4) is None
    assert places_of(case, [0, 0, 4, 0]) is not None
    monkeypatch.setattr(reference_places, "MOST_KEYS", 13)
    assert places_of(case, [0, 0, 0, 0]) is None


def interleaved(case: Case) -> Case:
    """K and V of a page beside each other: consecutive pages are not evenly spaced."""
    both = torch.stack([case.k_cache, case.v_cache], dim=1)
    case.k_cache, case.v_cache = both[:, 0], both[:, 1]
    return case


@pytest.mark.parametrize("fits", [2**20, 8 * PAGE_VALUES, 4 * PAGE_VALUES], ids=lambda fits: f"copies-of-{fits}")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("layout", ["compact", "interleaved"])
def test_plain_calls_are_served_from_any_pages(layout: str, window: int | None, fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def general(*args: Any) -> Tensor:
        raise AssertionError("this call is for views of the keys")

    monkeypatch.setattr(reference_places, "_COPY_VALUES", fits)
    monkeypatch.setattr(reference_attention, "_run", general)
    case = some_out_of_order() if layout == "compact" else interleaved(some_out_of_order())
    for q_len in (1, 3):
        q = case.query(4 * q_len)
        want = naive(q, case.k, case.v, [q_len] * 4, window=window)
        check(case.decode(q, q_len=q_len, window=window), want, torch.float32)
        out = torch.empty_like(q)
        assert case.decode(q, q_len=q_len, window=window, out=out) is out
        check(out, want, torch.float32)
    counts = [9, 0, 5, 2]
    q = case.query(sum(counts))
    for causal in (True, False):
        check(case.prefill(q, counts, window=window, causal=causal), naive(q, case.k, case.v, counts, window=window, causal=causal), torch.float32)


def test_memory_of_copies_is_kept_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_places, "_KEPT", threading.local())
    small, large = some_out_of_order(), Case([60], heads=HEADS, dtype=torch.bfloat16)
    addresses = []
    for case, inference in ((small, True), (small, False), (large, False), (small, True)):
        with torch.inference_mode(inference):
            places = places_of(case, [0] * len(case.lengths))
            assert places is not None
            (copy,) = places.pieces(places.origins.index(None))
            addresses.append(copy.k.data_ptr())
            assert copy.k.data_ptr() != copy.v.data_ptr()
            assert torch.equal(copy.k.flatten(0, 1)[0].double(), case.k[places.origins.index(None)][0])
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3]
