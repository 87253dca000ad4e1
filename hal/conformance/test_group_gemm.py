"""`group_gemm`: the table of cases, quantised weights, sizes on the device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hal.conformance.compare import OUTPUT, assert_same_bits, close
from hal.conformance.moe_cases import GEMM
from hal.conformance.moe_inputs import Moe, gemm_args
from hal.conformance.subject import Subject

pytestmark = pytest.mark.hal_op("group_gemm")


@pytest.mark.parametrize(("sizes", "spare", "case"), [pytest.param(*entry, id=entry[2].id) for entry in GEMM])
def test_case(hal_subject: Subject, sizes: tuple[int, ...], spare: int, case: Moe) -> None:
    hal_subject.verify("group_gemm", gemm_args(case, list(sizes), hal_subject.generator(), hal_subject.device, spare))


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
@pytest.mark.parametrize("quantised", ["int8", "e4m3"])
@pytest.mark.parametrize("x", ["given", "fp32", "fp16", "bf16"])
def test_quantised(hal_subject: Subject, quantised: str, scales: str, x: str) -> None:
    """Widths that are no multiple of a block, x quantised by the caller or inside."""
    case = Moe("q", quantised=quantised, scales=scales, x_quantised=x == "given", dtype="bf16" if x == "given" else x, hidden=200, inter=70)
    hal_subject.verify("group_gemm", gemm_args(case, [3, 0, 18], hal_subject.generator(), hal_subject.device, 2))


@pytest.mark.parametrize("out", ["new", "fp32", "fp16", "bf16"])
def test_result_of_a_quantised_x(hal_subject: Subject, out: str) -> None:
    """Its dtype is that of `out`, else bf16."""
    case = Moe("q", quantised="int8", x_quantised=True, out="new", hidden=64)
    args = gemm_args(case, [3, 4], hal_subject.generator(), hal_subject.device).args
    if out != "new":
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[out]
        args["out"] = torch.full((7, 48), math.nan, dtype=dtype, device=hal_subject.device)
    hal_subject.verify("group_gemm", args)


@pytest.mark.parametrize("quantised", ["int8", "e4m3"])
@pytest.mark.parametrize("scales", ["channel", "block"])
def test_zero_rows_are_quantised(hal_subject: Subject, quantised: str, scales: str) -> None:
    """A row of zeros has scale 0 and gives zeros, not NaN; so has a block of zeros."""
    case = Moe("q", quantised=quantised, scales=scales, dtype="bf16", hidden=256)
    built = gemm_args(case, [3, 4], hal_subject.generator(), hal_subject.device)
    built.args["x"][1] = 0.0
    built.args["x"][5, :128] = 0.0
    out = hal_subject.verify("group_gemm", built)
    assert bool((out[1] == 0).all())


def test_int8_products_are_exact(hal_subject: Subject) -> None:
    """Codes of 127 in every place: the sum leaves what 16 bits hold, and is exact in 32."""
    device = hal_subject.device
    args = {
        "x": torch.full((2, 512), 127, dtype=torch.int8, device=device),
        "weight": torch.full((1, 8, 512), -127, dtype=torch.int8, device=device),
        "expert_sizes": torch.tensor([2], dtype=torch.int32, device=device),
        "w_scales": torch.ones(1, device=device),
        "x_scales": torch.tensor([1.0, 0.5], device=device),
        "out": torch.full((2, 8), math.nan, device=device),
    }
    out = hal_subject.verify("group_gemm", args)
    close("out", out[:, 0], torch.tensor([-8258048.0, -4129024.0], dtype=torch.float64), OUTPUT[torch.float32])


def test_sizes_are_read_on_every_call(hal_subject: Subject) -> None:
    built = gemm_args(Moe("sizes", out="new", hidden=40), [3, 4, 5], hal_subject.generator(), hal_subject.device)
    hal_subject.verify("group_gemm", built)
    built.args["expert_sizes"].copy_(torch.tensor([5, 6, 1], dtype=torch.int32))
    hal_subject.verify("group_gemm", built)


@pytest.mark.parametrize("sizes", [[-1, 3, 2], [3, 9, 9], [2**31 - 1, 1, 2**31 - 1], [-(2**31), 2, 2]], ids=str)
def test_bad_sizes_unchecked(hal_subject: Subject, sizes: list[int]) -> None:
    """`validate: off`: sizes below 0 act as 0, rows beyond M are left out; nothing else is touched."""
    built = gemm_args(Moe("sizes", hidden=40), [3, 2, 2], hal_subject.generator(), hal_subject.device)
    built.args["expert_sizes"].copy_(torch.tensor(sizes, dtype=torch.int32))
    hal_subject.verify("group_gemm", built, validate="off")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_repeated_calls_agree(hal_subject: Subject, dtype: str) -> None:
    """B11: the same bits each time, and results of two calls are apart."""
    case = Moe("repeat", dtype=dtype, out="new", hidden=136)
    args = gemm_args(case, [9, 0, 20], hal_subject.generator(), hal_subject.device).args
    first = hal_subject.verify("group_gemm", args)
    kept = first.clone()
    hal_subject.call("group_gemm", args | {"x": -2 * args["x"]})
    assert_same_bits("a result after another call", first, kept)
    assert_same_bits("the same call again", hal_subject.call("group_gemm", args), kept)


def test_bad_row_stays_alone(hal_subject: Subject) -> None:
    """NaN in one row reaches no other."""
    args = gemm_args(replace(Moe("bad"), out="new", hidden=40), [9, 0, 20], hal_subject.generator(), hal_subject.device).args
    expected = hal_subject.verify("group_gemm", args).clone()
    bad = args["x"].clone()
    bad[4], bad[17] = math.nan, math.inf
    got = hal_subject.call("group_gemm", args | {"x": bad})
    for row in range(29):
        if row not in (4, 17):
            assert_same_bits(f"row {row} beside bad ones", got[row], expected[row])
