"""`merge_states`: empty parts, sinks, strides, in place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hal.conformance.cases import DTYPES
from hal.conformance.compare import LSE, assert_same_bits, close
from hal.conformance.inputs import Built, strided_slice
from hal.conformance.subject import Subject

pytestmark = pytest.mark.hal_op("merge_states")

INF = math.inf


def states(subject: Subject, tokens: int = 6, heads: int = 3, dim: int = 32, dtype: str = "fp32", spread: float = 2.0) -> dict[str, Any]:
    """Two random states."""
    g = subject.generator()
    args: dict[str, Any] = {}
    for part in "ab":
        args[f"out_{part}"] = torch.randn(tokens, heads, dim, generator=g).to(subject.device, DTYPES[dtype])
        args[f"lse_{part}"] = (torch.randn(tokens, heads, generator=g) * spread).to(subject.device)
    return args


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1, 16), (6, 3, 32), (5, 4, 40), (3, 9, 128), (2, 1, 512), (33, 2, 64)], ids=str)
def test_shapes(hal_subject: Subject, shape: tuple[int, int, int], dtype: str) -> None:
    hal_subject.verify("merge_states", states(hal_subject, *shape, dtype))


@pytest.mark.parametrize("spread", [0.0, 50.0, 5000.0])
def test_spread_of_lse(hal_subject: Subject, spread: float) -> None:
    hal_subject.verify("merge_states", states(hal_subject, spread=spread))


@pytest.mark.parametrize("empty", [-INF, INF], ids=["-inf", "+inf"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_empty_parts(hal_subject: Subject, empty: float, dtype: str) -> None:
    """B21: rows with a, b, both and neither empty; what stands in `out` of an empty part is not looked at."""
    args = states(hal_subject, dtype=dtype)
    for row, parts in enumerate(("a", "b", "ab", "")):
        for part in parts:
            args[f"lse_{part}"][row] = empty
            args[f"out_{part}"][row] = math.nan
    args["lse_a"][4], args["lse_b"][4] = -empty, empty
    out, lse = hal_subject.verify("merge_states", args)
    assert_same_bits("b alone", out[0], args["out_b"][0])
    assert_same_bits("a alone", out[1], args["out_a"][1])
    assert_same_bits("lse of a alone", lse[1], args["lse_a"][1])
    assert bool((out[2] == 0).all())
    assert bool((lse[2] == -INF).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sinks(hal_subject: Subject, dtype: str) -> None:
    args = states(hal_subject, dtype=dtype)
    args["lse_a"][1] = -INF
    args["lse_a"][2] = args["lse_b"][2] = -INF
    args["sinks"] = torch.linspace(-2.0, 4.0, 3).to(hal_subject.device)
    plain, plain_lse = hal_subject.call("merge_states", {k: v for k, v in args.items() if k != "sinks"})
    out, lse = hal_subject.verify("merge_states", args)
    assert float((out[0].double() - plain[0].double()).abs().max()) > 0.05
    assert float((lse[0] - plain_lse[0]).abs().max()) > 0.05


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["same", "fp32"])
def test_given_outputs(hal_subject: Subject, dtype: str, kind: str) -> None:
    args = states(hal_subject, dtype=dtype)
    args["out"] = torch.full_like(args["out_a"], math.nan, dtype=torch.float32 if kind == "fp32" else args["out_a"].dtype)
    args["lse"] = torch.full_like(args["lse_a"], math.nan)
    hal_subject.verify("merge_states", args)


def test_strided(hal_subject: Subject) -> None:
    args = states(hal_subject)
    buffers = {}
    for name in ("out_a", "out_b", "lse_a", "lse_b"):
        view, _ = strided_slice(tuple(args[name].shape), args[name].dtype, hal_subject.device)
        view.copy_(args[name])
        args[name] = view
    args["out"], buffers["out"] = strided_slice((6, 3, 32), torch.float32, hal_subject.device)
    args["lse"], buffers["lse"] = strided_slice((6, 3), torch.float32, hal_subject.device)
    hal_subject.verify("merge_states", Built(args, buffers))


def test_heads_first(hal_subject: Subject) -> None:
    """LSE and outputs stored (H, T), as some engines keep them."""
    args = states(hal_subject)
    for name in ("lse_a", "lse_b", "out_a", "out_b"):
        args[name] = args[name].transpose(0, 1).contiguous().transpose(0, 1)
    hal_subject.verify("merge_states", args)


@pytest.mark.parametrize("into", ["a", "b"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_in_place(hal_subject: Subject, into: str, dtype: str) -> None:
    args = states(hal_subject, dtype=dtype)
    expected_out, expected_lse = (t.clone() for t in hal_subject.verify("merge_states", args))
    args["out"], args["lse"] = args[f"out_{into}"], args[f"lse_{into}"]
    out, lse = hal_subject.call("merge_states", args, frozen=False)
    assert_same_bits("out in place", out, expected_out)
    assert_same_bits("lse in place", lse, expected_lse)


@pytest.mark.parametrize("shape", [(0, 3, 32), (6, 0, 32)], ids=["no-tokens", "no-heads"])
def test_nothing_to_merge(hal_subject: Subject, shape: tuple[int, int, int]) -> None:
    out, _ = hal_subject.verify("merge_states", states(hal_subject, *shape))
    assert tuple(out.shape) == shape


def test_weights_by_hand(hal_subject: Subject) -> None:
    """Natural logarithms: 3 to 1, checked on paper."""
    args = states(hal_subject, 1, 1, 16)
    args["out_a"].fill_(1.0)
    args["out_b"].fill_(5.0)
    args["lse_a"].fill_(math.log(3.0))
    args["lse_b"].fill_(0.0)
    out, lse = hal_subject.verify("merge_states", args)
    close("out", out, torch.full((1, 1, 16), 2.0), LSE[torch.float32])
    close("lse", lse, torch.tensor([[math.log(4.0)]]), LSE[torch.float32])
