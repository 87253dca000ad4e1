# mypy: allow-untyped-defs
"""Gated activations: `act(gate) * up`, in fp32, as ops of their own and inside the first product of the experts.

| name | formula |
|---|---|
| silu | `gate * sigmoid(gate) * up`; with a limit first `gate = min(gate, limit)`, `up = clamp(up, -limit, limit)` |
| gelu | `gate * (1 + erf(gate / sqrt(2))) / 2 * up` |
| gelu_tanh | its tanh approximation |
| swiglu_oai | clamped like silu, then `gate * sigmoid(alpha * gate) * (up + 1)` (gpt-oss) |

The gates are the first half of a row ("concat") or its even columns ("interleaved").
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.numerics import apply_tanh
from hal.kernels.scratch import current_device
from hal.kernels.tuning import supports_pdl

__all__ = ["ACTIVATIONS", "BLOCK", "WARPS", "activate", "activation_kernel", "gated"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
#: Most columns that a program handles at a time, and its warps.
BLOCK, WARPS = 1024, 4
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_TWO_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """`act(gate) * up` of fp32 tensors; `limit` None for no clamp, `alpha` only read by swiglu_oai."""
    if limit is not None:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL), -limit, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "silu":
        result = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF)) * up
    elif ACTIVATION == "gelu_tanh":
        result = 0.5 * gate * (1.0 + apply_tanh((gate + 0.044715 * gate * gate * gate) * _SQRT_TWO_OVER_PI)) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_oai")
        result = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    return result


@triton.jit(do_not_specialize=["alpha", "limit", "columns"])
def activation_kernel(
    x_ptr, out_ptr, alpha, limit, columns, stride_x, stride_out,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, BLOCK output columns at a time."""
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        ok = column < columns
        if INTERLEAVED:
            both = 2 * begin + tl.arange(0, 2 * BLOCK)
            pairs = tl.load(x_ptr + row * stride_x + both, mask=both < 2 * columns, other=0.0)
            gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
        else:
            gate = tl.load(x_ptr + row * stride_x + column, mask=ok, other=0.0)
            up = tl.load(x_ptr + row * stride_x + columns + column, mask=ok, other=0.0)
        result = activate(gate.to(tl.float32), up.to(tl.float32), alpha, limit, ACTIVATION)
        tl.store(out_ptr + row * stride_out + column, result.to(out_ptr.dtype.element_ty), mask=ok)


def gated(x: Tensor, out: Tensor, *, activation: str, gate_up: str, alpha: float, limit: float | None) -> None:
    """Write `act(gate) * up` of each row.

    Args:
        x: (M, 2I), rows of any stride.
        out: (M, I), likewise.
        activation: one of `ACTIVATIONS`.
        gate_up: "concat" or "interleaved".
        alpha: only read by swiglu_oai.
        limit: clamp, None for none.
    """
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    pdl = supports_pdl(x.device)
    block = min(BLOCK, max(16, triton.next_power_of_2(columns)))
    with current_device(x.device):
        activation_kernel[(rows,)](
            x, out, alpha, limit, columns, x.stride(0), out.stride(0), activation, gate_up == "interleaved", block, pdl,
            num_warps=WARPS, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
        )  # fmt: skip
