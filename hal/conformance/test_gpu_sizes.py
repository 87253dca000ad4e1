"""What only a CUDA device is large and fast enough to show: offsets beyond 31 bits, and long contexts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.caches import filled, put
from hal.conformance.cases import DTYPES, Attention
from hal.conformance.compare import assert_same_bits
from hal.conformance.inputs import build_decode
from hal.conformance.long_contexts import build_long, judge
from hal.conformance.outcomes import NotRun
from hal.conformance.subject import Subject
from hal.ops.layouts import cache_shapes

pytestmark = pytest.mark.hal_gpu

GIB = 2**30
DECODE = pytest.mark.hal_op("flash_decode")
WRITE = pytest.mark.hal_op("write_kv")


def ids(case: Attention) -> str:
    return case.id


def need_memory(subject: Subject, gib: float) -> None:
    """End the case as not run if the device lacks free memory."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(subject.device)
    if free < gib * GIB:
        raise NotRun(f"needs {gib:g} GiB of free device memory, {free / GIB:.1f} are free")


_LARGE = (
    ("NHD", "bf16", "", (8, 128)),
    ("HND", "bf16", "", (8, 128)),
    ("SPLIT_V0", "fp16", "", (8, 128)),
    ("NHD", "bf16", "e4m3", (8, 128)),
    ("NHD", "bf16", "", (1, 64)),
)


