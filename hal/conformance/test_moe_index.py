"""`moe_index`, `moe_expand` and `moe_combine`: the stages that move rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.cases import DTYPES
from hal.conformance.compare import OUTPUT, assert_same_bits, close
from hal.conformance.inputs import Built, strided_slice
from hal.conformance.moe_inputs import GARBAGE, index_of
from hal.conformance.routing_inputs import EXPERTS, THRESHOLDS
from hal.conformance.subject import Subject
from hal.ops.moe_checks import MoeIndex

INDEX = pytest.mark.hal_op("moe_index")
EXPAND = pytest.mark.hal_op("moe_expand")
COMBINE = pytest.mark.hal_op("moe_combine")


def draw(subject: Subject, tokens: int, top_k: int, experts: int) -> Tensor:
    """Ids with repetition."""
    return torch.randint(max(experts, 1), (tokens, top_k), generator=subject.generator(), dtype=torch.int32).to(subject.device)


def ints(subject: Subject, values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=subject.device)


def guarded(subject: Subject, slots: int, experts: int) -> tuple[MoeIndex, list[Tensor]]:
    """Output tensors full of poison, each in the middle of a buffer that must stay as it is."""
    buffers = [torch.full((n + 64,), 0x7F7F7F7F, dtype=torch.int32, device=subject.device) for n in (slots, slots, experts)]
    return MoeIndex(*(b[32:-32] for b in buffers)), buffers


def assert_guards(buffers: list[Tensor]) -> None:
    for name, buffer in zip(MoeIndex._fields, buffers, strict=True):
        for guard in (buffer[:32], buffer[-32:]):
            assert_same_bits(f"memory beside out.{name}", guard, torch.full_like(guard, 0x7F7F7F7F))


@INDEX
@pytest.mark.parametrize("experts", EXPERTS)
def test_experts(hal_subject: Subject, experts: int) -> None:
    """A4, B1: any number of experts; poisoned outputs are written in full, and nothing beside them."""
    out, buffers = guarded(hal_subject, 21, experts)
    hal_subject.verify("moe_index", {"ids": draw(hal_subject, 7, 3, experts), "num_experts": experts, "out": out})
    assert_guards(buffers)


@INDEX
@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [*((8, 2, tokens) for tokens in THRESHOLDS), *((60, 9, tokens) for tokens in THRESHOLDS if tokens <= 129)]
)
def test_tokens(hal_subject: Subject, tokens: int, experts: int, top_k: int) -> None:
    hal_subject.verify("moe_index", {"ids": draw(hal_subject, tokens, top_k, experts), "num_experts": experts})


@INDEX
@pytest.mark.parametrize("slots", [1023, 1024, 1025, pytest.param(4095, marks=pytest.mark.hal_gpu), 4097])
def test_many_slots(hal_subject: Subject, slots: int) -> None:
    """Beyond what one program sorts at once: slots ascend within each expert."""
    hal_subject.verify("moe_index", {"ids": draw(hal_subject, slots, 1, 7), "num_experts": 7})


@INDEX
@pytest.mark.hal_gpu
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(8192, 8, 128), (65537, 1, 3), (30000, 10, 1025), (262144, 2, 1)], ids=str)
def test_tens_of_thousands_of_slots(hal_subject: Subject, tokens: int, top_k: int, experts: int) -> None:
    hal_subject.verify("moe_index", {"ids": draw(hal_subject, tokens, top_k, experts), "num_experts": experts})


@INDEX
@pytest.mark.parametrize("tokens", [5, 40, 300])
def test_garbage_ids(hal_subject: Subject, tokens: int) -> None:
    """B3: ids of no expert are skipped, whatever their value; guards beside the counters stay."""
    ids = draw(hal_subject, tokens, 4, 9)
    wrong = ints(hal_subject, (*GARBAGE, 9, 10, -9))
    flat = ids.view(-1)
    flat[::3] = wrong[torch.arange(flat[::3].numel(), device=ids.device) % wrong.numel()]
    ids[1] = -1
    out, buffers = guarded(hal_subject, tokens * 4, 9)
    index = hal_subject.verify("moe_index", {"ids": ids, "num_experts": 9, "out": out})
    assert index.src_to_dst.view(tokens, 4)[1].tolist() == [-1] * 4
    assert_guards(buffers)


@INDEX
@pytest.mark.parametrize("value", [-1, 0, 6, 2**31 - 1])
def test_all_ids_equal(hal_subject: Subject, value: int) -> None:
    """All tokens on one expert, or on none."""
    hal_subject.verify("moe_index", {"ids": torch.full((33, 2), value, dtype=torch.int32, device=hal_subject.device), "num_experts": 7})


@INDEX
@pytest.mark.parametrize("span", [(0, 4), (4, 12), (5, 6), (11, 12), (0, 0), (7, 7), (12, 12), (0, 12)], ids=str)
def test_range(hal_subject: Subject, span: tuple[int, int]) -> None:
    """B6: experts of a range, also of a rank without any; ids beside it are skipped."""
    ids = draw(hal_subject, 20, 3, 12)
    ids[3], ids[4, 0] = 12, -1
    hal_subject.verify("moe_index", {"ids": ids, "num_experts": 12, "expert_range": span})


@INDEX
@pytest.mark.parametrize("local", [0, 1, 4, 9])
def test_map(hal_subject: Subject, local: int) -> None:
    """B6: a map in no order; values outside 0..E-1 say that an expert is elsewhere."""
    places = torch.full((9,), -1, dtype=torch.int32)
    places[torch.randperm(9, generator=hal_subject.generator())[:local]] = torch.arange(local, dtype=torch.int32)
    places[places < 0] = ints(hal_subject, [-1, 9, 2**31 - 1, -(2**31), 77]).cpu().repeat(2)[: int((places < 0).sum())]
    ids = draw(hal_subject, 20, 3, 9)
    ids[3], ids[4, 0], ids[5, 1] = 9, -1, 2**31 - 1
    args = {"ids": ids, "num_experts": 9, "expert_map": places.to(hal_subject.device), "num_local_experts": local}
    out, buffers = guarded(hal_subject, 60, local)
    hal_subject.verify("moe_index", args | {"out": out})
    assert_guards(buffers)


@INDEX
def test_map_of_two_ids_to_one_expert(hal_subject: Subject) -> None:
    args = {"ids": draw(hal_subject, 9, 2, 4), "num_experts": 4, "expert_map": ints(hal_subject, [1, 0, 1, -1]), "num_local_experts": 2}
    hal_subject.verify("moe_index", args)


@INDEX
def test_partitions_cover_every_slot_once(hal_subject: Subject) -> None:
    """B6: over all ranks each slot has one place, and sizes add up to those of the whole."""
    ids = draw(hal_subject, 25, 3, 10)
    whole = hal_subject.verify("moe_index", {"ids": ids, "num_experts": 10})
    parts = [hal_subject.verify("moe_index", {"ids": ids, "num_experts": 10, "expert_range": span}) for span in ((0, 3), (3, 3), (3, 10))]
    assert_same_bits("sizes", torch.cat([part.expert_sizes for part in parts]), whole.expert_sizes)
    assert bool((sum((part.src_to_dst >= 0).int() for part in parts) == 1).all())


@INDEX
def test_ids_of_another_width(hal_subject: Subject) -> None:
    """The first columns of a wider tensor, as one that also has a column for a shared expert."""
    wide = draw(hal_subject, 12, 6, 5)
    hal_subject.verify("moe_index", {"ids": wide[:, 1:4], "num_experts": 5})


@INDEX
@pytest.mark.parametrize("experts", [0, 5])
def test_no_tokens_then_some(hal_subject: Subject, experts: int) -> None:
    """B8; and a model part without experts."""
    out, buffers = guarded(hal_subject, 0, experts)
    hal_subject.verify("moe_index", {"ids": draw(hal_subject, 0, 2, experts), "num_experts": experts, "out": out})
    assert_guards(buffers)
    hal_subject.verify("moe_index", {"ids": draw(hal_subject, 3, 2, experts), "num_experts": experts})


@INDEX
def test_repeated_calls_agree(hal_subject: Subject) -> None:
    """B1, B11: nothing of one call reaches the next, and what one returned stays."""
    ids = draw(hal_subject, 64, 4, 13)
    first = hal_subject.verify("moe_index", {"ids": ids, "num_experts": 13})
    kept = [part.clone() for part in first]
    hal_subject.verify("moe_index", {"ids": (ids + 1) % 13, "num_experts": 13})
    for name, now, before in zip(MoeIndex._fields, first, kept, strict=True):
        assert_same_bits(f"{name} after another call", now, before)


def rows(subject: Subject, count: int, width: int, dtype: str = "fp32") -> Tensor:
    return torch.randn(count, width, generator=subject.generator()).to(subject.device, DTYPES[dtype])


def some_ids(subject: Subject, tokens: int = 9, top_k: int = 3, experts: int = 5) -> Tensor:
    """Ids with skipped slots, a token without an expert and one with all slots on one expert."""
    ids = draw(subject, tokens, top_k, experts)
    if tokens > 3:
        ids[0, 1], ids[1], ids[2] = -1, experts, ids[2, 0]
    return ids


@EXPAND
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("width", [1, 8, 24, 100, 136])
def test_expand(hal_subject: Subject, width: int, dtype: str) -> None:
    """B10: any width, with memory around the result guarded."""
    index = index_of(some_ids(hal_subject), 5)
    args: dict[str, Any] = {"x": rows(hal_subject, 9, width, dtype), "index": index}
    out, buffer = strided_slice((27, width), DTYPES[dtype], hal_subject.device)
    used = int(index.expert_sizes.sum())
    built = Built(args | {"out": out}, {"out": buffer})
    hal_subject.verify("moe_expand", built)
    assert used < 27
    hal_subject.verify("moe_expand", args)


@EXPAND
def test_expand_keeps_bits(hal_subject: Subject) -> None:
    """NaN payloads, infinities and both zeros are copied."""
    x = rows(hal_subject, 9, 8)
    x[3], x[4], x[5], x[6] = math.nan, -0.0, math.inf, -math.inf
    hal_subject.verify("moe_expand", {"x": x, "index": index_of(some_ids(hal_subject), 5)})


@EXPAND
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 24, 100])
def test_expand_any_dtype(hal_subject: Subject, dtype: torch.dtype, width: int) -> None:
    """Quantised rows, scales of rows and more: every bit pattern is copied, those of NaN included."""
    drawn = torch.randint(256, (9, width * dtype.itemsize), generator=hal_subject.generator(), dtype=torch.uint8).to(hal_subject.device)
    x = drawn.view(dtype) if dtype is not torch.bool else drawn > 127
    hal_subject.verify("moe_expand", {"x": x, "index": index_of(some_ids(hal_subject), 5)})


@EXPAND
def test_expand_quantised_into_padded_rows(hal_subject: Subject) -> None:
    """Rows of 40 codes of either side's own stride; memory around the result is guarded."""
    wide = torch.randint(-128, 128, (9, 64), generator=hal_subject.generator(), dtype=torch.int8).to(hal_subject.device)
    out, buffer = strided_slice((27, 40), torch.int8, hal_subject.device, 77)
    hal_subject.verify("moe_expand", Built({"x": wide[:, 3:43], "index": index_of(some_ids(hal_subject), 5), "out": out}, {"out": buffer}))


