"""The partition of a decode step, and its harmlessness: a plan steers speed only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.naive import NAN, assert_matches, expected, make_problem

if TYPE_CHECKING:
    from hal.kernels.decode_partition import Partition


def read_plan(words: torch.Tensor, partition: Partition, sequences: int) -> tuple[list[int], list[list[int]], list[int]]:
    """(header, records of the pieces, steps of the sequences and of the padding rows) of a plan buffer."""
    values = words.tolist()
    steps = 4 + 4 * partition.pieces
    return values[:4], [values[at : at + 4] for at in range(4, steps, 4)], values[steps : steps + sequences + 1]


def walk(partition: Partition, share: int, record: list[int], tiles: list[int], steps: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, row tile, first step, end step) of the segments of a piece, as the main kernel goes through them."""
    sequence, row_tile, step, left = record
    together = partition.invariant and share * partition.pieces > partition.slots
    while left > 0:
        if row_tile < tiles[sequence]:
            stop = steps[sequence] if together else min(steps[sequence], step + left)
            yield sequence, row_tile, step, stop
            left -= stop - step
            step = 0
            row_tile += 1
        if row_tile >= tiles[sequence]:
            sequence, row_tile = sequence + 1, 0


def slots_of(partition: Partition, share: int, piece: int, segments: list[tuple[int, int, int, int]], steps: list[int]) -> Iterator[int]:
    """Scratch slots that a piece writes for the units that it does not hold whole."""
    position = piece * share
    for sequence, _, step, stop in segments:
        if stop - step < steps[sequence]:
            yield from range(position, position + stop - step) if partition.invariant else (2 * piece + (step == 0),)
        position += stop - step


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("invariant", [False, True], ids=["balanced", "invariant"])
def test_every_step_is_covered_once_within_the_bounds(device: torch.device, seed: int, invariant: bool) -> None:
    from hal.kernels.decode_partition import partition_of, write_plan

    rng = random.Random(seed)
    programs, residents = rng.choice([8, 40, 132]), rng.choice([1, 2, 4])
    sequences, group, heads, block_m = rng.choice([1, 3, 60, 200]), rng.choice([1, 4, 24]), rng.choice([1, 2, 8]), rng.choice([16, 32])
    # Odd seeds have long sequences: more chunks than slots of a batch-invariant call.
    lengths = [rng.choice([0, 5, 300, 5000, 100_000 if seed % 2 else 900]) for _ in range(sequences)]
    uniform = seed % 4 == 0
    blocks = [2 if uniform else rng.choice([0, 1, 1, 3, 9]) for _ in range(sequences)]
    padding = 0 if uniform else rng.randint(0, 5)
    tokens, window = sum(blocks) + padding, rng.choice([None, 4, 700])
    partition = partition_of(sequences, tokens, 2 if uniform else None, group, heads, block_m, 200_000, invariant, programs, residents, seed % 4 > 1)
    words = torch.full((partition.words(sequences),), -5, dtype=torch.int32, device=device)
    cu = torch.tensor([sum(blocks[:i]) for i in range(sequences + 1)], dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    write_plan(words, partition, seq_lens, None if uniform else cu, tokens, 2, window, 200_000, pdl=False)
    (share, long_steps, short, long), records, steps = read_plan(words, partition, sequences)

    def steps_of(keys: int, queries: int) -> int:
        first = 0 if window is None else min(max(keys - queries - window + 1, 0), keys)
        return max(1, -(-keys // partition.step) - first // partition.step)

    rows = [*blocks, padding]
    assert steps[:sequences] == [steps_of(*pair) for pair in zip(lengths, blocks, strict=True)]
    assert steps[sequences] == 1
    tiles = [-(-n * partition.token_rows // block_m) for n in rows]
    wanted = [(s, m, i) for s, count in enumerate(tiles) for m in range(count) for i in range(steps[s])]
    pieces = [list(walk(partition, share, record, tiles, steps)) for record in records]
    assert [(s, m, i) for piece in pieces for s, m, begin, stop in piece for i in range(begin, stop)] == wanted

    used = [slot for i, piece in enumerate(pieces) for slot in slots_of(partition, share, i, piece, steps)]
    assert len(set(used)) == len(used)
    assert all(0 <= slot < partition.slots for slot in used)
    assert partition.slots <= (8 if invariant else 2) * partition.pieces
    assert partition.long * heads <= 3 * max(programs, heads)
    assert (long, long_steps) == (partition.long, share * partition.long)
    if invariant and len(wanted) > partition.slots:
        assert not used, "units are given whole"
    else:
        lengths = [share] * partition.long + [short] * (partition.pieces - partition.long)
        begins = [sum(lengths[:i]) for i in range(partition.pieces)]
        assert [record[3] for record in records] == [max(0, min(n, len(wanted) - at)) for n, at in zip(lengths, begins, strict=True)]
        assert share >= 1


def plan_of_equal(device: torch.device, sequences: int, steps: int, programs: int, short_pieces: bool) -> tuple[int, int, list[list[int]], Partition]:
    """(steps of a long and of a short piece, records, partition) of sequences of equal length, one kv head."""
    from hal.kernels.decode_partition import partition_of, write_plan

    partition = partition_of(sequences, sequences, 1, 4, 1, 16, 64 * steps, False, programs, 2, short_pieces)
    words = torch.full((partition.words(sequences),), -5, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), 64 * steps, dtype=torch.int32, device=device)
    write_plan(words, partition, lengths, None, sequences, 1, None, 64 * steps, pdl=False)
    (share, _, short, _), records, _ = read_plan(words, partition, sequences)
    return share, short, records, partition


@pytest.mark.parametrize(
    ("sequences", "steps", "programs", "share", "short"),
    [
        (62, 30, 66, 30, 30),  # 29 would do: not cut
        (60, 30, 66, 28, 28),  # 30 would be too long
        (1, 1024, 66, 16, 16),  # cut into 64 parts, 2 pieces stay empty
        (2, 1000, 66, 32, 32),  # 31 would do: into 32 parts, the last one shorter
        (17, 16, 6, 48, 48),  # 46 would do: 3 sequences a piece
        (3, 100, 8, 38, 38),  # halves of 50 would be too long
        (9, 16, 4, 36, 36),  # 3 sequences of 16 a piece would be too long
        (1, 120, 66, 4, 4),  # 2 would do, but half the programs are enough for so little
        (6, 96, 264, 6, 6),  # 5 would do, in pieces over two sequences: a step more is worth it for so little
        (1, 700, 66, 11, 11),  # half of them would take 22 each: not so little
        (64, 128, 66, 110, 15),  # 125 would do: an eighth goes to 66 short pieces
    ],
)
def test_lengths_of_pieces(device: torch.device, sequences: int, steps: int, programs: int, share: int, short: int) -> None:
    assert plan_of_equal(device, sequences, steps, programs, True)[:2] == (share, short)


@pytest.mark.parametrize("seed", range(12))
def test_equal_sequences_are_cut_evenly_or_not_at_all(device: torch.device, seed: int) -> None:
    """Where that costs a sixteenth at most, or a step of little work, that is too little for short pieces; else steps are shared out equally."""
    from hal.kernels.decode_partition import _FEW_STEPS, _SHORT_FROM

    rng = random.Random(seed)
    sequences, steps, programs = rng.randint(1, 40), rng.choice([2, 12, 30, 64, 97, 480]), rng.randint(2, 40)
    share, short, records, partition = plan_of_equal(device, sequences, steps, programs, seed % 2 == 0)
    total = sequences * steps
    equal = -(-total // partition.long)
    if partition.pieces > partition.long and equal >= int(_SHORT_FROM):
        assert 0.8 * equal < share < equal
        assert 1 <= short < share / 4
        return
    assert short == share
    wide = -(-total // partition.few)
    little = wide <= int(_FEW_STEPS)
    equal = max(equal, wide) if little else equal
    limit = equal + max(equal // 16, 1 if little and equal >= 4 else 0)
    places = {row[2] for row in records if row[3] > 0}
    if any(size % steps == 0 for size in range(equal, limit + 1)):
        assert places == {0}, "no sequence is cut"
    elif steps > equal and steps % (steps // equal) == 0 and steps // (steps // equal) <= limit:
        assert places == set(range(0, steps, share)), "all sequences are cut at the same places"
        assert steps % share == 0
    assert equal <= share <= limit


def test_pieces_fill_the_device() -> None:
    from hal.kernels.decode_partition import partition_of

    for programs in (132, 264, 528):
        for heads in (1, 2, 4, 5, 8, 16, 32):
            pieces = partition_of(64, 64, 1, 4, heads, 16, 65536, False, programs, 2, True).long
            waves = -(-pieces * heads // programs)
            assert waves <= 3
            assert pieces * heads > 0.9 * waves * programs, f"{pieces} pieces of {heads} heads on {programs} programs"
    assert partition_of(1, 1, 1, 4, 8, 16, 64, False, 528, 2, True).pieces == 1
    assert partition_of(2, 2, 1, 4, 8, 16, 640, False, 528, 2, True).pieces == 20  # one step each
    little = (1, 1, 1, 4, 1, 16, 64 * 600, False)  # 600 steps for 132 multiprocessors
    assert [partition_of(*little, 132 * n, n, False).pieces for n in (1, 2, 3)] == [120] * 3


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
    assert (plan.data.words is None) == invariant, "a batch-invariant plan is empty"
    address = None if invariant else plan.data.words.data_ptr()
    assert plan_decode(a["seq_lens"], **facts, out=plan) is plan
    assert (None if invariant else plan.data.words.data_ptr()) == address
    if not invariant:
        fresh = plan_decode(a["seq_lens"], **facts)
        used = [read_plan(p.data.words, p.data.partition, 4) for p in (plan, fresh)]
        assert used[0] == used[1]
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
    assert large.shape[0] == 5000
    assert scratch("test", 10, torch.float32, device).data_ptr() == large.data_ptr()
    small.fill_(1.0)  # still alive
    assert scratch("other", 10, torch.float32, device).data_ptr() != large.data_ptr()


def test_counters_are_zero_between_calls_and_kept_from_scratch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.triton_ops import flash_decode
    from hal.kernels import scratch

    current: dict[Any, torch.Tensor] = {}
    monkeypatch.setattr(scratch, "_COUNTERS", current)
    small = scratch.counters(10, device)
    assert small.dtype == torch.int32
    assert not small.any()
    problem = make_problem(device, lengths=[5000, 0, 700], dtype=torch.bfloat16)
    for _ in range(2):
        assert_matches(flash_decode(**problem.args), expected(problem), torch.bfloat16)
        assert not any(bool(count.any()) for count in current.values())
    large = scratch.counters(5000, device)
    assert large.shape[0] >= 5000
    assert not large.any()
    assert scratch.counters(10, device).data_ptr() == large.data_ptr()
    poisoned = {buffer.data_ptr() for buffer in scratch.buffers()}
    assert not poisoned & {small.data_ptr(), large.data_ptr()}
