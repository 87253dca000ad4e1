"""`write_kv`: only the named slots change, in every layout, to the right bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance import oracle
from hal.conformance.caches import STORAGES, CachePair, make_caches, poison_value
from hal.conformance.cases import DTYPES
from hal.conformance.compare import assert_same_bits
from hal.conformance.quantised import QMAX, decode_codes, nearest_codes, rounding_error
from hal.conformance.shared_slots import KINDS, SharedSlots
from hal.conformance.subject import Subject
from hal.ops.layouts import KV_LAYOUTS, CacheFacts, token_scale_shape

pytestmark = pytest.mark.hal_op("write_kv")

PAGES, PAGE = 5, 8


@dataclass
class Write:
    """A call, the buffers around its caches and its scales per token, and the copies of the former made before it."""

    args: dict[str, Any]
    pair: CachePair
    before: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    page: int


def make(
    subject: Subject,
    slots: list[int],
    *,
    tokens: int | None = None,
    dtype: str = "fp32",
    kv: str = "",
    dims: tuple[int, int] = (32, 32),
    heads: int = 2,
    layout: str = "NHD",
    storage: str = "compact",
    page: int = PAGE,
    index: torch.dtype = torch.int64,
    factor: float = 1.0,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Write:
    """Build a call that writes random rows to `slots` of poisoned caches; scales may be "token" or "token_padded"."""
    g, device = subject.generator(), subject.device
    tokens = len(slots) if tokens is None else tokens
    cache_dtype = DTYPES[kv or dtype]
    pair = make_caches(layout, PAGES, page, heads, dims, cache_dtype, device, storage, poison_value(cache_dtype))
    scales, buffers = {}, []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        scales[name] = scale.to(device) if isinstance(scale, Tensor) else scale
        if isinstance(scale, str):
            pages, rows, columns = token_scale_shape(layout, CacheFacts(PAGES, page, heads, *dims, 0))
            buffers.append(torch.full((pages, rows + 2 * (scale == "token_padded"), columns), math.nan, device=device))
            scales[name] = buffers[-1][:, :rows]
    args: dict[str, Any] = {
        "key": (torch.randn(tokens, heads, dims[0], generator=g) * factor).to(device, DTYPES[dtype]),
        "value": (torch.randn(tokens, heads, dims[1], generator=g) * factor).to(device, DTYPES[dtype]),
        "k_cache": pair.k,
        "v_cache": pair.v,
        "slot_mapping": torch.tensor(slots, dtype=index, device=device),
        "kv_layout": layout,
        **scales,
    }
    return Write(args, pair, tuple(b.clone() for b in pair.buffers), tuple(buffers), page)


def slot(cache: Tensor, layout: str, which: str, index: int) -> Tensor:
    """(Hkv, D) of one slot."""
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    size = {"NHD": cache.shape[1], "HND": cache.shape[2]}.get(layout, cache.shape[2 if which == "v" and layout == "HND_SPLIT" else 3])
    view = oracle.write_view(raw, layout, which, index // size, index % size)
    return view.reshape(view.shape[0], -1)


def scale_of_slot(scale: Tensor, layout: str, page: int, index: int) -> Tensor:
    """(Hkv,) of scales per token, as a view."""
    return scale[index // page, index % page] if layout == "NHD" else scale[index // page, :, index % page]


def erase(write: Write, slots: list[int]) -> None:
    """Put the poison back into the written slots, so that the buffers must equal their copies."""
    layout = write.args["kv_layout"]
    for which, cache in (("k", write.pair.k), ("v", write.pair.v)):
        value = poison_value(cache.dtype)
        raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        fill = nearest_codes(torch.tensor([value]), cache.dtype).item() if cache.dtype.itemsize == 1 else value
        scale = write.args.get(f"{which}_scale")
        for index in slots:
            oracle.write_view(raw, layout, which, index // write.page, index % write.page).fill_(fill)
            if isinstance(scale, Tensor) and scale.dim() == 3:
                scale_of_slot(scale, layout, write.page, index).fill_(math.nan)


def written(slots: list[int], page: int = PAGE) -> dict[int, list[int]]:
    """Slot -> rows that name it."""
    found: dict[int, list[int]] = {}
    for row, index in enumerate(slots):
        if 0 <= index < PAGES * page:
            found.setdefault(index, []).append(row)
    return found


def run(subject: Subject, write: Write, slots: list[int]) -> None:
    """Make the call; check each written slot against the rows that name it, and everything else for being untouched."""
    subject.call("write_kv", write.args, frozen=True)
    layout = write.args["kv_layout"]
    for which, cache, rows in (("k", write.pair.k, write.args["key"]), ("v", write.pair.v, write.args["value"])):
        scale = write.args.get(f"{which}_scale")
        for index, candidates in written(slots, write.page).items():
            got = slot(cache, layout, which, index).cpu()
            per_token = scale_of_slot(scale, layout, write.page, index).tolist() if isinstance(scale, Tensor) and scale.dim() == 3 else None
            for head in range(rows.shape[1]):
                what, named = f"{which} slot {index} head {head}", [rows[c, head].cpu() for c in candidates]
                if per_token is None:
                    check_row(what, got[head], named, cache.dtype, scale, head)
                else:
                    check_scaled_row(what, got[head], named, cache.dtype, per_token[head])
    erase(write, list(written(slots, write.page)))
    for buffer, before in zip(write.pair.buffers, write.before, strict=True):
        assert_same_bits("caches outside the written slots", buffer, before)
    for buffer in write.scales:
        assert bool(buffer.isnan().all()), "scales outside the written slots changed"


def check_row(what: str, got: Tensor, candidates: list[Tensor], dtype: torch.dtype, scale: Any, head: int) -> None:
    """Check a row of a slot, its scale given, against the rows that name the slot: it must be one of them."""
    if dtype not in QMAX:
        if not any(torch.equal(got, row) for row in candidates):
            raise AssertionError(f"{what}: {got.tolist()[:4]}..., expected {' or '.join(str(r.tolist()[:4]) for r in candidates)}...")
        return
    factor = 1.0 if scale is None else float(scale.reshape(-1)[head if scale.numel() > 1 else 0]) if isinstance(scale, Tensor) else scale
    error = min(rounding_error(row.double() / factor, got.view(dtype)) for row in candidates)
    assert error <= 1.0 + 1e-4, f"{what}: {error:.3f} half spacings from the nearest value of {dtype}"


def check_scaled_row(what: str, got: Tensor, candidates: list[Tensor], dtype: torch.dtype, stored: float) -> None:
    """Check a row of a slot and the scale stored for it: of one and the same of the rows that name the slot."""
    wanted = [float(row.double().abs().max()) / QMAX[dtype] for row in candidates]
    near = [row for row, scale in zip(candidates, wanted, strict=True) if abs(stored - scale) <= 1e-6 * scale]
    assert near, f"{what}: scale {stored}, expected {' or '.join(map(str, wanted))}"
    error = min(rounding_error(row.double() / (stored or 1.0), got.view(dtype)) for row in near)
    assert error <= 1.0 + 1e-4, f"{what}: {error:.3f} half spacings from the nearest value of {dtype} at scale {stored}"


SLOTS = [9, 0, 39, 17, 8]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_layouts(hal_subject: Subject, layout: str, storage: str) -> None:
    run(hal_subject, make(hal_subject, SLOTS, layout=layout, storage=storage), SLOTS)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_dtypes(hal_subject: Subject, dtype: str, index: torch.dtype) -> None:
    run(hal_subject, make(hal_subject, SLOTS, dtype=dtype, index=index), SLOTS)


@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize(
    "dims", [(16, 16), (40, 40), (80, 80), (96, 128), (120, 72), (256, 256), (528, 64), (576, 512)], ids=lambda d: f"{d[0]}-{d[1]}"
)
def test_head_dims(hal_subject: Subject, dims: tuple[int, int], layout: str) -> None:
    """B58: no element beyond a tile is lost, no neighbour touched."""
    run(hal_subject, make(hal_subject, SLOTS, dims=dims, layout=layout), SLOTS)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("page", [1, 3, 16, 100])
def test_pages(hal_subject: Subject, page: int, heads: int) -> None:
    slots = [0, PAGES * page - 1, page]
    run(hal_subject, make(hal_subject, slots, page=page, heads=heads, dims=(16, 16)), slots)


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_slots_outside_are_skipped(hal_subject: Subject, layout: str) -> None:
    slots = [-1, 5, PAGES * PAGE, -(2**31), 2**31 - 1, 38, -PAGE]
    run(hal_subject, make(hal_subject, slots, layout=layout, index=torch.int32), slots)


def test_wide_slots_are_skipped(hal_subject: Subject) -> None:
    slots = [2**40 + 3, -(2**40), 7, 2**32 + 1]
    run(hal_subject, make(hal_subject, slots), slots)


def test_all_skipped(hal_subject: Subject) -> None:
    run(hal_subject, make(hal_subject, [-1, -1, -1]), [-1, -1, -1])


def test_fewer_slots_than_rows(hal_subject: Subject) -> None:
    run(hal_subject, make(hal_subject, [3, 21], tokens=6), [3, 21])


@pytest.mark.parametrize("tokens", [0, 4], ids=["no-rows", "no-slots"])
def test_nothing_to_write(hal_subject: Subject, tokens: int) -> None:
    run(hal_subject, make(hal_subject, [], tokens=tokens), [])


def test_duplicate_slots(hal_subject: Subject) -> None:
    """One of the rows wins, whole or per head; nothing else changes."""
    slots = [4, 11, 4, 4, 30]
    run(hal_subject, make(hal_subject, slots), slots)


@pytest.mark.parametrize(("count", "layout", "index"), [(300, "NHD", torch.int64), (600, "HND", torch.int32)], ids=["300-NHD", "600-HND-int32"])
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_share_few_slots(hal_subject: Subject, kind: str, count: int, layout: str, index: torch.dtype) -> None:
    """Rows that are written at once race for their slots: one of them wins whole."""
    call, generator = SharedSlots.build(kind, count, layout, index, hal_subject.device), hal_subject.generator()
    for _ in range(20 if hal_subject.device.type == "cuda" else 1):
        call.name_slots(generator)
        hal_subject.call("write_kv", call.args)
        call.check()


def test_values_that_are_not_finite(hal_subject: Subject) -> None:
    write = make(hal_subject, [2, 9], heads=1)
    write.args["key"][0, 0, :3] = torch.tensor([math.inf, -math.inf, 0.0], device=hal_subject.device)
    run(hal_subject, write, [2, 9])


@pytest.mark.parametrize("storage", ["packed_qkv", "heads_first"])
def test_strided_rows(hal_subject: Subject, storage: str) -> None:
    """B58: key and value are slices of packed QKV, or stored heads first."""
    write = make(hal_subject, SLOTS)
    for name in ("key", "value"):
        rows = write.args[name]
        if storage == "packed_qkv":
            buffer = torch.full((len(SLOTS), 3, *rows.shape[1:]), math.nan, device=rows.device)
            buffer[:, 1] = rows
            write.args[name] = buffer[:, 1]
        else:
            write.args[name] = rows.transpose(0, 1).contiguous().transpose(0, 1)
    run(hal_subject, write, SLOTS)


_KINDS: dict[str, Any] = {"float": 0.05, "0d": torch.tensor(0.05), "1": torch.tensor([0.05]), "head": torch.tensor([0.03, 0.08])}
_QUANTISED = ("int8", "e4m3", "e5m2")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("kv", _QUANTISED)
def test_scales(hal_subject: Subject, kv: str, kind: str) -> None:
    scale = _KINDS[kind]
    run(hal_subject, make(hal_subject, SLOTS, kv=kv, k_scale=scale, v_scale=scale * 2), SLOTS)


@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
def test_fp8_without_scale(hal_subject: Subject, kv: str) -> None:
    run(hal_subject, make(hal_subject, SLOTS, kv=kv), SLOTS)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("kv", _QUANTISED)
def test_quantised_layouts(hal_subject: Subject, kv: str, layout: str, dtype: str) -> None:
    write = make(hal_subject, SLOTS, kv=kv, dtype=dtype, layout=layout, storage="padded", k_scale=0.05, v_scale=torch.tensor([0.03, 0.08]))
    run(hal_subject, write, SLOTS)


@pytest.mark.parametrize("kv", _QUANTISED)
def test_rounding_is_half_to_even_and_saturates(hal_subject: Subject, kv: str) -> None:
    """Ties between neighbouring values, values beyond the range, infinities and signed zeros, bit for bit."""
    dtype = DTYPES[kv]
    values = torch.unique(decode_codes(torch.arange(256, dtype=torch.int16).to(torch.uint8), dtype).nan_to_num(0.0, 0.0, 0.0))
    ties = (values[1:] + values[:-1]) / 2
    beyond = torch.tensor([QMAX[dtype] * 1.01, QMAX[dtype] * 8, -QMAX[dtype] * 1.01, -QMAX[dtype] * 8, math.inf, -math.inf])
    wanted = torch.cat([ties, beyond.double(), torch.zeros(1, dtype=torch.float64)])
    wanted = torch.cat([wanted, wanted.new_zeros(-len(wanted) % 32)]).float().reshape(-1, 1, 32)
    slots = list(range(len(wanted)))
    scale = 0.25
    write = make(hal_subject, slots, kv=kv, heads=1, k_scale=scale, v_scale=scale)
    for name in ("key", "value"):
        write.args[name] = (wanted * scale).to(hal_subject.device)
    hal_subject.call("write_kv", write.args)
    for which, cache in (("k", write.pair.k), ("v", write.pair.v)):
        got = torch.stack([slot(cache, "NHD", which, s) for s in slots]).cpu()
        assert_same_bits(f"stored codes of {which}", got, nearest_codes(wanted, dtype))


@pytest.mark.parametrize("scale", [0.05, None], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("kv", _QUANTISED)
def test_nan(hal_subject: Subject, kv: str, scale: float | None) -> None:
    """fp8 keeps NaN, int8 stores 0; the other elements of the row are not harmed."""
    scale = scale or (1.0 if kv == "int8" else None)  # int8 has no meaning without one
    write = make(hal_subject, [2, 9], kv=kv, heads=1, k_scale=scale, v_scale=scale)
    write.args["key"][0, 0, 3] = math.nan
    hal_subject.call("write_kv", write.args)
    got = decode_codes(slot(write.pair.k, "NHD", "k", 2).cpu(), DTYPES[kv])[0]
    assert float(got[3]) == 0.0 if kv == "int8" else math.isnan(got[3])
    rest = torch.arange(32) != 3
    row = write.args["key"][0, 0].cpu().double()[rest] / (scale or 1.0)
    assert rounding_error(row, nearest_codes(got[rest], DTYPES[kv]).view(DTYPES[kv])) <= 1.0 + 1e-4
    assert not bool(got[rest].isnan().any())


@pytest.mark.parametrize("padded", [False, True], ids=["compact", "padded"])
@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("kv", _QUANTISED)
def test_scales_per_token(hal_subject: Subject, kv: str, layout: str, padded: bool) -> None:
    """B29: the op computes amax / qmax of each row, writes it, and quantises by it."""
    slots, kind = [9, -1, 39, 17], "token_padded" if padded else "token"
    write = make(hal_subject, slots, kv=kv, layout=layout, factor=3.0, k_scale=kind, v_scale=kind)
    write.args["key"][3, 1] = 0.0
    run(hal_subject, write, slots)


@pytest.mark.parametrize("kv", _QUANTISED)
def test_scale_has_an_effect(hal_subject: Subject, kv: str) -> None:
    """Were a scale ignored, or one used for both, the codes would be those of another scale."""
    write = make(hal_subject, [3], kv=kv, k_scale=0.05, v_scale=0.2)
    write.args["value"] = write.args["key"].clone()
    run(hal_subject, write, [3])
    write = make(hal_subject, [3], kv=kv, k_scale=0.05, v_scale=0.2)
    write.args["value"] = write.args["key"].clone()
    hal_subject.call("write_kv", write.args)
    assert not torch.equal(slot(write.pair.k, "NHD", "k", 3), slot(write.pair.v, "NHD", "v", 3))


@pytest.mark.parametrize("kv", ["", *_QUANTISED])
@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_round_trip(hal_subject: Subject, layout: str, kv: str) -> None:
    """What `write_kv` stores, `flash_decode` reads: the two agree on every layout and scale."""
    pages = [3, 1]
    slots = [pages[j // PAGE] * PAGE + j % PAGE for j in range(13)]
    kind = "token" if kv else None
    write = make(hal_subject, slots, kv=kv, layout=layout, k_scale=kind, v_scale=kind)
    hal_subject.call("write_kv", write.args)
    device = hal_subject.device
    hal_subject.verify(
        "flash_decode",
        {
            "q": torch.randn(1, 4, 32, generator=hal_subject.generator()).to(device),
            "k_cache": write.pair.k,
            "v_cache": write.pair.v,
            "seq_lens": torch.tensor([13], dtype=torch.int32, device=device),
            "block_tables": torch.tensor([[*pages, -1]], dtype=torch.int32, device=device),
            "kv_layout": layout,
            "k_scale": write.args["k_scale"],
            "v_scale": write.args["v_scale"],
        },
    )