@EXPAND
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (1, 10), (17, 2), (65, 6)])
def test_expand_sizes(hal_subject: Subject, tokens: int, top_k: int) -> None:
    x, _ = strided_slice((tokens, 40), torch.bfloat16, hal_subject.device)
    x.copy_(rows(hal_subject, tokens, 40))
    hal_subject.verify("moe_expand", {"x": x, "index": index_of(some_ids(hal_subject, tokens, top_k), 5)})


@EXPAND
def test_expand_of_nothing_used(hal_subject: Subject) -> None:
    """All slots skipped: what stands in `dst_to_src` is never read."""
    hal_subject.verify("moe_expand", {"x": rows(hal_subject, 4, 16), "index": index_of(torch.full_like(draw(hal_subject, 4, 2, 3), -1), 3)})


def combining(subject: Subject, tokens: int = 9, top_k: int = 3, width: int = 40, dtype: str = "fp32") -> dict[str, Any]:
    """Arguments of `moe_combine`; NaN in unused rows of y and in weights of skipped slots."""
    ids = some_ids(subject, tokens, top_k)
    index = index_of(ids, 5)
    y = rows(subject, tokens * top_k, width, dtype)
    y[int(index.expert_sizes.sum()) :] = math.nan
    weights = torch.rand(tokens, top_k, generator=subject.generator()).to(subject.device) + 0.1
    weights[index.src_to_dst.view(tokens, top_k) < 0] = math.nan
    return {"y": y, "weights": weights, "index": index}