def large_caches(subject: Subject, layout: str, dtype: torch.dtype, sizes: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
    """K and V of more than 2^31 elements each, filled with NaN, and the number of pages."""
    heads, dim = sizes
    pages = 2**31 // (16 * heads * dim) + 64
    need_memory(subject, 2.5 * pages * 16 * heads * dim * dtype.itemsize / GIB + 3)
    k_shape, v_shape = cache_shapes(layout, pages, 16, heads, dim, dim, dtype.itemsize)
    return filled(k_shape, math.nan, dtype, subject.device), filled(v_shape, math.nan, dtype, subject.device), pages


@DECODE
@pytest.mark.parametrize(("layout", "dtype", "kv", "sizes"), _LARGE, ids=lambda x: str(x))
def test_cache_beyond_31_bits_is_read(hal_subject: Subject, layout: str, dtype: str, kv: str, sizes: tuple[int, int]) -> None:
    """B31: the last pages of a cache of more than 2^31 elements."""
    device, generator, heads, dim = hal_subject.device, hal_subject.generator(), *sizes
    k, v, pages = large_caches(hal_subject, layout, DTYPES[kv or dtype], sizes)
    table = [pages - 1, pages - 3, pages - 2, pages - 4]
    slots = torch.tensor([table[j // 16] * 16 + j % 16 for j in range(64)], device=device)
    for which, cache in (("k", k), ("v", v)):
        rows = torch.randn(64, heads, dim, generator=generator).to(device)
        put(cache, layout, which, slots, rows.to(cache.dtype))
    args = {
        "q": torch.randn(1, heads * 4, dim, generator=generator).to(device, DTYPES[dtype]),
        "k_cache": k,
        "v_cache": v,
        "seq_lens": torch.tensor([64], dtype=torch.int32, device=device),
        "block_tables": torch.tensor([table], dtype=torch.int32, device=device),
        "kv_layout": layout,
        "return_lse": True,
    }
    hal_subject.verify("flash_decode", args, frozen=False)


@WRITE
@pytest.mark.parametrize(("layout", "dtype", "kv", "sizes"), _LARGE, ids=lambda x: str(x))
def test_cache_beyond_31_bits_is_written(hal_subject: Subject, layout: str, dtype: str, kv: str, sizes: tuple[int, int]) -> None:
    """B32: the last two slots, by 64-bit and 32-bit index; not one other element changes."""
    device, heads, dim = hal_subject.device, *sizes
    k, v, pages = large_caches(hal_subject, layout, DTYPES[kv or dtype], sizes)
    rows = torch.randint(-3, 4, (1, heads, dim), device=device).to(DTYPES[dtype])
    args = {"key": rows, "value": rows, "k_cache": k, "v_cache": v, "kv_layout": layout}
    for slot, index in ((pages * 16 - 1, torch.int64), (pages * 16 - 2, torch.int32)):
        hal_subject.call("write_kv", args | {"slot_mapping": torch.tensor([slot], dtype=index, device=device)}, frozen=False)
    for name, cache in (("k", k), ("v", v)):
        # fp8 has no reductions: NaN is 0x7f there.
        changed = sum(int((page.view(torch.uint8) != 0x7F).sum() if kv else (~page.isnan()).sum()) for page in cache.split(4096))
        assert changed == 2 * heads * dim, f"{name}: {changed} elements changed, expected {2 * heads * dim}"
        last = cache[-1:].contiguous()
        expected = filled(tuple(last.shape), math.nan, cache.dtype, device)
        put(expected, layout, name, torch.tensor([14, 15], device=device), rows.expand(2, -1, -1).to(cache.dtype))
        assert_same_bits(f"last page of {name}", last, expected)


@DECODE
def test_query_and_output_strides_beyond_31_bits(hal_subject: Subject) -> None:
    """B30: rows of q and out more than 2^31 elements apart."""
    need_memory(hal_subject, 12)
    device = hal_subject.device
    args = build_decode(Attention("far", (33, 20), dtype="bf16"), hal_subject.generator(), device).args
    far = 2**31 + 8
    for name, dims in (("q", 32), ("out", 32)):
        buffer = torch.empty(far + 4 * dims, dtype=torch.bfloat16, device=device)
        view = buffer.as_strided((2, 4, dims), (far, dims, 1))
        view.copy_(args[name])
        args[name] = view
    hal_subject.verify("flash_decode", args, frozen=False)


@DECODE
def test_mla_cache_beyond_31_bits_is_read(hal_subject: Subject) -> None:
    """B31: pages of 480 rows of 576, where the offsets of page 7767 pass 2^31."""
    device, generator, size, dim = hal_subject.device, hal_subject.generator(), 480, 576
    pages = 2**31 // (size * dim) + 64
    need_memory(hal_subject, 2.5 * pages * size * dim * 2 / GIB + 3)
    k = filled((pages, size, 1, dim), math.nan, torch.bfloat16, device)
    table = [pages - 1, pages - 3, pages - 2, pages - 4]
    slots = torch.tensor([table[j // size] * size + j % size for j in range(1500)], device=device)
    put(k, "NHD", "k", slots, torch.randn(1500, 1, dim, generator=generator).to(device, torch.bfloat16))
    args = {
        "q": torch.randn(1, 16, dim, generator=generator).to(device, torch.bfloat16),
        "k_cache": k,
        "v_cache": k[..., :512],
        "seq_lens": torch.tensor([1500], dtype=torch.int32, device=device),
        "block_tables": torch.tensor([table], dtype=torch.int32, device=device),
        "return_lse": True,
    }
    hal_subject.verify("flash_decode", args, frozen=False)


@DECODE
def test_more_query_elements_than_31_bits(hal_subject: Subject) -> None:
    """B30: 262147 rows of 64 heads of 128; the last block, and the rows of a far longer one that see a key."""
    need_memory(hal_subject, 16)
    device, generator, tokens, heads, dim = hal_subject.device, hal_subject.generator(), 262147, 64, 128
    q = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16, device=device)
    q[-8:] = torch.randn(8, heads, dim, generator=generator).to(device, torch.bfloat16)
    args = build_decode(Attention("few", (5, 20), heads=(64, 8), dims=(128, 128), page=16, dtype="bf16"), generator, device).args
    args |= {"q": q, "out": torch.full_like(q, math.nan), "lse": filled((tokens, heads), math.nan, torch.float32, device)}
    args["cu_seqlens_q"] = torch.tensor([0, tokens - 3, tokens - 1], dtype=torch.int32, device=device)
    out, lse = hal_subject.call("flash_decode", args, frozen=False)
    for rows, row_lse in zip(out[:-8].split(8192), lse[:-8].split(8192), strict=True):
        assert not bool(rows.any()), "rows with nothing to see"
        assert bool((row_lse == -math.inf).all())
    few = {"q": q[-8:], "out": None, "lse": None, "cu_seqlens_q": torch.tensor([0, 5, 7], dtype=torch.int32, device=device)}
    hal_subject.expect("flash_decode", args | few, out[-8:], lse[-8:])


@DECODE
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
def test_fp8_long_context(hal_subject: Subject, kv: str, dtype: str) -> None:
    """B18: 131072 keys of equal weight must average V = 1 to 1; then one key with half of the weight and V = 3."""
    need_memory(hal_subject, 2)
    device, length, dim = hal_subject.device, 131072, 128
    pages = length // 16
    k, v = (filled((pages, 16, 1, dim), value, DTYPES[kv], device) for value in (0.0, 1.0))
    args: dict[str, Any] = {
        "q": torch.zeros(1, 4, dim, dtype=DTYPES[dtype], device=device),
        "k_cache": k,
        "v_cache": v,
        "seq_lens": torch.tensor([length], dtype=torch.int32, device=device),
        "block_tables": torch.arange(pages, dtype=torch.int32, device=device).flip(0)[None].contiguous(),
    }
    out = hal_subject.call("flash_decode", args)
    assert float((out.double() - 1.0).abs().max()) <= 2**-8
    args["q"][:, :, 0] = math.log(length) * dim**0.5
    score = float(args["q"][0, 0, 0]) * dim**-0.5
    needle = torch.tensor([77777], device=device)
    k_row, v_row = torch.zeros(1, 1, dim), torch.full((1, 1, dim), 3.0)
    k_row[..., 0] = 1.0
    put(k, "NHD", "k", needle, k_row.to(DTYPES[kv]).to(device))
    put(v, "NHD", "v", needle, v_row.to(DTYPES[kv]).to(device))
    weight = math.exp(score) / (math.exp(score) + length - 1)
    expected = torch.full((1, 4, dim), 3 * weight + (1 - weight), dtype=torch.float64)
    hal_subject.compare(DTYPES[dtype], hal_subject.call("flash_decode", args), expected)


@DECODE
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "batch-invariant"])
def test_fp8_long_context_of_uneven_weights(hal_subject: Subject, batch_invariant: bool) -> None:
    """B18: whatever the 131072 weights, V = 1 averages to 1; here 2 times a scale of 0.5."""
    case = Attention("ones", (131072,), heads=(32, 8), dims=(128, 128), page=16, dtype="bf16", kv="e4m3", batch_invariant=batch_invariant, out="new")
    args = build_long(case, hal_subject.generator(), hal_subject.device).args
    args["v_cache"] = filled(tuple(args["v_cache"].shape), 2.0, torch.float8_e4m3fn, hal_subject.device)
    out, _ = hal_subject.call("flash_decode", args | {"v_scale": 0.5})
    assert float((out.double() - 1.0).abs().max()) <= 2**-8


_LONG = (
    Attention("B19-20548-keys", (20548,), heads=(16, 16), dims=(128, 128), page=16, dtype="bf16"),
    Attention("B19-20548-keys-group-16", (20548,), heads=(16, 1), dims=(128, 128), page=16, dtype="bf16"),
    Attention("B19-20548-keys-group-4", (20548,), heads=(16, 4), dims=(128, 128), page=64, dtype="bf16"),
    Attention("B17-fp32-4096-keys", (4096,), heads=(8, 2), dims=(128, 128), page=16),
    Attention("mixed-lengths", (4096, 0, 1, 17, 2048), heads=(32, 8), dims=(128, 128), page=16, dtype="bf16"),
    Attention("dim-256", (4096, 100), heads=(8, 1), dims=(256, 256), page=32, dtype="fp16"),
    Attention("mla", (4096, 33), heads=(128, 1), dims=(576, 512), page=64, dtype="bf16", mla=True),
    Attention("block-of-8", (5000, 9), q_len=8, heads=(32, 8), dims=(128, 128), page=16, dtype="bf16"),
    Attention("window-in-long", (9000,), window=128, heads=(64, 8), dims=(64, 64), page=16, dtype="bf16", sinks=True),
    Attention("pages-of-1", (3072,), heads=(8, 2), dims=(64, 64), page=1, dtype="fp16"),
    Attention("pages-of-544", (3072,), heads=(8, 2), dims=(64, 64), page=544, dtype="bf16"),
    Attention("e4m3", (5000, 300), heads=(32, 8), dims=(128, 128), page=16, dtype="bf16", kv="e4m3", k_scale="head", v_scale="token"),
    Attention("group-71", (2000,), heads=(71, 1), dims=(64, 64), page=16, dtype="bf16"),
)


@DECODE
@pytest.mark.parametrize("case", _LONG, ids=ids)
def test_long_contexts(hal_subject: Subject, case: Attention) -> None:
    hal_subject.verify("flash_decode", build_decode(replace(case, spare_pages=64), hal_subject.generator(), hal_subject.device))


@DECODE
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "batch-invariant"])
@pytest.mark.parametrize("q_len", [4, 5])
def test_many_splits_of_wide_heads(hal_subject: Subject, q_len: int, batch_invariant: bool) -> None:
    """B41: identical sequences of 26k keys, MLA head dims: each is as right as the first; to the bit if batch-invariant."""
    heads: dict[str, Any] = {"heads": (8, 1), "dims": (576, 512), "mla": True}
    case = Attention("one", (26000,), q_len=q_len, page=16, dtype="bf16", out="new", batch_invariant=batch_invariant, **heads)
    args = build_long(case, hal_subject.generator(), hal_subject.device).args
    args |= {"q": args["q"].repeat(4, 1, 1), "seq_lens": args["seq_lens"].repeat(4), "block_tables": args["block_tables"].repeat(4, 1)}
    out, lse = hal_subject.call("flash_decode", args)
    judge(hal_subject, args, out, lse)
    for b in range(1, 4) if batch_invariant else ():
        assert_same_bits(f"sequence {b} against 0", out[b * q_len : (b + 1) * q_len], out[:q_len])
