"""With `batch_invariant` a row's bits depend on its own keys only; and every split gives the bits of the unsplit sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.naive import assert_matches, expected, make_problem

LENGTH = 530  # two chunks


def alone(args: dict[str, Any], rows: Tensor, sequence: int, q_len: int, length: int) -> tuple[Tensor, Tensor]:
    from hal.backends.triton_ops import flash_decode

    one = dict(args, q=args["q"][rows], q_len=q_len)
    one["seq_lens"] = torch.tensor([length], dtype=torch.int32, device=args["q"].device)
    one["block_tables"] = args["block_tables"][sequence : sequence + 1]
    result = flash_decode(**one)
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "extra",
    [{}, {"window": 300}, {"sinks": torch.tensor([-2.0, 0.0, 1.0, 4.0]), "softcap": 5.0}, {"kv_dtype": torch.int8, "scales": ("head", "token")}],
    ids=["plain", "window", "sinks", "int8"],
)
def test_bits_of_a_row_do_not_depend_on_mates_or_block(device: torch.device, dtype: torch.dtype, extra: dict[str, Any]) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[LENGTH, 5, 0], q_len=2, dtype=dtype, batch_invariant=True, **extra)
    together = flash_decode(**problem.args)
    assert_matches(together, expected(problem), dtype)
    rows = torch.arange(2, device=device)
    block = alone(problem.args, rows, 0, 2, LENGTH)
    for i in range(2):
        single = alone(problem.args, rows[i : i + 1], 0, 1, LENGTH - 1 + i)
        for a, b, c in zip(together, block, single, strict=True):
            assert torch.equal(a[i], b[i]), "batch mates"
            assert torch.equal(a[i], c[0]), "row of a block against a call of its own"


def test_bits_do_not_depend_on_padding_or_on_what_is_split(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.triton_ops import flash_decode
    from hal.kernels import decode_partition
    from hal.kernels import flash_decode as launcher

    problem = make_problem(device, lengths=[1100, LENGTH], blocks=[1, 2], padding=0, batch_invariant=True)
    split = flash_decode(**problem.args)
    args = dict(problem.args, q=torch.cat([problem.args["q"], torch.full((7, 4, 64), float("nan"), device=device)]))
    padded = flash_decode(**args)
    monkeypatch.setattr(decode_partition, "_CHUNKS_PER_PIECE", 0)  # one program sums up all chunks of a unit
    launcher._partition.cache_clear()
    unsplit = flash_decode(**problem.args)
    launcher._partition.cache_clear()
    for a, b, c in zip(split, padded, unsplit, strict=True):
        assert torch.equal(a, b[:3])
        assert torch.equal(a, c)
    assert not padded[0][3:].any()


@pytest.mark.parametrize("invariant", [False, True], ids=["balanced", "invariant"])
def test_identical_sequences_give_identical_results(device: torch.device, invariant: bool) -> None:
    """Up to rounding where pieces cut them at different places; to the bit if batch-invariant."""
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[LENGTH, LENGTH, LENGTH], q_len=2, batch_invariant=invariant)
    a = problem.args
    a["block_tables"] = a["block_tables"][:1].expand(3, -1)
    a["q"] = a["q"][:2].repeat(3, 1, 1)
    problem.keys, problem.values = problem.keys[:1] * 3, problem.values[:1] * 3
    out, lse = flash_decode(**a)
    assert_matches((out, lse), expected(problem), torch.float32)
    if invariant:
        for other in (slice(2, 4), slice(4, 6)):
            assert torch.equal(out[0:2], out[other])
            assert torch.equal(lse[0:2], lse[other])