@COMBINE
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("width", [1, 8, 24, 100, 136, 2816])
def test_combine(hal_subject: Subject, width: int, dtype: str) -> None:
    """B7, B10: poison in what is skipped, any width, memory around the result guarded."""
    args = combining(hal_subject, width=width, dtype=dtype)
    out, buffer = strided_slice((9, width), DTYPES[dtype], hal_subject.device)
    result = hal_subject.verify("moe_combine", Built(args | {"out": out}, {"out": buffer}))
    assert bool((result[1] == 0).all()), "a token whose slots are all skipped"
    hal_subject.verify("moe_combine", args)


@COMBINE
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 2.5, 0.0])
def test_combine_with_residual(hal_subject: Subject, dtype: str, scale: float) -> None:
    """The residual is added once, after the scale; a skipped token keeps it to the bit."""
    args = combining(hal_subject, dtype=dtype)
    residual, _ = strided_slice((9, 40), DTYPES[dtype], hal_subject.device)
    residual.copy_(rows(hal_subject, 9, 40) * 3)
    result = hal_subject.verify("moe_combine", args | {"residual": residual, "scale": scale})
    assert_same_bits("the residual of a skipped token", result[1], residual[1].contiguous())


@COMBINE
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (1, 10), (17, 2), (65, 6), (5, 33)])
def test_combine_sizes(hal_subject: Subject, tokens: int, top_k: int) -> None:
    args = combining(hal_subject, tokens, top_k, dtype="bf16")
    hal_subject.verify("moe_combine", args | {"out": torch.full((tokens, 40), math.nan, dtype=torch.bfloat16, device=hal_subject.device)})


