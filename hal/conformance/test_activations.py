"""`silu_and_mul`, `gelu_and_mul`, `swiglu_oai_and_mul`: the gated activations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.cases import DTYPES
from hal.conformance.compare import OUTPUT, assert_same_bits, close
from hal.conformance.inputs import Built, strided_slice
from hal.conformance.subject import Subject

#: id -> (op, optional arguments).
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu_and_mul", {}),
    "silu-interleaved": ("silu_and_mul", {"gate_up": "interleaved"}),
    "silu-limit": ("silu_and_mul", {"limit": 1.5}),
    "silu-limit-interleaved": ("silu_and_mul", {"limit": 7.0, "gate_up": "interleaved"}),
    "gelu": ("gelu_and_mul", {}),
    "gelu-interleaved": ("gelu_and_mul", {"gate_up": "interleaved"}),
    "gelu-tanh": ("gelu_and_mul", {"approximate": "tanh"}),
    "gelu-tanh-interleaved": ("gelu_and_mul", {"approximate": "tanh", "gate_up": "interleaved"}),
    "swiglu-oai": ("swiglu_oai_and_mul", {}),
    "swiglu-oai-concat": ("swiglu_oai_and_mul", {"gate_up": "concat"}),
    "swiglu-oai-numbers": ("swiglu_oai_and_mul", {"alpha": 0.7, "limit": 1.5}),
}
FORMS = pytest.mark.parametrize(("op", "options"), [pytest.param(*form, id=name, marks=pytest.mark.hal_op(form[0])) for name, form in _FORMS.items()])
OPS = pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.hal_op(op)) for op in sorted({op for op, _ in _FORMS.values()})])


def rows(subject: Subject, count: int, width: int, dtype: str = "fp32") -> Tensor:
    """Values on both sides of every clamp."""
    return (torch.randn(count, width, generator=subject.generator()) * 4).to(subject.device, DTYPES[dtype])


@FORMS
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("width", [1, 24, 100, 704])
def test_widths(hal_subject: Subject, op: str, options: dict[str, Any], width: int, dtype: str) -> None:
    """B10: any width; memory around the result is guarded."""
    out, buffer = strided_slice((5, width), DTYPES[dtype], hal_subject.device)
    hal_subject.verify(op, Built({"x": rows(hal_subject, 5, 2 * width, dtype), "out": out, **options}, {"out": buffer}))


@FORMS
def test_strided_rows(hal_subject: Subject, op: str, options: dict[str, Any]) -> None:
    x, _ = strided_slice((7, 48), torch.bfloat16, hal_subject.device)
    x.copy_(rows(hal_subject, 7, 48))
    hal_subject.verify(op, {"x": x, **options})


@OPS
@pytest.mark.parametrize("count", [0, 1, 2, 17, 64, 257])
def test_rows(hal_subject: Subject, op: str, count: int) -> None:
    """B8: no row, then some."""
    hal_subject.verify(op, {"x": rows(hal_subject, count, 40, "bf16")})
    hal_subject.verify(op, {"x": rows(hal_subject, 3, 40, "bf16")})


@FORMS
def test_arithmetic_is_fp32(hal_subject: Subject, op: str, options: dict[str, Any]) -> None:
    """Extreme gates neither overflow nor become NaN, and 16-bit inputs are rounded once, at the end."""
    x = rows(hal_subject, 6, 16, "bf16")
    gate = slice(0, 16, 2) if options.get("gate_up", "interleaved" if op.startswith("swiglu") else "concat") == "interleaved" else slice(0, 8)
    for row, value in enumerate((0.0, 300.0, -300.0, 1e30, -1e30, 90.0)):
        x[row, gate] = value
    result = hal_subject.verify(op, {"x": x, **options})
    assert bool(result.isfinite().all())
    hal_subject.verify(op, {"x": x[[0, 1, 2, 4, 5]], **options})


@FORMS
def test_bad_row_stays_alone(hal_subject: Subject, op: str, options: dict[str, Any]) -> None:
    x = rows(hal_subject, 5, 32)
    expected = hal_subject.verify(op, {"x": x, **options}).clone()
    bad = x.clone()
    bad[2] = math.nan
    got = hal_subject.call(op, {"x": bad, **options})
    for row in (0, 1, 3, 4):
        assert_same_bits("a neighbour of a NaN row", got[row], expected[row])


@pytest.mark.hal_op("swiglu_oai_and_mul")
def test_swiglu_oai_on_paper(hal_subject: Subject) -> None:
    """The gate is clamped from above only, the up from both sides; 1 is added to the up."""
    x = torch.tensor([[10.0, 0.0, 7.0, 10.0], [-10.0, -10.0, 1.0, 2.0]], device=hal_subject.device)  # gate, up, gate, up
    full = 7.0 / (1 + math.exp(-1.702 * 7.0))
    expected = [[full * 1.0, full * 8.0], [-10.0 / (1 + math.exp(17.02)) * -6.0, 1.0 / (1 + math.exp(-1.702)) * 3.0]]
    out = hal_subject.verify("swiglu_oai_and_mul", {"x": x})
    close("out", out, torch.tensor(expected, dtype=torch.float64), OUTPUT[torch.float32])


@pytest.mark.hal_op("silu_and_mul")
def test_limit_of_silu_on_paper(hal_subject: Subject) -> None:
    """The gate is clamped from above only, the up from both sides, as in `fused_moe`; without a limit neither is."""
    x = torch.tensor([[10.0, -10.0, 2.0, 10.0, -10.0, 1.0]], device=hal_subject.device)  # 3 gates, 3 ups
    for limit, gates, ups in ((3.0, (3.0, -10.0, 2.0), (3.0, -3.0, 1.0)), (None, (10.0, -10.0, 2.0), (10.0, -10.0, 1.0))):
        expected = [[gate / (1 + math.exp(-gate)) * up for gate, up in zip(gates, ups, strict=True)]]
        out = hal_subject.verify("silu_and_mul", {"x": x, "limit": limit})
        close("out", out, torch.tensor(expected, dtype=torch.float64), OUTPUT[torch.float32])


@pytest.mark.hal_op("gelu_and_mul")
def test_gelu_forms_differ(hal_subject: Subject) -> None:
    """The two differ by 4e-4 at most, which fp32 must show."""
    x = torch.cat([torch.linspace(-3, 3, 64), torch.ones(64)])[None].to(hal_subject.device)
    exact = hal_subject.verify("gelu_and_mul", {"x": x})
    approximate = hal_subject.verify("gelu_and_mul", {"x": x, "approximate": "tanh"})
    assert 1e-4 < float((exact - approximate).abs().max()) < 1e-3
