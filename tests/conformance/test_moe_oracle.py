"""The judge of routing and of the expert pipeline, against numbers on paper and against torch; and its tables of cases."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.conformance import moe_oracle as oracle
from hal.conformance import test_gpu_moe
from hal.conformance.moe_cases import FUSED, FUSED_LARGE, GEMM, QUANTISED, TOGGLES
from hal.conformance.moe_inputs import Moe, build_moe, expert_weight, gemm_args
from hal.conformance.moe_judge import JUDGES
from hal.conformance.routing_inputs import BAD_ROWS, levels, separable
from hal.ops import OPS
from hal.ops.moe_checks import MoeIndex

CPU, INF, NAN = torch.device("cpu"), math.inf, math.nan


def routed(logits: list[list[float]], top_k: int, **options: Any) -> tuple[list[list[float]], list[list[int]]]:
    args = vars(OPS["route"].bind((torch.tensor(logits), top_k), options))
    weights, ids = oracle.route(args)
    return weights.tolist(), ids.tolist()


def test_softmax_by_hand() -> None:
    weights, ids = routed([[2.0, 1.0, 0.0, -1.0]], 2)
    assert ids == [[0, 1]]
    assert weights[0] == pytest.approx([0.6439142599, 0.2368828181])
    assert routed([[2.0, 1.0, 0.0, -1.0]], 2, renormalize=True)[0][0] == pytest.approx([0.7310585786, 0.2689414214])


def test_agrees_with_torch() -> None:
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    weights, ids = oracle.route(vars(OPS["topk_softmax"].bind((logits, 5), {})))
    ours, theirs = (weights, ids.long()), logits.double().softmax(1).topk(5)
    assert torch.equal(ours[1], theirs.indices)
    assert torch.allclose(ours[0], theirs.values, rtol=1e-12)


@pytest.mark.parametrize(
    ("row", "weights", "ids"),
    [
        ([NAN, NAN, NAN], [0, 0], [0, 1]),
        ([-INF, NAN, -INF], [0, 0], [0, 1]),
        ([INF, 1.0, INF], [0.5, 0.5], [0, 2]),
        ([1.0, INF, 2.0], [1.0, 0.0], [1, 2]),
        ([NAN, 0.0, -INF], [1.0, 0.0], [1, 0]),
        ([0.0, NAN, 0.0], [0.5, 0.5], [0, 2]),
        ([-0.0, 0.0, -1.0], [0.422318798, 0.422318798], [0, 1]),
    ],
)
def test_bad_logits_by_hand(row: list[float], weights: list[float], ids: list[int]) -> None:
    got_weights, got_ids = routed([row], 2)
    assert got_ids == [ids]
    assert got_weights[0] == pytest.approx(weights)


def test_groups_by_hand() -> None:
    """Group sums of the best two are 3, 4 and 3.5; the best single expert is in group 0."""
    row = [3.0, 0.0, 2.0, 2.0, 1.5, 2.0]
    scores = [1 / (1 + math.exp(-x)) for x in row]
    weights, ids = routed([row], 2, scoring="sigmoid", num_groups=3, top_groups=1, group_score="top2")
    assert ids == [[2, 3]]
    assert weights[0] == pytest.approx([scores[2], scores[3]])
    assert routed([row], 2, scoring="sigmoid", num_groups=3, top_groups=1)[1] == [[0, 1]]


def test_bias_by_hand() -> None:
    weights, ids = routed([[2.0, 1.0, 0.0]], 2, scoring="sigmoid", correction_bias=torch.tensor([0.0, 0.0, 5.0]), renormalize=True, scale=2.0)
    assert ids == [[2, 0]]
    total = 0.5 + 1 / (1 + math.exp(-2.0))
    assert weights[0] == pytest.approx([2 * 0.5 / total, 2 * (total - 0.5) / total])


def test_separable_rejects_what_fp32_cannot_tell_apart() -> None:
    close = {"logits": torch.tensor([[1.0, 1.0 + 1e-7, 0.0, 0.0]]), "top_k": 1}
    with pytest.raises(AssertionError, match="no separable"):
        separable(lambda: close)
    assert separable(lambda: {"logits": levels(torch.Generator().manual_seed(0), 2, 8), "top_k": 1})


def test_index_by_hand() -> None:
    ids = torch.tensor([[2, 0], [7, 2], [-1, 1]], dtype=torch.int32)
    plain = {"ids": ids, "expert_range": None, "expert_map": None, "num_local_experts": None}
    index = oracle.moe_index(plain | {"num_experts": 3})
    assert [part.tolist() for part in index] == [[1, 5, 0, 3], [2, 0, -1, 3, -1, 1], [1, 1, 2]]
    index = oracle.moe_index(plain | {"num_experts": 8, "expert_range": (2, 8)})
    assert [part.tolist() for part in index] == [[0, 3, 2], [0, -1, 2, 1, -1, -1], [2, 0, 0, 0, 0, 1]]
    places = torch.tensor([1, 9, 0], dtype=torch.int32)
    index = oracle.moe_index(plain | {"num_experts": 3, "expert_map": places, "num_local_experts": 2})
    assert [part.tolist() for part in index] == [[0, 3, 1], [0, 2, -1, 1, -1, -1], [2, 1]]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_agree_with_torch(activation: str) -> None:
    x = torch.randn(5, 24, dtype=torch.float64) * 3
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    theirs = known[activation]
    assert torch.allclose(oracle.activate(x, activation, "concat"), theirs(x[:, :12]) * x[:, 12:])
    assert torch.allclose(oracle.activate(x, activation, "interleaved"), theirs(x[:, ::2]) * x[:, 1::2])


def test_fused_agrees_with_dense_experts() -> None:
    """Every expert on every token, masked afterwards: what a model without routing kernels would compute."""
    args = build_moe(Moe("dense", tokens=9, experts=4, top_k=4, biases=True), torch.Generator().manual_seed(1), CPU).args
    hidden = torch.einsum("th,enh->etn", args["x"].double(), args["w_gate_up"].double()) + args["b_gate_up"].double()[:, None]
    gate, up = hidden.chunk(2, dim=-1)
    result = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, args["w_down"].double()) + args["b_down"].double()[:, None]
    dense = torch.zeros(9, 4, dtype=torch.float64).scatter_add_(1, args["ids"].long(), args["weights"].double())
    expected = torch.einsum("te,eth->th", dense, result)
    assert torch.allclose(oracle.fused_moe(vars(OPS["fused_moe"].bind((), args))), expected)


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_dequantised_is_near_what_was_quantised(scales: str) -> None:
    for quantised, most in (("int8", 0.01), ("e4m3", 0.07)):
        case = Moe("q", quantised=quantised, scales=scales, hidden=200, inter=70)
        args = gemm_args(case, [2, 3], torch.Generator().manual_seed(0), CPU).args
        plain = gemm_args(Moe("q", hidden=200, inter=70), [2, 3], torch.Generator().manual_seed(0), CPU).args
        error = (oracle.dequantised(args["weight"], args["w_scales"]) - plain["weight"]).abs().max()
        assert error < most * plain["weight"].abs().max()


def test_poison_stands_where_no_call_may_look() -> None:
    args = build_moe(Moe("poison", tokens=9, experts=40, top_k=2, routing="few"), torch.Generator().manual_seed(0), CPU).args
    assert int(args["w_gate_up"].isnan().any(-1).any(-1).sum()) == int(args["w_down"].isnan().any(-1).any(-1).sum()) == 38
    args = build_moe(Moe("poison", tokens=9, routing="garbage", valid=4), torch.Generator().manual_seed(0), CPU).args
    assert bool(args["weights"][4:].isnan().all())
    assert bool(args["x"][4:].isnan().all())
    assert bool(args["out"].isnan().all())


@pytest.mark.parametrize("storage", ["compact", "transposed", "padded", "transposed_padded"])
def test_storages_hold_the_same_weights(storage: str) -> None:
    data = torch.randn(3, 8, 5)
    weight = expert_weight(data, storage, NAN)
    assert torch.equal(weight, data)
    assert (weight.stride(1) == 1) == storage.startswith("transposed")
    assert weight.is_contiguous() == (storage == "compact")


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_have_eight_logits(name: str) -> None:
    assert len(BAD_ROWS[name]) == 8


@pytest.mark.parametrize(
    "table", [FUSED, FUSED_LARGE, QUANTISED, [e[2] for e in GEMM], [t[1] for t in TOGGLES]], ids=["fused", "large", "q", "gemm", "t"]
)
def test_case_names_are_unique(table: tuple[Moe, ...]) -> None:
    names = [case.id for case in table]
    assert len(set(names)) == len(names)


def test_every_optional_argument_of_fused_moe_is_toggled() -> None:
    """An argument that the suite never moves away from its default could be ignored by a backend unseen."""
    optional = {p.name for p in OPS["fused_moe"].parameters.parameters.values() if p.default is not inspect.Parameter.empty}
    scales, placement = {"w_scales", "x_scales"}, {"num_experts", "expert_range", "expert_map"}  # tests of their own
    assert optional - scales - placement - {"out"} == {argument for argument, _, _ in TOGGLES}


def test_every_moe_op_is_judged_and_captured() -> None:
    moe = set(OPS) - {"flash_decode", "flash_prefill", "merge_states", "plan_decode", "write_kv"}
    assert set(JUDGES) == moe == {op for op, _ in test_gpu_moe._MAKERS.values()}


@pytest.mark.parametrize("wrong", ["order", "dropped", "weights"])
def test_judge_of_routing_fails(wrong: str) -> None:
    args = vars(OPS["topk_softmax"].bind((torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 3), {}))
    weights, ids = oracle.route(args)
    weights = weights.float()
    JUDGES["topk_softmax"](args, (weights, ids))
    bad = {
        "order": (weights, ids[:, [1, 0, 2]]),
        "dropped": (weights, torch.tensor([[1, 2, 3]], dtype=torch.int32)),
        "weights": (weights * 1.001, ids),
    }[wrong]
    with pytest.raises(AssertionError):
        JUDGES["topk_softmax"](args, bad)


def test_judge_of_the_index_fails() -> None:
    args = vars(OPS["moe_index"].bind((torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), 2), {}))
    index = oracle.moe_index(args)
    JUDGES["moe_index"](args, index)
    swapped = torch.tensor([3, 0, 1, 2], dtype=torch.int32)  # slots of expert 0 out of order
    for bad in (index._replace(dst_to_src=swapped), index._replace(expert_sizes=index.expert_sizes + 1), tuple(index)):
        with pytest.raises(AssertionError):
            JUDGES["moe_index"](args, bad)
    assert isinstance(index, MoeIndex)
