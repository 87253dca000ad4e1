"""Routing and the expert pipeline of the reference on the path of an accelerator: right, and without reading a value.

The path of the CPU is what the conformance suite runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.backends import reference_moe, reference_moe_activations, reference_moe_gemm, reference_moe_rows, reference_routing
from hal.conformance.moe_cases import FUSED, GEMM, QUANTISED
from hal.conformance.moe_inputs import Moe, build_moe, gemm_args, index_of
from hal.conformance.moe_judge import JUDGES
from hal.conformance.routing_inputs import BAD_ROWS
from hal.ops import OPS
from tests.backends.host_reads import NoHostReads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_moe_gemm, "on_host", lambda t: False)


def check(op: str, function: Any, args: dict[str, Any]) -> None:
    with NoHostReads():
        result = function(**args)
    JUDGES[op](vars(OPS[op].bind((), args)), result)


@pytest.mark.parametrize("case", [*FUSED, *QUANTISED], ids=lambda c: c.id)
def test_fused_moe(case: Moe) -> None:
    check("fused_moe", reference_moe.fused_moe, build_moe(case, torch.Generator().manual_seed(0), CPU).args)


@pytest.mark.parametrize(("sizes", "spare", "case"), [pytest.param(*entry, id=entry[2].id) for entry in GEMM])
def test_group_gemm(sizes: tuple[int, ...], spare: int, case: Moe) -> None:
    check("group_gemm", reference_moe_gemm.group_gemm, gemm_args(case, list(sizes), torch.Generator().manual_seed(0), CPU, spare).args)


@pytest.mark.parametrize("sizes", [[-1, 3, 2], [3, 9, 9], [2**31 - 1, 1, 2**31 - 1]], ids=str)
def test_bad_sizes(sizes: list[int]) -> None:
    args = gemm_args(Moe("sizes", hidden=40), [3, 2, 2], torch.Generator().manual_seed(0), CPU).args
    args["expert_sizes"] = torch.tensor(sizes, dtype=torch.int32)
    check("group_gemm", reference_moe_gemm.group_gemm, args)


def test_weights_are_gathered_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    args = gemm_args(Moe("steps", hidden=40), [30, 0, 90, 1, 64], torch.Generator().manual_seed(0), CPU, 9).args
    whole = reference_moe_gemm.group_gemm(**args).clone()
    for values in (1, 48 * 40 * 2):
        monkeypatch.setattr(reference_moe_gemm, "_MOST_VALUES", values)
        assert torch.equal(reference_moe_gemm.group_gemm(**args)[:185], whole[:185])


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "top_groups": 2, "renormalize": True}], ids=["plain", "groups"])
def test_route(name: str, options: dict[str, Any]) -> None:
    args: dict[str, Any] = {"logits": torch.tensor([BAD_ROWS[name], BAD_ROWS["one-nan"]]), "top_k": 3, "scoring": "sigmoid", **options}
    check("route", reference_routing.route, args)
    check("topk_softmax", reference_routing.topk_softmax, {"logits": args["logits"], "top_k": 3})


@pytest.mark.parametrize("mapped", [False, True])
def test_rows(mapped: bool) -> None:
    ids = torch.tensor([[0, 2], [1, 1], [-1, 2], [5, 0]], dtype=torch.int32)
    where = {"expert_map": torch.tensor([1, -1, 0], dtype=torch.int32), "num_local_experts": 2} if mapped else {}
    check("moe_index", reference_moe_rows.moe_index, {"ids": ids, "num_experts": 3, **where})
    index, x = index_of(ids, 3), torch.randn(4, 8)
    check("moe_expand", reference_moe_rows.moe_expand, {"x": x, "index": index})
    y, weights = torch.randn(8, 8), torch.rand(4, 2)
    check("moe_combine", reference_moe_rows.moe_combine, {"y": y, "weights": weights, "index": index, "residual": x, "scale": 2.0})


@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
def test_activations(gate_up: str) -> None:
    x = torch.randn(5, 24) * 5
    for op in ("silu_and_mul", "gelu_and_mul", "swiglu_oai_and_mul"):
        check(op, getattr(reference_moe_activations, op), {"x": x, "gate_up": gate_up})


@pytest.mark.parametrize("host", [True, False], ids=["host", "accelerator"])
def test_large_intermediates_of_fp16_stay_finite(monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    """The first product of -96000, beyond fp16, is activated to -0."""
    monkeypatch.setattr(reference_moe_gemm, "on_host", lambda t: host)
    up = torch.zeros(1, 2, 16, dtype=torch.float16)
    up[0, 0], up[0, 1] = -60.0, 1e-3
    x, down = torch.full((1, 16), 100.0, dtype=torch.float16), torch.ones(1, 16, 1, dtype=torch.float16)
    result = reference_moe.fused_moe(x, up, down, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    assert torch.equal(result, torch.zeros(1, 16, dtype=torch.float16))


@pytest.mark.parametrize("columns", [1, 4, 33])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_infinity(columns: int, approximate: str) -> None:
    x = torch.tensor([[float("inf")] * columns + [1.0] * columns])
    assert torch.equal(reference_moe_activations.gelu_and_mul(x, approximate=approximate), x[:, :columns])


def test_places_beyond_the_rows_are_skipped() -> None:
    index = index_of(torch.tensor([[0, 1]], dtype=torch.int32), 2)
    index = index._replace(src_to_dst=index.src_to_dst + 100)
    assert torch.equal(reference_moe_rows.moe_combine(torch.ones(2, 3), torch.ones(1, 2), index), torch.zeros(1, 3))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.float8_e5m2, torch.complex64, torch.float64], ids=str)
def test_rows_of_any_dtype_are_copied(dtype: torch.dtype) -> None:
    index = index_of(torch.tensor([[1, 0], [0, 1]], dtype=torch.int32), 2)
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(dtype)
    assert torch.equal(reference_moe_rows.moe_expand(x, index).view(torch.uint8), x[[0, 1, 0, 1]].view(torch.uint8))