@COMBINE
def test_combine_is_fp32_in_the_order_of_slots(hal_subject: Subject) -> None:
    """B11: 1 + 2^24 - 2^24 in this order is 0 in fp32 (1 is lost), and 1 in any order that starts with the large ones."""
    index = index_of(ints(hal_subject, [[0, 1, 2], [2, 1, 0]]), 3)
    y = torch.zeros(6, 8, device=hal_subject.device)
    for token, values in enumerate(((1.0, 2.0**24, -(2.0**24)), (2.0**24, -(2.0**24), 1.0))):
        for j, value in enumerate(values):
            y[int(index.src_to_dst[token * 3 + j])] = value
    out = hal_subject.call("moe_combine", {"y": y, "weights": torch.ones(2, 3, device=hal_subject.device), "index": index})
    assert out[:, 0].tolist() == [0.0, 1.0]


@COMBINE
def test_combine_on_paper(hal_subject: Subject) -> None:
    index = index_of(ints(hal_subject, [[1, 0], [-1, 1]]), 2)  # sorted rows: token 0 j 1; token 0 j 0; token 1 j 1
    y = torch.tensor([[10.0] * 8, [1.0] * 8, [5.0] * 8, [math.nan] * 8], device=hal_subject.device)
    weights = torch.tensor([[0.25, 0.5], [math.nan, 2.0]], device=hal_subject.device)
    out = hal_subject.verify("moe_combine", {"y": y, "weights": weights, "index": index, "scale": 2.0})
    close("out", out[:, 0], torch.tensor([10.5, 20.0], dtype=torch.float64), OUTPUT[torch.float32])


@COMBINE
def test_weights_of_a_wider_tensor(hal_subject: Subject) -> None:
    args = combining(hal_subject)
    wide = torch.full((9, 5), math.nan, device=hal_subject.device)
    wide[:, 1:4] = args["weights"]
    hal_subject.verify("moe_combine", args | {"weights": wide[:, 1:4]})
