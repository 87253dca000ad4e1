"""The partition of a decode step, and its harmlessness: a plan steers speed only."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.kernels.naive import NAN, assert_matches, expected, make_problem


def read_items(words: torch.Tensor, max_items: int) -> tuple[list[list[int]], list[int]]:
    """(records, first items of split units) of a plan buffer."""
    values = words.tolist()
    records = [values[8 + 8 * i : 13 + 8 * i] for i in range(values[0])]
    start = 8 + 8 * max_items
    return records, values[start : start + values[1]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("invariant", [False, True], ids=["balanced", "invariant"])
def test_every_unit_is_covered_once_within_the_bounds(device: torch.device, seed: int, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.kernels import decode_plan

    rng = random.Random(seed)
    monkeypatch.setattr(decode_plan, "target_programs", lambda device: rng.choice([8, 40, 132]))
    decode_plan.partition_of.cache_clear()
    sequences, group, heads = rng.randint(1, 200), rng.choice([1, 4, 24]), rng.choice([1, 2, 8])
    blocks = [rng.choice([0, 1, 1, 3, 9]) for _ in range(sequences)]
    tokens = sum(blocks) + rng.randint(0, 5)
    lengths = [rng.choice([0, 5, 300, 5000, 100_000]) for _ in range(sequences)]
    window = rng.choice([None, 4, 700])
    partition = decode_plan.partition_of(sequences, tokens, None, group, heads, 128, 200_000, invariant, device)
    decode_plan.partition_of.cache_clear()
    words = torch.full((partition.words,), -5, dtype=torch.int32, device=device)
    cu = torch.tensor([sum(blocks[:i]) for i in range(sequences + 1)], dtype=torch.int32, device=device)
    decode_plan.write_plan(words, partition, torch.tensor(lengths, dtype=torch.int32, device=device), cu, tokens, 1, window, 200_000)
    records, split_units = read_items(words, partition.max_items)

    rows = [*blocks, tokens - sum(blocks)]
    units = {(s, m) for s, n in enumerate(rows) for m in range(-(-n * partition.token_rows // partition.block_m))}
    found: dict[tuple[int, int], list[list[int]]] = {}
    for record in records:
        found.setdefault((record[0], record[1]), []).append(record)
    assert set(found) == units
    assert len(records) <= partition.max_items
    slots = []
    for unit in found.values():
        assert [r[2] for r in unit] == list(range(unit[0][3]))
        assert len({r[3] for r in unit}) == 1
        if unit[0][3] > 1:
            slots += [r[4] for r in unit]
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= partition.max_slots
    assert [records[i][2] for i in split_units] == [0] * sum(u[0][3] > 1 for u in found.values())
    assert {records[i][3] > 1 for i in split_units} <= {True}


def test_equal_sequences_that_fill_the_device_are_not_split(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.kernels import decode_plan

    monkeypatch.setattr(decode_plan, "target_programs", lambda device: 528)
    decode_plan.partition_of.cache_clear()
    partition = decode_plan.partition_of(64, 64, 1, 4, 8, 128, 8192, False, device)
    decode_plan.partition_of.cache_clear()
    words = torch.zeros(partition.words, dtype=torch.int32, device=device)
    decode_plan.write_plan(words, partition, torch.full((64,), 8192, dtype=torch.int32, device=device), None, 64, 1, None, 8192)
    assert words[0] == 64
    decode_plan.write_plan(words, partition, torch.tensor([65536] + [512] * 63, dtype=torch.int32, device=device), None, 64, 1, None, 65536)
    records, _ = read_items(words, partition.max_items)
    assert records[0][3] > 30  # the long one is spread
    assert {r[3] for r in records[records[0][3] :]} == {1}


FACTS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}


@pytest.mark.parametrize("invariant", [False, True])
def test_plan_is_used_refreshed_and_harmless_when_stale(device: torch.device, invariant: bool) -> None:
    from hal.backends.triton_ops import flash_decode, plan_decode

    problem = make_problem(device, lengths=[700, 3, 0, 130], q_len=2, batch_invariant=invariant)
    a = problem.args
    facts = {**FACTS, "max_seq_len": a["block_tables"].shape[1] * 16, "q_len": 2, "batch_invariant": invariant}
    wanted = expected(problem)
    for made_for in ([700, 3, 0, 130], [0, 0, 0, 0], [3, 700, 700, 1], [700, 700, 700, 700]):
        plan = plan_decode(torch.tensor(made_for, dtype=torch.int32, device=device), **facts)
        assert_matches(flash_decode(**a, plan=plan), wanted, torch.float32)
    address = plan.data.words.data_ptr()
    assert plan_decode(a["seq_lens"], **facts, out=plan) is plan
    assert plan.data.words.data_ptr() == address
    fresh = plan_decode(a["seq_lens"], **facts)
    assert read_items(plan.data.words, plan.data.partition.max_items) == read_items(fresh.data.words, fresh.data.partition.max_items)
    with_plan, without = flash_decode(**a, plan=plan), flash_decode(**a)
    assert all(torch.equal(x, y) for x, y in zip(with_plan, without, strict=True))


def test_foreign_plans_are_ignored_and_not_refreshed(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode, plan_decode
    from hal.errors import ArgumentError

    problem = make_problem(device, lengths=[300, 3])
    plan = plan_decode(problem.args["seq_lens"], **FACTS, max_seq_len=problem.args["block_tables"].shape[1] * 16)
    plan.backend, plan.data = "other", object()
    assert_matches(flash_decode(**problem.args, plan=plan), expected(problem), torch.float32)
    with pytest.raises(ArgumentError, match="'other'"):
        plan_decode(problem.args["seq_lens"], **FACTS, max_seq_len=320, out=plan)


def test_variable_blocks_partition_themselves(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode, plan_decode

    problem = make_problem(device, lengths=[300, 3], blocks=[1, 4])
    stale = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    plan = plan_decode(problem.args["seq_lens"], **FACTS, max_seq_len=problem.args["block_tables"].shape[1] * 16, cu_seqlens_q=stale)
    assert_matches(flash_decode(**problem.args, plan=plan), expected(problem), torch.float32)


def test_poisoned_scratch_changes_no_bit(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode
    from hal.kernels import scratch

    problem = make_problem(device, lengths=[700, 3, 0, 200], tree_mask=torch.ones(8, 2, dtype=torch.bool), q_len=2, window=90)
    first = flash_decode(**problem.args)
    assert scratch.buffers()
    for buffer in scratch.buffers():
        buffer.fill_(NAN if buffer.dtype.is_floating_point else -(2**30))
    second = flash_decode(**problem.args)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_scratch_keeps_its_address_and_outlives_growth(device: torch.device) -> None:
    from hal.kernels.scratch import scratch

    small = scratch("test", 10, torch.float32, device)
    assert scratch("test", 1000, torch.float32, device).data_ptr() == small.data_ptr()
    large = scratch("test", 5000, torch.float32, device)
    assert large.shape[0] == 8192
    assert scratch("test", 10, torch.float32, device).data_ptr() == large.data_ptr()
    small.fill_(1.0)  # still alive
    assert scratch("other", 10, torch.float32, device).data_ptr() != large.data_ptr()
