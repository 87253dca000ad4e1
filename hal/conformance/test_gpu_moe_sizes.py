"""Routing and the expert pipeline beyond 31 bits of offset, and beyond 16 bits of grid: B9, at every stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance import moe_oracle as oracle
from hal.conformance.caches import filled
from hal.conformance.compare import OUTPUT, assert_same_bits, close
from hal.conformance.moe_inputs import Moe, build_moe
from hal.conformance.subject import Subject
from hal.conformance.test_gpu_sizes import GIB, need_memory
from hal.ops.moe_checks import MoeIndex

pytestmark = pytest.mark.hal_gpu

BF16 = torch.bfloat16
FUSED = pytest.mark.hal_op("fused_moe")


def rows(subject: Subject, count: int, width: int) -> Tensor:
    """Random bf16 rows, made on the device piece by piece."""
    x = torch.empty(count, width, dtype=BF16, device=subject.device)
    generator = torch.Generator(subject.device).manual_seed(subject.case_seed() % 2**31)
    for part in x.split(max(1, 2**26 // width)):
        part.normal_(generator=generator)
    return x


def index_of(ids: Tensor, experts: int) -> MoeIndex:
    """The index of valid ids, by a stable sort on the device."""
    order = ids.flatten().long().sort(stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=ids.device)
    sizes = ids.flatten().long().bincount(minlength=experts)
    return MoeIndex(order.int(), place.int(), sizes.int())


def drawn(subject: Subject, tokens: int, top_k: int, experts: int) -> Tensor:
    return torch.randint(experts, (tokens, top_k), generator=subject.generator(), dtype=torch.int32).to(subject.device)


def sample(count: int, around: int) -> list[int]:
    """The first and last rows, and those around one."""
    return sorted({i for centre in (0, around, count - 1) for i in range(centre - 2, centre + 3) if 0 <= i < count})


@pytest.mark.hal_op("topk_softmax")
def test_router(hal_subject: Subject) -> None:
    """8.4 million rows of 256 logits."""
    need_memory(hal_subject, 8)
    tokens = 2**31 // 256 + 7
    x = rows(hal_subject, tokens, 256)
    weights, ids = hal_subject.call("topk_softmax", {"logits": x, "top_k": 8, "renormalize": True}, frozen=False)
    at = sample(tokens, 2**31 // 256)
    hal_subject.expect_moe("topk_softmax", {"logits": x[at], "top_k": 8, "renormalize": True}, (weights[at], ids[at]))


@pytest.mark.hal_op("moe_expand")
def test_expand(hal_subject: Subject) -> None:
    need_memory(hal_subject, 8)
    tokens, top_k, width = 2**31 // 40960 + 9, 10, 4096
    x, index = rows(hal_subject, tokens, width), index_of(drawn(hal_subject, tokens, top_k, 7), 7)
    out = hal_subject.call("moe_expand", {"x": x, "index": index}, frozen=False)
    at = torch.tensor(sample(tokens * top_k, 2**31 // width), device=x.device)
    assert_same_bits("rows", out[at], x[index.dst_to_src[at].long() // top_k])


@pytest.mark.hal_op("group_gemm")
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 64), (64, 4096)], ids=["out", "x"])
def test_rows_of_group_gemm(hal_subject: Subject, outputs: int, inputs: int) -> None:
    """Rows of x or of the result beyond 2^31 elements."""
    count = 2**31 // 4096 + 1000
    need_memory(hal_subject, 60)
    x, weight = rows(hal_subject, count, inputs), rows(hal_subject, 2 * outputs, inputs).view(2, outputs, inputs)
    sizes = torch.tensor([count - 700, 700], dtype=torch.int32, device=x.device)
    out = hal_subject.call("group_gemm", {"x": x, "weight": weight, "expert_sizes": sizes}, frozen=False)
    for at, expert in ((sample(count - 700, 2**31 // 4096), 0), ([count - 700, count - 699, count - 1], 1)):
        close("rows", out[at], x[at].double() @ weight[expert].double().T, OUTPUT[BF16])


@pytest.mark.hal_op("silu_and_mul")
@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
def test_activation(hal_subject: Subject, gate_up: str) -> None:
    """61,681 tokens at an intermediate size of 17,408."""
    need_memory(hal_subject, 8)
    count, width = 61_681, 2 * 17_408
    x = rows(hal_subject, count, width)
    out = hal_subject.call("silu_and_mul", {"x": x, "gate_up": gate_up}, frozen=False)
    at = sample(count, count - 1)
    close("rows", out[at], oracle.activate(x[at], "silu", gate_up), OUTPUT[BF16])


@pytest.mark.hal_op("moe_combine")
@pytest.mark.parametrize("tokens", [52_428, 65_536, 65_545])
def test_combine(hal_subject: Subject, tokens: int) -> None:
    """52,428 tokens of 10 rows of 4096 are just below 2^31 elements."""
    need_memory(hal_subject, 10)
    top_k, width = 10, 4096
    index = index_of(drawn(hal_subject, tokens, top_k, 7), 7)
    y = rows(hal_subject, tokens * top_k, width)
    weights = torch.rand(tokens, top_k, generator=hal_subject.generator()).to(y.device)
    out = hal_subject.call("moe_combine", {"y": y, "weights": weights, "index": index}, frozen=False)
    for token in sample(tokens, 52_429):
        places = index.src_to_dst[token * top_k : (token + 1) * top_k].long()
        close(f"token {token}", out[token], (weights[token].double()[:, None] * y[places].double()).sum(0), OUTPUT[BF16])


@FUSED
@pytest.mark.parametrize("storage", ["compact", "transposed"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_weights(hal_subject: Subject, storage: str, tokens: int) -> None:
    """513 experts of which the last two lie beyond 2^31 elements, in both products; the others are NaN."""
    experts, hidden, inter = 513, 4096, 1024
    need_memory(hal_subject, 16)
    args: dict[str, Any] = {"x": rows(hal_subject, tokens, hidden)}
    for name, outputs, inputs in (("w_gate_up", 2 * inter, hidden), ("w_down", hidden, inter)):
        shape = (experts, outputs, inputs) if storage == "compact" else (experts, inputs, outputs)
        weight = filled(shape, math.nan, BF16, hal_subject.device)
        weight[-2:] = rows(hal_subject, 2 * outputs, inputs).view(2, *shape[1:]) / math.sqrt(inputs)
        args[name] = weight if storage == "compact" else weight.transpose(1, 2)
    args["ids"] = torch.tensor([[512, 511]], dtype=torch.int32, device=hal_subject.device).repeat(tokens, 1)
    args["weights"] = torch.tensor([[0.75, 0.25]], device=hal_subject.device).repeat(tokens, 1)
    hal_subject.verify("fused_moe", args, frozen=False)


def judge_tokens(subject: Subject, args: dict[str, Any], out: Tensor, tokens: list[int]) -> None:
    """Compare some rows of the result with the oracle of a call of these tokens alone."""
    few = args | {name: args[name][tokens] for name in ("x", "ids", "weights")}
    few.pop("out", None)
    subject.expect_moe("fused_moe", few, out[tokens])


@FUSED
@pytest.mark.parametrize("tokens", [52_428, 56_001])
def test_intermediate_rows(hal_subject: Subject, tokens: int) -> None:
    """T * k * H just below and above 2^31."""
    need_memory(hal_subject, 90)
    args = {
        "x": rows(hal_subject, tokens, 4096),
        "w_gate_up": rows(hal_subject, 8 * 128, 4096).view(8, 128, 4096) / 64,
        "w_down": rows(hal_subject, 8 * 4096, 64).view(8, 4096, 64) / 8,
        "ids": drawn(hal_subject, tokens, 10, 8),
        "weights": torch.rand(tokens, 10, generator=hal_subject.generator()).to(hal_subject.device),
    }
    out = hal_subject.call("fused_moe", args, frozen=False)
    judge_tokens(hal_subject, args, out, sample(tokens, 52_429))


@FUSED
@pytest.mark.parametrize("routing", ["random", "one"])
def test_many_tokens(hal_subject: Subject, routing: str) -> None:
    """Grids of more than 65,535 tiles and programs, with many experts or all tokens on one."""
    need_memory(hal_subject, 30)
    tokens = 1_200_000
    args = build_moe(Moe("few", tokens=1, experts=64, top_k=2, hidden=64, inter=32, routing="one"), hal_subject.generator(), hal_subject.device).args
    args = {"x": rows(hal_subject, tokens, 64), "w_gate_up": args["w_gate_up"], "w_down": args["w_down"]}
    for name in ("w_gate_up", "w_down"):
        args[name] = rows(hal_subject, args[name].shape[0] * args[name].shape[1], args[name].shape[2]).view(args[name].shape) / 8
    args["ids"] = (
        drawn(hal_subject, tokens, 2, 64) if routing == "random" else torch.full((tokens, 2), 63, dtype=torch.int32, device=hal_subject.device)
    )
    args["weights"] = torch.rand(tokens, 2, generator=hal_subject.generator()).to(hal_subject.device)
    out = hal_subject.call("fused_moe", args, frozen=False)
    judge_tokens(hal_subject, args, out, sample(tokens, 65_536))
    judge_tokens(hal_subject, args, out, sample(tokens, 32_768 * 16))


@FUSED
def test_strides(hal_subject: Subject) -> None:
    """Rows of x and of out more than 2^31 elements apart."""
    need_memory(hal_subject, 4 * (2**31 + 2**12) * 2 / GIB + 2)
    args = build_moe(Moe("far", tokens=2, experts=4, dtype="bf16", hidden=64), hal_subject.generator(), hal_subject.device).args
    far = 2**31 + 8
    for name in ("x", "out"):
        view = torch.empty(far + 64, dtype=BF16, device=hal_subject.device).as_strided((2, 64), (far, 1))
        view.copy_(args[name])
        args[name] = view
    hal_subject.verify("fused_moe", args, frozen=False)


@pytest.mark.hal_op("moe_index")
def test_slots(hal_subject: Subject) -> None:
    """3 million slots."""
    ids = drawn(hal_subject, 300_001, 10, 300)
    expected = index_of(ids, 300)
    for name, got, wanted in zip(MoeIndex._fields, hal_subject.call("moe_index", {"ids": ids, "num_experts": 300}), expected, strict=True):
        assert_same_bits(name, got, wanted)
