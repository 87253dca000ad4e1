"""`topk_softmax` and `route`: sizes, ties, bad logits, groups, and what the weights mean. The oracle is a stable sort."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.cases import DTYPES
from hal.conformance.compare import ROUTER_WEIGHTS, assert_same_bits, close
from hal.conformance.inputs import Built, strided_slice
from hal.conformance.routing_inputs import BAD_ROWS, EXPERTS, THRESHOLDS, TOP_K, levels, separable
from hal.conformance.subject import Subject

TOPK = pytest.mark.hal_op("topk_softmax")
ROUTE = pytest.mark.hal_op("route")
NAN = math.nan


def logits(subject: Subject, tokens: int, experts: int, dtype: str = "fp32") -> Tensor:
    return (torch.randn(tokens, experts, generator=subject.generator()) * 2).to(subject.device, DTYPES[dtype])


def outputs(subject: Subject, tokens: int, top_k: int) -> dict[str, Tensor]:
    """Poisoned outputs."""
    shape, device = (tokens, top_k), subject.device
    return {"weights": torch.full(shape, NAN, device=device), "ids": torch.full(shape, -77, dtype=torch.int32, device=device)}


def rows(subject: Subject, *values: list[float], dtype: str = "fp32") -> Tensor:
    return torch.tensor(values).to(subject.device, DTYPES[dtype])


@TOPK
@pytest.mark.parametrize("renormalize", [False, True], ids=["plain", "renormalized"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_experts(hal_subject: Subject, experts: int, renormalize: bool) -> None:
    """A4: any number of experts."""
    args = {"logits": logits(hal_subject, 5, experts), "top_k": min(experts, 8), "renormalize": renormalize}
    hal_subject.verify("topk_softmax", args | outputs(hal_subject, 5, min(experts, 8)))


@TOPK
@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("experts", [64, 257])
def test_top_k(hal_subject: Subject, experts: int, top_k: int) -> None:
    """A6: any number of experts per token."""
    hal_subject.verify("topk_softmax", {"logits": logits(hal_subject, 3, experts), "top_k": top_k, "renormalize": True})


@TOPK
@pytest.mark.parametrize("experts", [1, 2, 3, 7, 33, 64, 100, 257])
def test_all_experts(hal_subject: Subject, experts: int) -> None:
    """A6: k = E."""
    hal_subject.verify("topk_softmax", {"logits": logits(hal_subject, 2, experts, "bf16"), "top_k": experts})


@TOPK
@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [*((8, 2, tokens) for tokens in THRESHOLDS), *((144, 10, tokens) for tokens in THRESHOLDS if tokens <= 65)]
)
def test_tokens(hal_subject: Subject, experts: int, top_k: int, tokens: int) -> None:
    """A5: the same support at every T."""
    args = {"logits": logits(hal_subject, tokens, experts, "bf16"), "top_k": top_k}
    hal_subject.verify("topk_softmax", args | outputs(hal_subject, tokens, top_k))


@TOPK
@pytest.mark.hal_gpu
@pytest.mark.parametrize("experts", EXPERTS)
def test_every_size_at_every_threshold(hal_subject: Subject, experts: int) -> None:
    """A5: every E at T on both sides of every threshold, and far beyond."""
    for tokens in (*THRESHOLDS, 1023, 1024, 1025):
        for top_k in {min(k, experts) for k in (1, 8, 17)}:
            hal_subject.verify("topk_softmax", {"logits": logits(hal_subject, tokens, experts, "bf16"), "top_k": top_k, "renormalize": True})


@TOPK
@pytest.mark.parametrize("best", [0, 1023, 1024])
def test_best_expert_is_the_last(hal_subject: Subject, best: int) -> None:
    """A6: 1025 experts, none of them out of sight."""
    x = torch.full((2, 1025), -1.0, device=hal_subject.device)
    x[:, best] = 3.0
    _, ids = hal_subject.verify("topk_softmax", {"logits": x, "top_k": 2})
    assert ids[:, 0].tolist() == [best, best]


@TOPK
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["plain", "renormalized"])
def test_dtypes(hal_subject: Subject, dtype: str, renormalize: bool) -> None:
    args = {"logits": logits(hal_subject, 9, 60, dtype), "top_k": 6, "renormalize": renormalize}
    hal_subject.verify("topk_softmax", args | outputs(hal_subject, 9, 6))


@TOPK
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("experts", [8, 100, 128, 513])
def test_ties(hal_subject: Subject, experts: int, dtype: str) -> None:
    """A7: among equal logits the lower id wins, also at the k boundary."""
    x = levels(hal_subject.generator(), 6, experts).to(hal_subject.device, DTYPES[dtype])
    x[0] = 1.0
    for top_k in (2, 7):
        _, ids = hal_subject.verify("topk_softmax", {"logits": x, "top_k": top_k})
        assert ids[0].tolist() == list(range(top_k))


@TOPK
def test_both_zeros_tie(hal_subject: Subject) -> None:
    """A7: -0.0 equals 0.0."""
    _, ids = hal_subject.verify("topk_softmax", {"logits": rows(hal_subject, [-1.0, -0.0, 0.0, -0.0, 0.0]), "top_k": 3})
    assert ids.tolist() == [[1, 2, 3]]


@TOPK
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(hal_subject: Subject, name: str, dtype: str) -> None:
    """A1, A3: ids distinct and in range, weights finite, and the neighbours bit-identical to a run without the bad row."""
    if name == "largest" and dtype == "fp16":
        x = logits(hal_subject, 3, 8).mul(1e4).to(DTYPES[dtype])
    else:
        x = logits(hal_subject, 3, 8, dtype)
        x[1] = rows(hal_subject, BAD_ROWS[name], dtype=dtype)[0]
    clean = x.clone()
    clean[1] = 0.0
    for top_k in (1, 3, 8):
        for renormalize in (False, True):
            call = {"top_k": top_k, "renormalize": renormalize}
            weights, ids = hal_subject.verify("topk_softmax", {"logits": x, **call, **outputs(hal_subject, 3, top_k)})
            for row in ids.tolist():
                assert len(set(row)) == top_k
                assert all(0 <= e < 8 for e in row)
            expected_weights, expected_ids = hal_subject.call("topk_softmax", {"logits": clean, **call})
            for row in (0, 2):
                assert_same_bits("weights of a neighbour", weights[row], expected_weights[row])
                assert_same_bits("ids of a neighbour", ids[row], expected_ids[row])


@TOPK
def test_no_usable_logit(hal_subject: Subject) -> None:
    """A1: ids 0..k-1 and weights 0."""
    x = rows(hal_subject, [NAN] * 6, [-math.inf] * 6)
    for renormalize in (False, True):
        weights, ids = hal_subject.verify("topk_softmax", {"logits": x, "top_k": 4, "renormalize": renormalize})
        assert ids.tolist() == [[0, 1, 2, 3]] * 2
        assert weights.tolist() == [[0.0] * 4] * 2


@TOPK
def test_weights_on_paper(hal_subject: Subject) -> None:
    """A8: softmax over all experts, then division only where asked."""
    x = rows(hal_subject, [2.0, 1.0, 0.0, -1.0])
    plain, _ = hal_subject.verify("topk_softmax", {"logits": x, "top_k": 2})
    divided, _ = hal_subject.verify("topk_softmax", {"logits": x, "top_k": 2, "renormalize": True})
    close("plain", plain, torch.tensor([[0.6439142599, 0.2368828181]], dtype=torch.float64), ROUTER_WEIGHTS)
    close("renormalized", divided, torch.tensor([[0.7310585786, 0.2689414214]], dtype=torch.float64), ROUTER_WEIGHTS)


@TOPK
def test_close_logits_stay_apart(hal_subject: Subject) -> None:
    """A10: fp32 logits 1e-4 apart, whose 16-bit roundings are equal."""
    x = torch.full((1, 64), 1.0, device=hal_subject.device)
    x[0, 40], x[0, 20], x[0, 50] = 1.0003, 1.0002, 1.0001
    _, ids = hal_subject.verify("topk_softmax", {"logits": x, "top_k": 4})
    assert ids.tolist() == [[40, 20, 50, 0]]


@TOPK
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_probabilities_are_not_rounded_before_the_choice(hal_subject: Subject, dtype: str) -> None:
    """A10: neighbouring 16-bit logits, whose probabilities round to the same 16-bit number."""
    x = torch.full((1, 128), -4.0).to(DTYPES[dtype])
    x[0, 7] = 0.0
    step = 2.0**-9 if dtype == "bf16" else 2.0**-12
    x[0, 90], x[0, 30] = -0.25, -0.25 - step
    _, ids = hal_subject.verify("topk_softmax", {"logits": x.to(hal_subject.device), "top_k": 3})
    assert ids.tolist() == [[7, 90, 30]]


@TOPK
@pytest.mark.parametrize("experts", [8, 128, 512])
def test_renormalized_weights_sum_to_one(hal_subject: Subject, experts: int) -> None:
    """A10: within 1e-6."""
    weights, _ = hal_subject.verify("topk_softmax", {"logits": logits(hal_subject, 33, experts, "bf16"), "top_k": 8, "renormalize": True})
    assert float((weights.double().sum(1) - 1).abs().max()) < 1e-6


@TOPK
@pytest.mark.parametrize("experts", [8, 1025])
def test_strided(hal_subject: Subject, experts: int) -> None:
    """A6: any row stride; nothing is written outside the outputs."""
    x, _ = strided_slice((5, experts), torch.bfloat16, hal_subject.device)
    x.copy_(logits(hal_subject, 5, experts))
    args: dict[str, Any] = {"logits": x, "top_k": 3}
    buffers = {}
    args["weights"], buffers["weights"] = strided_slice((5, 3), torch.float32, hal_subject.device)
    args["ids"], buffers["ids"] = strided_slice((5, 3), torch.int32, hal_subject.device, fill=-77)
    hal_subject.verify("topk_softmax", Built(args, buffers))


@TOPK
@pytest.mark.parametrize("given", ["weights", "ids"])
def test_one_output_given(hal_subject: Subject, given: str) -> None:
    args = {"logits": logits(hal_subject, 5, 60), "top_k": 4, given: outputs(hal_subject, 5, 4)[given]}
    hal_subject.verify("topk_softmax", args)


@TOPK
def test_no_tokens_then_some(hal_subject: Subject) -> None:
    """B8: T = 0 gives empty results, and the next call is sound."""
    weights, ids = hal_subject.verify("topk_softmax", {"logits": logits(hal_subject, 0, 64), "top_k": 8})
    assert tuple(weights.shape) == tuple(ids.shape) == (0, 8)
    hal_subject.verify("topk_softmax", {"logits": logits(hal_subject, 3, 64), "top_k": 8})


@ROUTE
@pytest.mark.parametrize("experts", [1, 8, 100, 257])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["plain", "renormalized"])
def test_scoring(hal_subject: Subject, experts: int, scoring: str, renormalize: bool) -> None:
    args = {"logits": logits(hal_subject, 5, experts, "bf16"), "top_k": min(6, experts), "scoring": scoring, "renormalize": renormalize}
    hal_subject.verify("route", args | {"scale": 2.5} | outputs(hal_subject, 5, min(6, experts)))


@ROUTE
def test_defaults_are_topk_softmax(hal_subject: Subject) -> None:
    x = logits(hal_subject, 7, 60, "bf16")
    hal_subject.verify("route", {"logits": x, "top_k": 6})
    hal_subject.verify("route", {"logits": x, "top_k": 6, "renormalize": True})


@ROUTE
@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=["all", "groups"])
def test_bad_rows_of_route(hal_subject: Subject, name: str, scoring: str, groups: tuple[int, int]) -> None:
    """A1: as for topk_softmax, with both scorings, with groups."""
    x = rows(hal_subject, BAD_ROWS["one-minus-inf"], BAD_ROWS[name], BAD_ROWS["one-nan"])
    args = {"logits": x, "top_k": 3, "scoring": scoring, "num_groups": groups[0], "top_groups": groups[1]}
    hal_subject.verify("route", args | {"renormalize": True} | outputs(hal_subject, 3, 3))


@ROUTE
def test_saturated_sigmoids_are_ordered(hal_subject: Subject) -> None:
    """A10: scores of 1 in fp32 still rank by their logits."""
    x = rows(hal_subject, [20.0, 30.0, 60.0, 50.0, -1.0], [-120.0, -110.0, -200.0, -130.0, -140.0])
    weights, ids = hal_subject.verify("route", {"logits": x, "top_k": 3, "scoring": "sigmoid", "renormalize": True})
    assert ids.tolist() == [[2, 3, 1], [1, 0, 3]]
    assert weights[1].tolist() == [0.0, 0.0, 0.0]  # the scores sum to 0 in fp32


@ROUTE
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (4, 3), (8, 4), (16, 5)], ids=str)
@pytest.mark.parametrize("group_score", ["max", "top2"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_groups(hal_subject: Subject, scoring: str, groups: tuple[int, int], group_score: str, biased: bool) -> None:
    """DeepSeek's choice of groups first, with many equal scores."""
    generator, experts = hal_subject.generator(), 64

    def make() -> dict[str, Any]:
        args: dict[str, Any] = {"logits": levels(generator, 4, experts, 5).sub(2.0).to(hal_subject.device), "scoring": scoring}
        if biased:
            args["correction_bias"] = (torch.randint(-3, 4, (experts,), generator=generator) / 8).to(hal_subject.device)
        return args | {"top_k": 4, "num_groups": groups[0], "top_groups": groups[1], "group_score": group_score, "renormalize": True}

    hal_subject.verify("route", separable(make) | {"scale": 2.5})


