"""`write_kv` of the Triton kernels: every slot that is not named keeps its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.naive import NAN, to_layout

LAYOUTS = ["NHD", "HND", "HND_SPLIT", "SPLIT_V0"]
PAGES, SIZE, HEADS = 3, 5, 3
SLOTS = [7, -1, 0, 14, 15, 10**6, 3]  # -1, 15 and 10**6 are skipped


def caches(layout: str, dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    whole = [torch.zeros(PAGES, SIZE, HEADS, d, dtype=dtype) for d in dims]
    k, v = to_layout(whole[0], whole[1], layout)
    return k.to(device), v.to(device)


def rows_of(cache: Tensor, layout: str, which: str) -> Tensor:
    """(slots, Hkv, D) of a cache."""
    if layout == "HND" or (layout == "HND_SPLIT" and which == "v"):
        cache = cache.permute(0, 2, 1, 3)
    elif layout != "NHD":
        cache = cache.permute(0, 3, 1, 2, 4) if which == "k" else cache.permute(0, 3, 1, 2)
    return cache.reshape(PAGES * SIZE, HEADS, -1)


def new_rows(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Non-contiguous rows, as a view of packed projections; two more than there are slots."""
    packed = torch.randn(len(SLOTS) + 2, HEADS, sum(dims), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    return packed[..., : dims[0]], packed[..., dims[0] :]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 120), (528, 16)], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_copies(device: torch.device, layout: str, dims: tuple[int, int], index: torch.dtype) -> None:
    from hal.backends.triton_ops import write_kv

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        k, v = caches(layout, dims, dtype, device)
        k.fill_(NAN)
        v.fill_(NAN)
        key, value = new_rows(dims, dtype, device)
        write_kv(key, value, k, v, torch.tensor(SLOTS, dtype=index, device=device), kv_layout=layout)
        for cache, new, which in ((k, key, "k"), (v, value, "v")):
            rows = rows_of(cache, layout, which)
            written = {slot: row for row, slot in enumerate(SLOTS) if 0 <= slot < PAGES * SIZE}
            for slot in range(PAGES * SIZE):
                if slot in written:
                    assert torch.equal(rows[slot], new[written[slot]])
                else:
                    assert torch.isnan(rows[slot]).all()


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).round().clamp(-128, 127).nan_to_num(0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["float", "scalar", "head"])
def test_int8_with_given_scales(device: torch.device, layout: str, dtype: torch.dtype, kind: str) -> None:
    from hal.backends.triton_ops import write_kv

    scales: dict[str, tuple[Any, Any]] = {
        "float": (0.02, 0.005),
        "scalar": (torch.tensor(0.02, device=device), torch.tensor([0.005], device=device)),
        "head": (torch.tensor([0.02, 0.01, 0.03], device=device), torch.rand(6, device=device)[::2] + 0.01),
    }
    k, v = caches(layout, (32, 16), torch.int8, device)
    key, value = new_rows((32, 16), dtype, device)
    write_kv(key, value, k, v, torch.tensor(SLOTS, device=device), kv_layout=layout, k_scale=scales[kind][0], v_scale=scales[kind][1])
    for cache, new, which, scale in ((k, key, "k", scales[kind][0]), (v, value, "v", scales[kind][1])):
        divisor = scale.view(-1, 1) if isinstance(scale, Tensor) else torch.tensor(scale, device=device)
        rows = rows_of(cache, layout, which)
        for row in (0, 2, 3, 6):
            assert torch.equal(rows[SLOTS[row]].float(), quantise(new[row], divisor))
        assert not rows[[1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13]].any()


def test_rounds_half_to_even_and_saturates(device: torch.device) -> None:
    from hal.backends.triton_ops import write_kv

    values = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 500.0, -127.5, -500.0, NAN, float("inf"), float("-inf"), 0.49999997, -128.0]
    wanted = [0, 2, 2, 0, -2, -2, 126, 127, 127, -128, -128, 0, 127, -128, 0, -128]
    row = torch.tensor(values, device=device).expand(1, 1, 16)
    k, v = torch.zeros(1, 1, 1, 16, dtype=torch.int8, device=device), torch.zeros(1, 1, 1, 16, dtype=torch.int8, device=device)
    write_kv(row, row, k, v, torch.tensor([0], device=device), k_scale=1.0, v_scale=1.0)
    assert k.flatten().tolist() == wanted
    assert v.flatten().tolist() == wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_per_token_and_head_are_computed_and_stored(device: torch.device, layout: str) -> None:
    from hal.backends.triton_ops import write_kv

    k, v = caches(layout, (32, 16), torch.int8, device)
    shape = (PAGES, SIZE, HEADS) if layout == "NHD" else (PAGES, HEADS, SIZE)
    k_scale, v_scale = (torch.full((*shape, 2), NAN, device=device)[..., 0] for _ in range(2))  # strided
    key, value = (x.clone() for x in new_rows((32, 16), torch.float32, device))
    qmax = torch.full((), 127.0, device=device)  # a tensor: CUDA multiplies by the reciprocal of a Python number
    key[2, 1] = 0.0
    value[3, 0, 4] = NAN
    write_kv(key, value, k, v, torch.tensor(SLOTS, device=device), kv_layout=layout, k_scale=k_scale, v_scale=v_scale)
    for cache, new, which, scale in ((k, key, "k", k_scale), (v, value, "v", v_scale)):
        flat = (scale if layout == "NHD" else scale.transpose(1, 2)).reshape(PAGES * SIZE, HEADS)
        rows = rows_of(cache, layout, which)
        for row in (0, 2, 3, 6):
            wanted = new[row].abs().nan_to_num(0.0).amax(-1) / qmax
            assert torch.equal(flat[SLOTS[row]], wanted)
            assert torch.equal(rows[SLOTS[row]].float(), quantise(new[row], wanted.masked_fill(wanted == 0, 1.0)[:, None]))
        assert torch.isnan(flat[[1, 2, 4, 5]]).all()


