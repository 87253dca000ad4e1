# mypy: disable-error-code="no-untyped-def"
# (the `_..._signature` functions: their types are those of the Protocol above each, and a test compares the parameters)
"""The matrix product of the expert pipeline: `group_gemm`.

Axes: M rows sorted by expert, E experts, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hal.ops import moe_checks as moe
from hal.ops.checks import FLOATS, Checker
from hal.ops.op import Arguments, Op, TensorMeta
from hal.ops.signature import facts

__all__ = ["GROUP_GEMM", "GroupGemm", "GroupGemmCall"]


class GroupGemm(Protocol):
    """Type of `backend.group_gemm`."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        expert_sizes: Tensor,
        *,
        bias: Tensor | None = None,
        w_scales: Tensor | None = None,
        x_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply the rows of each expert by its weights: `out[r] = x[r] @ weight[e].T + bias[e]` for the rows r of expert e.

        The first `expert_sizes[0]` rows belong to expert 0, and so on. Sums are fp32 (int32 for int8), rounded once at the end.

        Quantised weights, `w = weight * w_scales`, come with x either quantised already (`x * x_scales`) or quantised inside:
        per row, beside block scales per row and 128 columns, `scale = amax / qmax` with qmax 127 of int8 and 448 of
        e4m3, rounded half to even and saturated; an all-zero row or block has scale 0 and zeros.

        Args:
            x: (M, K) fp32, fp16 or bf16, weight's dtype unless weights are quantised, then also weight's dtype; the last
                dimension contiguous, any row stride.
            weight: (E, N, K) fp32, fp16, bf16, int8 or fp8 e4m3; either of the last two dimensions contiguous, so that it may be
                a view of (E, K, N) storage. It is never copied or laid out anew.
            expert_sizes: (E,) int32, rows of each expert, at least 0, their sum at most M; read on the device.
            bias: (E, N) fp32, fp16 or bf16.
            w_scales: fp32, for quantised weights: (E,) one for an expert, (E, N) one for an output, or (E, ceil(N/128),
                ceil(K/128)) one for a block of 128 x 128.
            x_scales: fp32, for a quantised x: (M,), or beside block scales (M, ceil(K/128)).
            out: (M, N) in x's dtype, or of any floating-point dtype for a quantised x; any row stride, apart from the inputs.

        Returns:
            (M, N) in x's dtype, for a quantised x in that of `out`, else bf16. Rows from `sum(expert_sizes)` on are unspecified,
            and those of x are never looked at. K = 0 gives the bias, or 0.

        Raises:
            ArgumentError: an argument is outside this contract. Values of `expert_sizes` are read on the CPU, and on other
                devices under `validate: always`; unchecked, a size below 0 acts as 0 and rows beyond M are left out.
        """


def _group_gemm_signature(x, weight, expert_sizes, *, bias=None, w_scales=None, x_scales=None, out=None):
    return (
        x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, weight.device, facts(expert_sizes),
        facts(bias), facts(w_scales), facts(x_scales), facts(out), torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad),
    )  # fmt: skip


@dataclass(frozen=True)
class GroupGemmCall:
    """What a gate sees of a `group_gemm` call.

    Attributes:
        dtype: dtype of x, quantised or not. weight_dtype: of the weights. out_dtype: of the result.
        rows: M. num_experts: E. outputs: N. inputs: K.
        w_scales: None, "tensor", "channel" or "block".
        features: the optional arguments in use: bias, x_scales, out.
        x_strides, weight_strides: in elements.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype
    rows: int
    num_experts: int
    outputs: int
    inputs: int
    w_scales: str | None
    features: frozenset[str]
    x_strides: tuple[int, ...]
    weight_strides: tuple[int, ...]


def check_group_gemm(a: Arguments) -> GroupGemmCall:
    """Check a `group_gemm` call and return what gates look at."""
    check = Checker("group_gemm", a.x.device)
    check.tensor("x", a.x, shape=(None, None), axes="(M, K)", dtypes=(*FLOATS, *moe.EXPERT_QUANTISED))
    rows, inputs = a.x.shape
    moe.check_expert_weight(check, "weight", a.weight, (None, None, inputs), "(E, N, K)", (*FLOATS, *moe.EXPERT_QUANTISED))
    experts, outputs, _ = a.weight.shape
    check.tensor("expert_sizes", a.expert_sizes, shape=(experts,), axes="(E,)", dtypes=(torch.int32,))
    kind = moe.check_weight_scales(check, "w_scales", a.w_scales, a.weight)
    moe.check_activation_scales(check, a.x, a.x_scales, a.weight.dtype, kind)
    moe.check_bias(check, "bias", a.bias, (experts, outputs), "(E, N)")
    check.no_grad(x=a.x, weight=a.weight, bias=a.bias, w_scales=a.w_scales, x_scales=a.x_scales)
    check.output("out", a.out, shape=(rows, outputs), axes="(M, N)", dtypes=moe.output_dtypes(a.x))
    return GroupGemmCall(
        dtype=a.x.dtype,
        weight_dtype=a.weight.dtype,
        out_dtype=moe.result_dtype(a.x, a.out),
        rows=rows,
        num_experts=experts,
        outputs=outputs,
        inputs=inputs,
        w_scales=kind,
        features=frozenset(name for name in ("bias", "x_scales", "out") if getattr(a, name) is not None),
        x_strides=a.x.stride(),
        weight_strides=a.weight.stride(),
    )


def check_group_gemm_values(x: Tensor, weight: Tensor, expert_sizes: Tensor, **_: object) -> None:
    """Read the sizes of a `group_gemm` call."""
    check, sizes = Checker("group_gemm", x.device), expert_sizes.tolist()
    for expert, size in enumerate(sizes):
        if size < 0:
            raise check.fail(f"expert_sizes[{expert}]", f"is {size}", "a number of rows, at least 0")
    if sum(sizes) > x.shape[0]:
        raise check.fail("expert_sizes", f"sum to {sum(sizes)}", f"at most the {x.shape[0]} rows of `x`")


def _meta(a: Arguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta((a.x.shape[0], a.weight.shape[1]), moe.result_dtype(a.x, a.out)),)


GROUP_GEMM = Op("group_gemm", GroupGemm, _group_gemm_signature, check_group_gemm, _meta, check_group_gemm_values)