@ROUTE
@pytest.mark.parametrize("experts", [(60, 5, 3), (96, 3, 1), (200, 8, 3), (256, 8, 4), (1000, 4, 2)], ids=str)
def test_uneven_sizes_in_groups(hal_subject: Subject, experts: tuple[int, int, int]) -> None:
    total, num_groups, top_groups = experts
    args = {"logits": logits(hal_subject, 3, total), "top_k": 10, "num_groups": num_groups, "top_groups": top_groups}
    hal_subject.verify("route", args)


@ROUTE
def test_every_allowed_expert(hal_subject: Subject) -> None:
    """k = all experts of the chosen groups, some of them unusable: none comes from another group."""
    x = logits(hal_subject, 3, 24)
    x[1, 3:9] = NAN
    x[2] = -math.inf
    hal_subject.verify("route", {"logits": x, "top_k": 12, "num_groups": 4, "top_groups": 2})


@ROUTE
def test_groups_of_one_expert(hal_subject: Subject) -> None:
    args = {"logits": logits(hal_subject, 3, 12), "top_k": 4, "num_groups": 12, "top_groups": 5}
    for group_score in ("max", "top2"):
        hal_subject.verify("route", args | {"group_score": group_score})


@ROUTE
def test_group_with_one_usable_expert(hal_subject: Subject) -> None:
    """By its best two it ranks behind a group with two, however good the one is."""
    x = rows(hal_subject, [9.0, NAN, NAN, 1.0, 0.0, NAN, 0.5, 0.25, -math.inf])
    args = {"logits": x, "top_k": 2, "num_groups": 3, "top_groups": 2, "scoring": "sigmoid"}
    _, ids = hal_subject.verify("route", args | {"group_score": "top2"})
    assert ids.tolist() == [[3, 6]]
    _, ids = hal_subject.verify("route", args | {"group_score": "max"})
    assert ids.tolist() == [[0, 3]]


