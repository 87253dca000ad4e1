"""`merge_states` and `plan_decode` of the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.backends.reference_states import merge_states, plan_decode
from hal.ops.plan import DecodePlan
from tests.backends.reference_cases import Case, check, naive

EMPTY = torch.full((3, 4), -math.inf)


def state(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, 16, generator=random).to(dtype), torch.randn(3, 4, generator=random) * 5


def test_parts_of_the_keys_merge_into_the_whole() -> None:
    case, sinks = Case([1600], page=16), torch.tensor([-2.0, 0.0, 2.0, 9.0])
    q = case.query(1)
    want = naive(q, case.k, case.v, [1], sinks=sinks)
    parts = []
    for keys in (slice(0, 64), slice(64, 100)):
        part = Case([0])
        part.k_cache, part.v_cache, part.tables = case.k_cache, case.v_cache, case.tables[:, keys]
        part.seq_lens = torch.tensor([{0: 1024, 64: 576}[keys.start]], dtype=torch.int32)
        parts += part.decode(q, return_lse=True)
    check(merge_states(*parts, sinks=sinks), want, torch.float32)


@pytest.mark.parametrize("nothing", [-math.inf, math.inf])
def test_empty_part_is_not_looked_at(nothing: float) -> None:
    (out, lse), poison = state(0), torch.full((3, 4, 16), math.nan)
    for parts in ((out, lse, poison, EMPTY.abs() * math.copysign(1, nothing)), (poison, EMPTY.abs() * math.copysign(1, nothing), out, lse)):
        merged, merged_lse = merge_states(*parts)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)


@pytest.mark.parametrize("sinks", [None, torch.ones(4)], ids=["no-sinks", "sinks"])
def test_two_empty_parts(sinks: Tensor | None) -> None:
    poison = torch.full((3, 4, 16), math.nan)
    out, lse = merge_states(poison, EMPTY, poison, EMPTY.abs(), sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, EMPTY)


def test_distant_parts_do_not_overflow() -> None:
    (out_a, lse_a), (out_b, lse_b) = state(0), state(1)
    merged, lse = merge_states(out_a, lse_a + 2000, out_b, lse_b)
    torch.testing.assert_close(merged, out_a)
    torch.testing.assert_close(lse, lse_a + 2000)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_outputs_may_be_inputs(out_dtype: torch.dtype) -> None:
    (out_a, lse_a), (out_b, lse_b) = state(0, torch.float16), state(1, torch.float16)
    weights = torch.stack([lse_a, lse_b]).double().softmax(0)[..., None]
    exact = weights[0] * out_a.double() + weights[1] * out_b.double()
    exact_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    out = out_a if out_dtype == torch.float16 else torch.full((3, 4, 20), math.nan)[..., :16]
    result = merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse_b)
    assert result[0] is out
    assert result[1] is lse_b
    check((out, lse_b), (exact, exact_lse), torch.float16)


PLAN: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4, "max_seq_len": 40}


def test_plan_holds_facts_and_refreshes_in_place() -> None:
    lengths = torch.tensor([3, 40], dtype=torch.int32)
    plan = plan_decode(lengths, **PLAN, window=5, kv_dtype=torch.int8)
    assert (plan.backend, plan.facts.sequences, plan.facts.head_dim_v, plan.facts.q_len, plan.facts.kv_dtype) == ("reference", 2, 16, 1, torch.int8)
    assert plan_decode(lengths, **PLAN, kv_dtype=torch.bfloat16).facts.kv_dtype is None
    assert plan_decode(lengths, **PLAN, cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32)).facts.q_len is None
    assert plan_decode(lengths, **PLAN, out=plan) is plan


@pytest.mark.parametrize("backend", ["reference", "foreign"])
def test_stale_and_foreign_plans_change_nothing(backend: str) -> None:
    case = Case([9, 30])
    q = case.query(2)
    plan = plan_decode(torch.tensor([1, 1], dtype=torch.int32), **PLAN)
    plan = DecodePlan(plan.facts, backend, object())
    assert torch.equal(case.decode(q, plan=plan), case.decode(q))