def test_of_rows_that_share_a_slot_the_last_brings_its_scale(device: torch.device) -> None:
    from hal.backends.triton_ops import write_kv

    key = torch.randn(600, 1, 16, device=device) * torch.rand(600, 1, 1, device=device)
    k, v = (torch.zeros(2, 4, 1, 16, dtype=torch.int8, device=device) for _ in range(2))
    k_scale, v_scale = (torch.zeros(2, 4, 1, device=device) for _ in range(2))
    slots = torch.full((600,), -1, device=device)
    slots[[0, 5, 599]] = 6
    write_kv(key, key, k, v, slots, k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(k_scale[1, 2], key[599].abs().amax(-1) / torch.full((), 127.0, device=device))
    assert torch.equal(k[1, 2].float(), quantise(key[599], k_scale[1, 2][:, None]))


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders of the interpreter's programs, which run one after the other: the last store would hide those before it."""
    if device.type != "cpu":
        return
    from triton.runtime.interpreter import interpreter_builder

    place = interpreter_builder.set_grid_idx
    if request.param == "backwards":
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: place(interpreter_builder.grid_dim[0] - 1 - x, y, z))


def last_of(slots: list[int]) -> dict[int, int]:
    """Slot of the caches -> the last row that names it."""
    return {slot: row for row, slot in enumerate(slots) if 0 <= slot < PAGES * SIZE}


def assert_last_rows_are_stored(device: torch.device, slots: list[int], index: torch.dtype, layout: str = "NHD", kind: str = "plain") -> None:
    """Write rows that each are a constant of their own; every slot holds the last of its rows whole, or nothing."""
    from hal.backends.triton_ops import write_kv

    dtype = torch.float32 if kind == "plain" else torch.int8
    k, v = caches(layout, (32, 16), dtype, device)
    shape = (PAGES, SIZE, HEADS) if layout == "NHD" else (PAGES, HEADS, SIZE)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "given": {"k_scale": 1.0, "v_scale": torch.tensor(1.0, device=device)},
        "token": {name: torch.zeros(shape, device=device) for name in ("k_scale", "v_scale")},
        "mixed": {"k_scale": torch.zeros(shape, device=device), "v_scale": 1.0},
    }
    scales = kinds[kind]
    constants = torch.arange(1.0, len(slots) + 1, device=device)
    constants = constants if kind == "plain" else constants % 126 + 1.0
    key, value = (constants.view(-1, 1, 1).expand(-1, HEADS, d).contiguous() for d in (32, 16))
    write_kv(key, value, k, v, torch.tensor(slots, dtype=index, device=device), kv_layout=layout, **scales)
    wanted = torch.zeros(PAGES * SIZE, device=device)
    for slot, row in last_of(slots).items():
        wanted[slot] = constants[row]
    for cache, which in ((k, "k"), (v, "v")):
        rows, scale = rows_of(cache, layout, which).float(), scales.get(f"{which}_scale")
        if isinstance(scale, Tensor) and scale.dim() == 3:
            flat = (scale if layout == "NHD" else scale.transpose(1, 2)).reshape(PAGES * SIZE, HEADS, 1)
            assert torch.equal(flat, (wanted / torch.full((), 127.0, device=device)).view(-1, 1, 1).expand_as(flat))
            assert torch.equal(rows, (127.0 * (wanted > 0)).view(-1, 1, 1).expand_as(rows))
        else:
            assert torch.equal(rows, wanted.view(-1, 1, 1).expand_as(rows))