@ROUTE
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_bias_chooses_and_does_not_weigh(hal_subject: Subject, scoring: str) -> None:
    x = rows(hal_subject, [2.0, 1.0, 0.0, -1.0])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0], device=hal_subject.device)
    plain, _ = hal_subject.verify("route", {"logits": x, "top_k": 4, "scoring": scoring})
    weights, ids = hal_subject.verify("route", {"logits": x, "top_k": 2, "scoring": scoring, "correction_bias": bias})
    assert ids.tolist() == [[3, 0]]
    close("weights", weights, plain[:, [3, 0]].double(), ROUTER_WEIGHTS)


@ROUTE
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_bad_bias_and_bad_logits_beside_a_bias(hal_subject: Subject, scoring: str) -> None:
    """A NaN bias is a NaN logit; no bias lifts an unusable logit above a usable one."""
    x = rows(hal_subject, [2.0, 1.0, 0.0, -1.0, 0.5], [NAN, 1.0, -math.inf, 0.0, 3.0], [NAN] * 5)
    bias = torch.tensor([9.0, 0.0, 8.0, 0.0, NAN], device=hal_subject.device)
    for top_k in (2, 5):
        _, ids = hal_subject.verify("route", {"logits": x, "top_k": top_k, "scoring": scoring, "correction_bias": bias})
    assert ids.tolist() == [[0, 2, 1, 3, 4], [1, 3, 0, 2, 4], [0, 1, 2, 3, 4]]


