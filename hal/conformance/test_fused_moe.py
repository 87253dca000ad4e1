"""`fused_moe`: the tables of cases, what must hold between calls, and that the stages one by one give the same."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance import moe_oracle as oracle
from hal.conformance.compare import OUTPUT, REQUANTISED_ROWS, assert_same_bits, close
from hal.conformance.inputs import Built
from hal.conformance.moe_cases import FUSED, QUANTISED, TOGGLES
from hal.conformance.moe_inputs import Moe, build_moe
from hal.conformance.subject import Subject
from hal.ops import OPS
from hal.ops.moe_checks import MoeIndex

pytestmark = pytest.mark.hal_op("fused_moe")


def ids(case: Moe) -> str:
    return case.id


def build(subject: Subject, case: Moe) -> Built:
    subject.require("fused_moe")
    return build_moe(case, subject.generator(), subject.device)


def without(args: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name not in names}


@pytest.mark.parametrize("case", FUSED, ids=ids)
def test_case(hal_subject: Subject, case: Moe) -> None:
    hal_subject.verify("fused_moe", build(hal_subject, case))


@pytest.mark.parametrize("case", QUANTISED, ids=ids)
def test_quantised(hal_subject: Subject, case: Moe) -> None:
    hal_subject.verify("fused_moe", build(hal_subject, case))


@pytest.mark.parametrize(("argument", "case", "value"), [pytest.param(*toggle, id=toggle[1].id) for toggle in TOGGLES])
def test_argument_has_an_effect(hal_subject: Subject, argument: str, case: Moe, value: Any) -> None:
    built = build(hal_subject, case)
    for name, tensor in built.args.items():
        if isinstance(tensor, Tensor) and name != "out" and tensor.is_floating_point():
            tensor.nan_to_num_(nan=0.5)  # what the call may not look at is looked at without the argument
    bound = vars(OPS["fused_moe"].bind((), built.args))
    with pytest.raises(AssertionError):
        close("oracle", oracle.fused_moe(bound | {argument: value}), oracle.fused_moe(bound), OUTPUT[torch.float32])
    hal_subject.verify("fused_moe", built)


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
@pytest.mark.parametrize("quantised", ["int8", "e4m3"])
def test_scales_have_an_effect(hal_subject: Subject, quantised: str, scales: str) -> None:
    """Each of the three kinds of scales, of both products and of x, changes the result."""
    args = build(hal_subject, Moe("scales", quantised=quantised, scales=scales, x_quantised=True, hidden=256, inter=128)).args
    bound = vars(OPS["fused_moe"].bind((), args))
    first, second = args["w_scales"]
    for change in ({"w_scales": (first * 1.5, second)}, {"w_scales": (first, second * 1.5)}, {"x_scales": args["x_scales"] * 1.5}):
        with pytest.raises(AssertionError):
            close("oracle", oracle.fused_moe(bound | change), oracle.fused_moe(bound), REQUANTISED_ROWS[args["w_down"].dtype])
        hal_subject.verify("fused_moe", args | change)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_duplicates_are_summed(hal_subject: Subject, tokens: int, dtype: str) -> None:
    """A12: ids [3, 3] with weights [0.25, 0.75] are id 3 with weight 1."""
    args = without(build(hal_subject, Moe("twice", tokens=tokens, top_k=1, routing="one", dtype=dtype)).args, "out")
    args["weights"] = torch.ones_like(args["weights"])
    once = hal_subject.verify("fused_moe", args)
    weights = torch.tensor([0.25, 0.75], device=hal_subject.device).expand(tokens, 2)
    twice = hal_subject.verify("fused_moe", args | {"ids": args["ids"].repeat(1, 2), "weights": weights})
    close("twice against once", twice, once.double(), OUTPUT[once.dtype])


@pytest.mark.parametrize("how", ["range", "map"])
@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["", "on-input"])
def test_ranks_add_up(hal_subject: Subject, how: str, tokens: int, weight_on_input: bool) -> None:
    """B6: the sum over ranks, one of them without experts, is the result of one rank that holds them all."""
    case = Moe("ranks", tokens=tokens, experts=8, top_k=3, biases=True, weight_on_input=weight_on_input, routing="repeats")
    args = without(build(hal_subject, case).args, "out")
    whole = hal_subject.verify("fused_moe", args)
    parts: tuple[list[int], ...] = ([0, 1, 2], [], [3, 4, 5, 6, 7]) if how == "range" else ([5, 0, 2], [], [7, 1, 6, 3, 4])
    total = torch.zeros_like(whole, dtype=torch.float64)
    for part in parts:
        held = torch.tensor(part, dtype=torch.int64, device=hal_subject.device)
        local = args | {name: args[name][held] for name in ("w_gate_up", "w_down", "b_gate_up", "b_down")}
        if how == "range":
            span = (part[0], part[-1] + 1) if part else (4, 4)
            local |= {"expert_range": span, "num_experts": 8}
        else:
            places = torch.full((8,), -1, dtype=torch.int32, device=hal_subject.device)
            places[held] = torch.arange(len(part), dtype=torch.int32, device=hal_subject.device)
            local["expert_map"] = places
        out = hal_subject.verify("fused_moe", local)
        foreign = [t for t, row in enumerate(args["ids"].tolist()) if not set(row) & set(part)]
        assert bool((out[foreign] == 0).all()), "tokens without an expert on a rank"
        total += out.double()
    close("sum over ranks", total, whole.double(), OUTPUT[torch.float32])


def through_stages(subject: Subject, args: dict[str, Any]) -> Tensor:
    """What the stages give one after the other, every intermediate poisoned before it is written."""

    def poison(rows: int, width: int) -> Tensor:
        return torch.full((rows, width), math.nan, dtype=args["x"].dtype, device=subject.device)

    experts, double, hidden = args["w_gate_up"].shape
    slots = args["ids"].numel()
    where = {name: args[name] for name in ("expert_range", "expert_map") if args.get(name) is not None}
    where |= {"num_local_experts": experts} if "expert_map" in where else {}
    total = args["expert_map"].shape[0] if "expert_map" in where else args.get("num_experts") or experts
    out = MoeIndex(*(torch.full((n,), 2**31 - 1, dtype=torch.int32, device=subject.device) for n in (slots, slots, experts)))
    index = subject.verify("moe_index", {"ids": args["ids"], "num_experts": total, "out": out, **where})
    x = subject.verify("moe_expand", {"x": args["x"], "index": index, "out": poison(slots, hidden)})
    first = {"x": x, "weight": args["w_gate_up"], "expert_sizes": index.expert_sizes, "bias": args.get("b_gate_up"), "out": poison(slots, double)}
    x = subject.verify("group_gemm", first)
    op = {"silu": "silu_and_mul", "swiglu_oai": "swiglu_oai_and_mul"}[args["activation"]]
    numbers = {name: args[name] for name in ("alpha", "limit") if args.get(name) is not None}
    x = subject.call(op, {"x": x, "gate_up": args["gate_up"], "out": poison(slots, double // 2), **numbers})
    second = {"x": x, "weight": args["w_down"], "expert_sizes": index.expert_sizes, "bias": args.get("b_down"), "out": poison(slots, hidden)}
    x = subject.verify("group_gemm", second)
    return subject.verify("moe_combine", {"y": x, "weights": args["weights"], "index": index, "out": poison(args["x"].shape[0], hidden)})


_CHAINS = (
    Moe("garbage", tokens=20, top_k=3, routing="garbage"),
    Moe("nobody", tokens=4, routing="nobody"),
    Moe("range", tokens=20, top_k=3, placement="range", biases=True),
    Moe("map", tokens=20, top_k=3, placement="map", dtype="bf16"),
    Moe("nothing", tokens=5, placement="nothing"),
    Moe("gpt-oss", tokens=9, activation="swiglu_oai", gate_up="interleaved", biases=True, storage="transposed", dtype="bf16"),
    Moe("silu-limit", tokens=9, limit=0.4),
    Moe("swiglu-numbers", tokens=9, activation="swiglu_oai", alpha=0.7, limit=0.6),
    Moe("no-tokens", tokens=0),
    Moe("one-token", tokens=1, top_k=4, dtype="fp16"),
)


@pytest.mark.parametrize("case", _CHAINS, ids=ids)
def test_stages_one_by_one(hal_subject: Subject, case: Moe) -> None:
    """B7: rows that a stage leaves unspecified reach nothing, whatever stood there."""
    if "num_experts" not in (args := build(hal_subject, case).args):
        args["num_experts"] = None
    for op in ("moe_index", "moe_expand", "group_gemm", "silu_and_mul", "swiglu_oai_and_mul", "moe_combine"):
        hal_subject.require(op)
    out = through_stages(hal_subject, args)
    fused = hal_subject.verify("fused_moe", args)
    close("stages against fused", out, fused.double(), OUTPUT[out.dtype])


@pytest.mark.parametrize("tokens", [1, 3, 20, 70])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_poison_changes_no_bit(hal_subject: Subject, tokens: int, dtype: str) -> None:
    """B7: NaN in all that may not be looked at against zeros there."""
    args = build(hal_subject, Moe("poison", tokens=tokens, experts=9, top_k=3, routing="garbage", dtype=dtype, biases=True)).args
    clean = {n: t.nan_to_num(nan=0.0) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in args.items()}
    expected = hal_subject.verify("fused_moe", clean).clone()
    assert_same_bits("poisoned against clean", hal_subject.verify("fused_moe", args), expected)


@pytest.mark.parametrize("tokens", [1, 20])
def test_bad_token_stays_alone(hal_subject: Subject, tokens: int) -> None:
    """NaN and infinity in one token reach no other, though they share experts."""
    args = without(build(hal_subject, Moe("bad", tokens=tokens + 2, experts=2)).args, "out")
    expected = hal_subject.verify("fused_moe", args)
    bad = args["x"].clone()
    bad[0], bad[1] = math.nan, math.inf
    got = hal_subject.call("fused_moe", args | {"x": bad})
    assert_same_bits("other tokens", got[2:], expected[2:])


@pytest.mark.parametrize(
    "case", [Moe("T-8", tokens=8, valid=5, experts=4, top_k=2), Moe("T-40", tokens=40, valid=29, experts=4, dtype="bf16")], ids=ids
)
def test_padding_wakes_no_expert(hal_subject: Subject, case: Moe) -> None:
    """B13: experts that only padding tokens name are not looked at: their weights are NaN, and no bit changes."""
    built = build(hal_subject, replace(case, experts=case.experts + 1))
    assert case.valid is not None
    last = case.experts
    ids_ = built.args["ids"]
    ids_[: case.valid] %= last
    ids_[case.valid :] = last
    built.args["weights"] = torch.rand(ids_.shape, generator=hal_subject.generator()).to(hal_subject.device)
    built.args["weights"][case.valid :] = math.nan
    for name in ("w_gate_up", "w_down", "x"):
        built.args[name] = torch.randn(built.args[name].shape, generator=hal_subject.generator()).to(built.args[name])
    for name in ("w_gate_up", "w_down"):
        built.args[name][last] = math.nan
    built.args["x"][case.valid :] = math.nan
    out = hal_subject.verify("fused_moe", built)
    assert bool((out[case.valid :] == 0).all())
    short = without({n: t[: case.valid] if n in ("x", "weights", "ids") else t for n, t in built.args.items()}, "out", "num_valid_tokens")
    close("padded against short", out[: case.valid], hal_subject.verify("fused_moe", short).double(), OUTPUT[out.dtype])


@pytest.mark.parametrize("tokens", [1, 3, 17, 70])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_repeated_calls_agree(hal_subject: Subject, tokens: int, dtype: str) -> None:
    """B11: the same bits each time, with calls of other sizes and ids in between; results of two calls are apart."""
    args = without(build(hal_subject, Moe("repeat", tokens=tokens, dtype=dtype, hidden=136, top_k=3)).args, "out")
    first = hal_subject.verify("fused_moe", args)
    kept = first.clone()
    other = build(hal_subject, Moe("other", tokens=33, dtype=dtype, hidden=72, routing="garbage", out="new")).args
    for _ in range(2):
        hal_subject.call("fused_moe", other)
        assert_same_bits("the same call again", hal_subject.call("fused_moe", args), kept)
    assert_same_bits("a result after other calls", first, kept)


def test_in_place_updates_are_seen(hal_subject: Subject) -> None:
    args = build(hal_subject, Moe("update", tokens=12, experts=4, top_k=2, biases=True, valid=9, routing="balanced")).args
    args["x"] = args["x"].nan_to_num(nan=1.0)
    args["weights"] = args["weights"].nan_to_num(nan=1.0)
    hal_subject.verify("fused_moe", args)
    for name, change in (
        ("ids", lambda t: t.copy_((t + 1) % 4)),
        ("weights", lambda t: t.mul_(-0.5)),
        ("x", lambda t: t.add_(0.25)),
        ("w_gate_up", lambda t: t.mul_(1.5)),
        ("w_down", lambda t: t.neg_()),
        ("b_down", lambda t: t.add_(1.0)),
        ("num_valid_tokens", lambda t: t.fill_(12)),
    ):
        change(args[name])
        hal_subject.verify("fused_moe", args)


def test_valid_tokens_of_one_element(hal_subject: Subject) -> None:
    """(1,) counts like ()."""
    args = build(hal_subject, Moe("valid", tokens=8, valid=5)).args
    hal_subject.verify("fused_moe", args | {"num_valid_tokens": args["num_valid_tokens"].reshape(1)})


def test_no_tokens_then_some(hal_subject: Subject) -> None:
    """B8."""
    out = hal_subject.verify("fused_moe", build(hal_subject, Moe("none", tokens=0, out="new", dtype="bf16")))
    assert tuple(out.shape) == (0, 32)
    hal_subject.verify("fused_moe", build(hal_subject, Moe("some", tokens=3, dtype="bf16")))


def test_routed(hal_subject: Subject) -> None:
    """Routing and experts together, bad rows included: ids of `route` are always fit for `fused_moe`."""
    for op in ("route", "topk_softmax"):
        hal_subject.require(op)
    args = without(build(hal_subject, Moe("routed", tokens=6, experts=8, routing="balanced")).args, "out", "weights", "ids")
    logits = torch.randn(6, 8, generator=hal_subject.generator()).to(hal_subject.device)
    logits[1], logits[3, 2], logits[4] = math.nan, math.inf, -math.inf
    weights, ids_ = hal_subject.verify("topk_softmax", {"logits": logits, "top_k": 3, "renormalize": True})
    out = hal_subject.verify("fused_moe", args | {"weights": weights, "ids": ids_})
    assert bool((out[[1, 4]] == 0).all())
