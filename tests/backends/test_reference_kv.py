"""`write_kv` of the reference: every layout and dtype against a slot-by-slot loop, and no other slot changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.backends import reference_kv
from hal.backends.reference_kv import write_kv
from hal.ops.layouts import KV_LAYOUTS, cache_shapes

PAGES, P, HEADS, D, DV = 5, 4, 3, 24, 16
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SLOTS = [7, -1, 19, 20, 0, 2**31 - 1, 12]


@pytest.fixture(params=["host", "device"], autouse=True)
def selection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both ways to skip slots: reading them, and without reading."""
    monkeypatch.setattr(reference_kv, "on_host", lambda t: request.param == "host")


def make_caches(layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caches full of a recognisable byte."""
    shapes = cache_shapes(layout, PAGES, P, HEADS, D, DV, dtype.itemsize)
    return tuple(torch.full((math.prod(s) * dtype.itemsize,), 0x35, dtype=torch.uint8).view(dtype).view(s) for s in shapes)  # type: ignore[return-value]


def row(cache: Tensor, layout: str, slot: int, is_k: bool) -> Tensor:
    """The (Hkv, D) or (Hkv, Dv) that a slot holds, as bytes of its elements: a naive reading of the layout table."""
    page, offset = divmod(slot, P)
    if cache.element_size() == 1:
        cache = cache.view(torch.uint8)
    if layout == "NHD":
        return cache[page, offset]
    if layout == "HND" or (layout == "HND_SPLIT" and not is_k):
        return cache[page, :, offset]
    if is_k:
        return cache[page, :, :, offset].reshape(HEADS, -1)
    return cache[page, :, :, offset]


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest values of a quantised dtype for fp32 x, by search over all of them, ties to even."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = codes.double()
    codes, values = codes.view(torch.uint8)[values.isfinite()], values[values.isfinite()]
    distance = (x.double().clamp(values.min(), values.max())[..., None] - values).abs()
    ties = distance == distance.amin(-1, keepdim=True)
    even = (codes % 2 == 0) & (values != 0) | (values == 0) & (codes == 0)
    nearest = codes[(ties * (1 + even.int())).argmax(-1)]
    nan = torch.tensor(math.nan).to(dtype) if dtype in FP8 else torch.tensor(0, dtype=dtype)
    return torch.where(x.isnan(), nan.view(torch.uint8), nearest)


def rows_for(dtype: torch.dtype, tokens: int = 9) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    packed = (torch.randn(tokens, HEADS, D + DV + 3, generator=random) * 30).to(dtype)
    return packed[..., :D], packed[..., D : D + DV]


@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_go_to_their_slots_and_nowhere_else(layout: str, dtype: torch.dtype, index: torch.dtype) -> None:
    key, value = rows_for(dtype)
    caches, before = make_caches(layout, dtype), make_caches(layout, dtype)
    write_kv(key, value, *caches, torch.tensor(SLOTS).to(index), kv_layout=layout)
    for cache, old, new, is_k in zip(caches, before, (key, value), (True, False), strict=True):
        for slot in range(PAGES * P):
            expected = new[SLOTS.index(slot)] if slot in SLOTS else row(old, layout, slot, is_k)
            assert torch.equal(row(cache, layout, slot, is_k), expected), slot


@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("dtype", [*FP8, torch.int8])
@pytest.mark.parametrize("kind", ["float", "scalar", "one", "head"])
def test_quantised_rows(layout: str, dtype: torch.dtype, kind: str) -> None:
    make: Callable[[float], Any] = {
        "float": lambda s: s,
        "scalar": torch.tensor,
        "one": lambda s: torch.tensor([s]),
        "head": lambda s: torch.tensor([s, 2 * s, 0.1 * s]),
    }[kind]
    key, value = rows_for(torch.float32)
    key[0, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1e9])
    scales = make(0.37), make(0.11)
    caches, before = make_caches(layout, dtype), make_caches(layout, dtype)
    write_kv(key, value, *caches, torch.tensor(SLOTS), kv_layout=layout, k_scale=scales[0], v_scale=scales[1])
    for cache, old, new, scale, is_k in zip(caches, before, (key, value), scales, (True, False), strict=True):
        exact = stored(new / torch.as_tensor(scale, dtype=torch.float32).view(-1, 1), dtype)
        for slot in range(PAGES * P):
            expected = exact[SLOTS.index(slot)] if slot in SLOTS else row(old, layout, slot, is_k)
            assert torch.equal(row(cache, layout, slot, is_k), expected), slot


@pytest.mark.parametrize("dtype", [*FP8, torch.int8])
def test_round_half_to_even_and_saturation(dtype: torch.dtype) -> None:
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    key = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 16.5, 17.0, 1.0625, 1.1875, largest, largest * 1.01, 1e30] * 2).expand(1, HEADS, D).contiguous()
    cache, _ = make_caches("NHD", dtype)
    write_kv(key, key, cache, cache.clone(), torch.tensor([3]), k_scale=1.0, v_scale=1.0)
    assert torch.equal(row(cache, "NHD", 3, True), stored(key, dtype)[0])
    assert cache[0, 3].float().max() == largest


@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("dtype", [*FP8, torch.int8])
def test_scales_per_token(layout: str, dtype: torch.dtype) -> None:
    qmax = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    key, value = rows_for(torch.bfloat16)
    key[4, 1] = 0.0
    caches = make_caches(layout, dtype)
    shape = (PAGES, P, HEADS) if layout == "NHD" else (PAGES, HEADS, P)
    scales = [torch.full((PAGES, 2, *shape[1:]), 7.0)[:, i] for i in range(2)]  # strided, as in a hybrid cache
    write_kv(key, value, *caches, torch.tensor(SLOTS), kv_layout=layout, k_scale=scales[0], v_scale=scales[1])
    for cache, scale, new, is_k in zip(caches, scales, (key.float(), value.float()), (True, False), strict=True):
        by_slot = scale.reshape(-1, HEADS) if layout == "NHD" else scale.transpose(1, 2).reshape(-1, HEADS)
        for slot in range(PAGES * P):
            if slot not in SLOTS:
                assert torch.equal(by_slot[slot], torch.full((HEADS,), 7.0))
                continue
            x = new[SLOTS.index(slot)]
            assert torch.equal(by_slot[slot], x.abs().amax(-1) / qmax)
            kept = row(cache, layout, slot, is_k).contiguous().view(dtype).float() * by_slot[slot][:, None]
            step = {torch.int8: 0.5 / 127, FP8[0]: 2.0**-4, FP8[1]: 2.0**-3}[dtype]
            assert ((kept - x).abs() <= step * x.abs().amax(-1, keepdim=True) * 1.001).all()
    assert not row(caches[0], layout, 0, True)[1].any()


def test_duplicate_slots_keep_one_whole_row_with_its_scale() -> None:
    key = torch.stack([torch.full((HEADS, D), float(v)) for v in (1, 2, 4)])
    cache, scale = make_caches("NHD", torch.int8)[0], torch.zeros(PAGES, P, HEADS)
    write_kv(key, key, cache, cache.clone(), torch.tensor([5, 5, 5]), k_scale=scale, v_scale=scale.clone())
    held = cache[1, 1].float() * scale[1, 1][:, None]
    assert any(torch.allclose(held[0], k[0]) for k in key)
    assert torch.equal(scale.flatten(0, 1).count_nonzero(dim=0), torch.ones(HEADS, dtype=torch.int64))


@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_of_rows_that_share_a_slot_the_last_is_stored(layout: str, dtype: torch.dtype) -> None:
    slots = [7, 3, 7, -1, 7, 19, 3, 2**40, -1]
    key = torch.arange(1.0, 10.0).view(9, 1, 1).expand(9, HEADS, D).to(torch.float32 if dtype == torch.int8 else dtype)
    caches = make_caches(layout, dtype)
    scale = 1.0 if dtype == torch.int8 else None
    write_kv(key, key[..., :DV], *caches, torch.tensor(slots), kv_layout=layout, k_scale=scale, v_scale=scale)
    for cache, is_k in zip(caches, (True, False), strict=True):
        held = {slot: row(cache, layout, slot, is_k).contiguous().view(dtype).float().unique().tolist() for slot in (3, 7, 19)}
        assert held == {3: [7.0], 7: [5.0], 19: [6.0]}


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "sliced"])
def test_rows_that_share_a_slot_do_not_mix_between_threads(contiguous: bool) -> None:
    """torch cuts a copy this large into parts for its threads: 100 rows a slot, each a constant."""
    key = torch.arange(600.0).view(-1, 1, 1).expand(-1, HEADS, 1024)
    cache = torch.full((2, 4, HEADS, 1024 if contiguous else 1032), -1.0)[..., :1024]
    values = cache.clone() if contiguous else torch.full_like(cache, -1.0)
    slots = torch.arange(600) % 6
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(20):
            write_kv(key, key, cache, values, slots)
            for held in (cache.flatten(0, 1), values.flatten(0, 1)):
                assert torch.equal(held[:, :1, 0].flatten(), torch.tensor([594.0, 595.0, 596.0, 597.0, 598.0, 599.0, -1.0, -1.0]))
                assert torch.equal(held, held[:, :1, :1].expand_as(held))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("slots", [[], [-1, -7], [PAGES * P, 2**40]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_nothing_to_write(slots: list[int], dtype: torch.dtype) -> None:
    key, value = rows_for(torch.float32)
    caches, before = make_caches("NHD", dtype), make_caches("NHD", dtype)
    scale = torch.full((PAGES, P, HEADS), math.nan) if dtype == torch.int8 else None
    write_kv(key, value, *caches, torch.tensor(slots, dtype=torch.int64), k_scale=scale, v_scale=scale)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old)
    assert scale is None or scale.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_interleaved_caches(dtype: torch.dtype) -> None:
    key, _ = rows_for(torch.float16)
    both = torch.zeros(PAGES, 2, P, HEADS, D, dtype=torch.uint8 if dtype in FP8 else dtype)
    k, v = (both[:, i].view(dtype) if dtype in FP8 else both[:, i] for i in range(2))
    write_kv(key, key, k, v, torch.tensor([4, 19]))
    compact = torch.zeros(PAGES, P, HEADS, D, dtype=both.dtype)
    write_kv(key, key, compact.view(dtype), compact.clone().view(dtype), torch.tensor([4, 19]))
    assert torch.equal(both[:, 0], compact)
    assert torch.equal(both[:, 1], compact)