@ROUTE
@pytest.mark.parametrize("scale", [0.0, 2.5, -1.0])
def test_scale(hal_subject: Subject, scale: float) -> None:
    for renormalize in (False, True):
        hal_subject.verify("route", {"logits": logits(hal_subject, 4, 9), "top_k": 3, "scale": scale, "renormalize": renormalize})


@ROUTE
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_dtypes_of_route(hal_subject: Subject, dtype: str) -> None:
    args = {"logits": logits(hal_subject, 5, 96, dtype), "top_k": 6, "num_groups": 8, "top_groups": 3}
    hal_subject.verify("route", args | outputs(hal_subject, 5, 6))


@ROUTE
def test_no_tokens_in_route(hal_subject: Subject) -> None:
    """B8."""
    args = {"logits": logits(hal_subject, 0, 16), "top_k": 2, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2}
    hal_subject.verify("route", args)
    hal_subject.verify("route", args | {"logits": logits(hal_subject, 2, 16)})


@TOPK
@pytest.mark.parametrize("experts", [8, 257])
def test_row_alone(hal_subject: Subject, experts: int) -> None:
    """B11: a row's bits do not depend on its neighbours, and every run gives the same."""
    x = logits(hal_subject, 17, experts, "bf16")
    weights, ids = (t.clone() for t in hal_subject.verify("topk_softmax", {"logits": x, "top_k": 5}))
    for rows_ in (slice(0, 1), slice(4, 6), slice(16, 17), slice(0, 17)):
        alone_weights, alone_ids = hal_subject.call("topk_softmax", {"logits": x[rows_], "top_k": 5})
        assert_same_bits("weights alone", alone_weights, weights[rows_])
        assert_same_bits("ids alone", alone_ids, ids[rows_])
