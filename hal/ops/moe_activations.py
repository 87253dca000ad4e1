# mypy: disable-error-code="no-untyped-def"
# (the `_..._signature` functions: their types are those of the Protocol above each, and a test compares the parameters)
"""The gated activations between the two products of an expert: `silu_and_mul`, `gelu_and_mul`, `swiglu_oai_and_mul`.

Axes: M rows, I intermediate size. Gated linear units: Shazeer, 2020. All arithmetic is fp32, rounded once at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hal.ops.checks import FLOATS, Checker
from hal.ops.moe_checks import GATE_UP
from hal.ops.op import Arguments, Op, TensorMeta
from hal.ops.signature import facts

__all__ = [
    "GELU_AND_MUL",
    "OAI_ALPHA",
    "OAI_LIMIT",
    "SILU_AND_MUL",
    "SWIGLU_OAI_AND_MUL",
    "ActivationCall",
    "GeluAndMul",
    "SiluAndMul",
    "SwigluOaiAndMul",
]

#: Slope and clamp of gpt-oss: the numbers of swiglu_oai where a caller gives none.
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
#: How GELU is computed: by the error function, or by its tanh approximation.
_APPROXIMATIONS = ("none", "tanh")


class SiluAndMul(Protocol):
    """Type of `backend.silu_and_mul`."""

    def __call__(self, x: Tensor, *, gate_up: str = "concat", limit: float | None = None, out: Tensor | None = None) -> Tensor:
        """Return `g * sigmoid(g) * u`: of gate and up as they are, or with a limit of `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`.

        Args:
            x: (M, 2I) fp32, fp16 or bf16, I >= 1; the last dimension contiguous, any row stride.
            gate_up: "concat": the first I columns are gates, the others ups; "interleaved": columns 0, 2, ... are gates and
                1, 3, ... ups.
            limit: above 0, or None for no clamp.
            out: (M, I) in x's dtype, any row stride, apart from x.

        Returns:
            (M, I) in x's dtype.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


class GeluAndMul(Protocol):
    """Type of `backend.gelu_and_mul`."""

    def __call__(self, x: Tensor, *, approximate: str = "none", gate_up: str = "concat", out: Tensor | None = None) -> Tensor:
        """Return `gelu(gate) * up`.

        Args:
            x: (M, 2I) fp32, fp16 or bf16, I >= 1; the last dimension contiguous, any row stride.
            approximate: "none": `gate * (1 + erf(gate / sqrt(2))) / 2`; "tanh":
                `gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate ** 3))) / 2`.
            gate_up: see `silu_and_mul`.
            out: (M, I) in x's dtype, any row stride, apart from x.

        Returns:
            (M, I) in x's dtype.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


class SwigluOaiAndMul(Protocol):
    """Type of `backend.swiglu_oai_and_mul`."""

    def __call__(
        self, x: Tensor, *, alpha: float = OAI_ALPHA, limit: float = OAI_LIMIT, gate_up: str = "interleaved", out: Tensor | None = None
    ) -> Tensor:
        """Return `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`, as in gpt-oss.

        Args:
            x: (M, 2I) fp32, fp16 or bf16, I >= 1; the last dimension contiguous, any row stride.
            alpha: slope of the sigmoid.
            limit: above 0.
            gate_up: see `silu_and_mul`.
            out: (M, I) in x's dtype, any row stride, apart from x.

        Returns:
            (M, I) in x's dtype.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _silu_and_mul_signature(x, *, gate_up="concat", limit=None, out=None):
    return (
        x.shape, x.stride(), x.dtype, x.device, gate_up, limit, limit.__class__, facts(out), x.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip


def _gelu_and_mul_signature(x, *, approximate="none", gate_up="concat", out=None):
    return (x.shape, x.stride(), x.dtype, x.device, approximate, gate_up, facts(out), x.requires_grad and torch.is_grad_enabled())


def _swiglu_oai_and_mul_signature(x, *, alpha=OAI_ALPHA, limit=OAI_LIMIT, gate_up="interleaved", out=None):
    return (
        x.shape, x.stride(), x.dtype, x.device, alpha, alpha.__class__, limit, limit.__class__, gate_up, facts(out),
        x.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip


@dataclass(frozen=True)
class ActivationCall:
    """What a gate sees of a call of an activation.

    Attributes:
        op: name of the op.
        dtype: dtype of x.
        rows: M. intermediate: I.
        gate_up: "concat" or "interleaved".
        features: the optional arguments in use: out, tanh, limit (of `silu_and_mul`).
        x_strides: in elements.
    """

    op: str
    dtype: torch.dtype
    rows: int
    intermediate: int
    gate_up: str
    features: frozenset[str]
    x_strides: tuple[int, ...]


def _check(check: Checker, a: Arguments, used: frozenset[str] = frozenset()) -> ActivationCall:
    check.tensor("x", a.x, shape=(None, None), axes="(M, 2I)", dtypes=FLOATS)
    check.no_grad(x=a.x)
    rows, columns = a.x.shape
    if not columns or columns % 2:
        raise check.fail("x", f"has shape {tuple(a.x.shape)}", "(M, 2I): an even number of columns, at least 2")
    check.choice("gate_up", a.gate_up, GATE_UP)
    check.output("out", a.out, shape=(rows, columns // 2), axes="(M, I)", dtypes=(a.x.dtype,))
    used |= {"out"} if a.out is not None else set()
    return ActivationCall(check.op, a.x.dtype, rows, columns // 2, a.gate_up, used, a.x.stride())


def check_silu_and_mul(a: Arguments) -> ActivationCall:
    """Check a `silu_and_mul` call and return what gates look at."""
    check = Checker("silu_and_mul", a.x.device)
    if a.limit is not None:
        check.number("limit", a.limit, above=0.0)
    return _check(check, a, frozenset({"limit"} if a.limit is not None else ()))


def check_gelu_and_mul(a: Arguments) -> ActivationCall:
    """Check a `gelu_and_mul` call and return what gates look at."""
    check = Checker("gelu_and_mul", a.x.device)
    check.choice("approximate", a.approximate, _APPROXIMATIONS)
    return _check(check, a, frozenset({"tanh"} if a.approximate == "tanh" else ()))


def check_swiglu_oai_and_mul(a: Arguments) -> ActivationCall:
    """Check a `swiglu_oai_and_mul` call and return what gates look at."""
    check = Checker("swiglu_oai_and_mul", a.x.device)
    check.number("alpha", a.alpha)
    check.number("limit", a.limit, above=0.0)
    return _check(check, a)


def _meta(a: Arguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta((a.x.shape[0], a.x.shape[1] // 2), a.x.dtype),)


SILU_AND_MUL = Op("silu_and_mul", SiluAndMul, _silu_and_mul_signature, check_silu_and_mul, _meta)
GELU_AND_MUL = Op("gelu_and_mul", GeluAndMul, _gelu_and_mul_signature, check_gelu_and_mul, _meta)
SWIGLU_OAI_AND_MUL = Op("swiglu_oai_and_mul", SwigluOaiAndMul, _swiglu_oai_and_mul_signature, check_swiglu_oai_and_mul, _meta)