@pytest.mark.parametrize(("rows", "index"), [(512, torch.int64), (513, torch.int32), (1030, torch.int64)], ids=str)
@pytest.mark.usefixtures("order")
def test_of_rows_that_share_a_slot_the_last_is_stored_whole(device: torch.device, rows: int, index: torch.dtype) -> None:
    """On both sides of the number of rows from which on a table is made, in one block of its programs and several."""
    far = [2**31 - 1, -(2**31)] if index == torch.int32 else [2**40 + 3, -(2**40) + 3]
    pool = [3, 14, -1, 0, 3, PAGES * SIZE, *far]
    slots = [far[0]] * (rows - 40) + [pool[row * 5 % 8] for row in range(40)]  # the interpreter takes 10 ms for each that is not skipped
    slots[:3], slots[rows // 2] = [7, 14, 3], 7
    assert_last_rows_are_stored(device, slots, index)


#: Slots of rows, with others between that must neither count nor be written to.
SHARED = {
    "all-one": [6] * 9,
    "first-and-last-slot": [0, 14, 0, 14, 14, 0],
    "outside-between": [5, -1, 5, 15, -15, 5, 16, -(2**31)],
    "equal-in-32-bits": [3, 2**32 + 3, 3, -(2**32) + 3, 2**40 + 3, 3 - 2**63],
    "equal-in-few-bits": [1, 5, 9, 13, 1, 9, 5, 13, 13, 1],
    "apart": [4, 2, 9, 11, 0],
    "none-inside": [-1, 15, 2**50, -1, -7],
}


@pytest.mark.parametrize("kind", ["plain", "given", "token", "mixed"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("scanned", [4, 512], ids=["table", "scan"])
@pytest.mark.usefixtures("order")
def test_shared_slots(device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, scanned: int) -> None:
    from hal.kernels import write_kv

    monkeypatch.setattr(write_kv, "_SCANNED", scanned)
    layout = LAYOUTS[list(SHARED).index(name) % len(LAYOUTS)]
    assert_last_rows_are_stored(device, SHARED[name], torch.int64, layout, kind)


@pytest.mark.parametrize("content", [2**31 - 1, 5, 0, -1, -(2**31)])
@pytest.mark.usefixtures("order")
def test_table_of_any_content(device: torch.device, monkeypatch: pytest.MonkeyPatch, content: int) -> None:
    """What earlier calls left in the table does not count, and entries of slots that no row names are not touched."""
    from hal.kernels import write_kv

    table = torch.full((1024,), content, dtype=torch.int32, device=device)
    asked = []

    def work_memory(name: str, size: int, dtype: torch.dtype, where: torch.device) -> Tensor:
        asked.append((size, dtype))
        return table

    monkeypatch.setattr("hal.kernels.last_rows.scratch", work_memory)
    monkeypatch.setattr(write_kv, "_SCANNED", 2)
    slots = [6, 2**32 + 1, 2, 6, -3, 15, 2, 1000]
    assert_last_rows_are_stored(device, slots, torch.int64)
    assert asked == [(PAGES * SIZE, torch.int32)]
    wanted = torch.full_like(table, content)
    wanted[torch.tensor([2, 6])] = torch.tensor([6, 3], dtype=torch.int32, device=device)
    assert torch.equal(table, wanted)


def test_few_rows_take_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.triton_ops import write_kv
    from hal.kernels import write_kv as module

    made = []
    monkeypatch.setattr(module, "last_rows", lambda slots, *args, **options: made.append(slots.shape[0]))
    for rows in (1, 512, 513):
        k, v = caches("NHD", (16, 16), torch.float32, device)
        key = torch.ones(rows, HEADS, 16, device=device)
        slots = torch.full((rows,), -1, device=device)
        slots[0] = 3
        write_kv(key, key, k, v, slots)
        assert int(k.count_nonzero()) == int(v.count_nonzero()) == HEADS * 16
    assert made == [513]


def test_fp8_saturates_and_keeps_nan(device: torch.device) -> None:
    from hal.backends.triton_ops import write_kv

    values = torch.tensor([0.0, 1.0, -2.0, 0.25, 448.0, 0.5, 1e6, -1e6] * 2, device=device).expand(1, 1, 16).clone()
    if device.type == "cpu":  # the interpreter rounds and reads fp8 wrongly: only exact, finite values there
        values[..., [6, 7, 14, 15]] = 2.0
    else:
        values[..., 5] = NAN
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        limit = torch.finfo(dtype).max
        k, v = (torch.zeros(1, 1, 1, 16, dtype=dtype, device=device) for _ in range(2))
        write_kv(values, values, k, v, torch.tensor([0], device=device))
        assert torch.equal(k[0].float().nan_to_num(-1.0), values.clamp(-limit, limit).to(dtype).float().nan_to_num(-1.0))


def test_nothing_to_write(device: torch.device) -> None:
    from hal.backends.triton_ops import write_kv

    key = torch.randn(2, 1, 16, device=device)
    k, v = (torch.full((1, 4, 1, 16), NAN, device=device) for _ in range(2))
    write_kv(key, key, k, v, torch.empty(0, dtype=torch.int64, device=device))
    assert torch.isnan(k).all()
    write_kv(key, key, k[:0], v[:0], torch.tensor([0, 1], device=device))
