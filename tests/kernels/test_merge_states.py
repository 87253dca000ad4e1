"""`merge_states` of the Triton kernels."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.naive import NAN, TOLERANCE, assert_matches, expected, make_problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 5])
def test_against_float64(device: torch.device, dtype: torch.dtype, heads: int) -> None:
    from hal.backends.triton_ops import merge_states

    g = torch.Generator().manual_seed(0)
    outs = [torch.randn(3, heads, 40, generator=g).to(dtype).to(device) for _ in range(2)]
    lses = [(torch.randn(heads, 3, generator=g) * 5).to(device).t() for _ in range(2)]  # any strides
    sinks = torch.randn(heads, generator=g).to(device)
    for sink in (None, sinks):
        out, lse = merge_states(outs[0], lses[0], outs[1], lses[1], sinks=sink)
        parts = [x.double() for x in lses] + ([] if sink is None else [sink.double().expand(3, heads)])
        total = torch.logsumexp(torch.stack(parts), 0)
        wanted = sum((o.double() * torch.exp(x.double() - total)[..., None] for o, x in zip(outs, lses, strict=True)), torch.zeros(()))
        assert (lse - total).abs().max() <= 2e-5 * total.abs().max()
        assert (out - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_empty_parts(device: torch.device, empty: float) -> None:
    from hal.backends.triton_ops import merge_states

    full, nothing = torch.randn(2, 3, 16, device=device), torch.full((2, 3, 16), NAN, device=device)
    lse, no_lse = torch.randn(2, 3, device=device), torch.full((2, 3), empty, device=device)
    for args in ((full, lse, nothing, no_lse), (nothing, no_lse, full, lse)):
        out, merged = merge_states(*args)
        assert torch.equal(out, full)
        assert torch.equal(merged, lse)
    for sinks in (None, torch.zeros(3, device=device)):
        out, merged = merge_states(nothing, no_lse, nothing, no_lse, sinks=sinks)
        assert not out.any()
        assert torch.equal(merged, torch.full((2, 3), -math.inf, device=device))


def test_in_place_and_strided(device: torch.device) -> None:
    from hal.backends.triton_ops import merge_states

    a, b = (torch.randn(2, 3, 24, device=device) for _ in range(2))
    la, lb = (torch.randn(2, 3, device=device) for _ in range(2))
    wanted = merge_states(a, la, b, lb)
    room = torch.full((2, 5, 32), NAN, device=device)
    out = room[:, 1:4, :24]
    merge_states(a, la, b, lb, out=out)
    assert torch.equal(out, wanted[0])
    assert torch.isnan(room[:, 0]).all()
    assert torch.isnan(room[..., 24:]).all()
    got = merge_states(a, la, b, lb, out=b, lse=la)
    assert got[0] is b
    assert torch.equal(b, wanted[0])
    assert torch.equal(la, wanted[1])
    empty = merge_states(a[:0], la[:0], b[:0], lb[:0])
    assert empty[0].shape == (0, 3, 24)


def test_two_halves_of_the_keys_merge_into_the_whole(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode, merge_states

    sinks = torch.tensor([-2.0, 0.0, 1.0, 4.0])
    problem = make_problem(device, lengths=[64, 160], sinks=sinks)
    wanted, a = expected(problem), dict(problem.args, sinks=None)
    low = flash_decode(**dict(a, seq_lens=torch.tensor([32, 96], dtype=torch.int32, device=device)))
    table = torch.full_like(a["block_tables"], -1)
    table[0, :2], table[1, :4] = a["block_tables"][0, 2:4], a["block_tables"][1, 6:10]
    high = flash_decode(**dict(a, block_tables=table, seq_lens=torch.tensor([32, 64], dtype=torch.int32, device=device)))
    assert_matches(merge_states(*low, *high, sinks=sinks.to(device)), wanted, torch.float32)
