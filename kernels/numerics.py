# mypy: allow-untyped-defs
"""Arithmetic that the attention kernels share; every value is fp32.

Scores live in the base-2 domain (`score * log2(e)`), because `exp2` is one instruction. A set of keys is summed up by
its normalised output and its base-2 log-sum-exp; -inf means that the set is empty and its output 0. Merging such
parts is exact when only one of them is not empty: its weight is `exp2(0) = 1` and the others' are 0. Batch-invariant
decoding rests on that, and on both the split and the unsplit path going through the functions below.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2E", "apply_tanh", "finish", "merge_weights", "normalise", "round_half_even"]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(LN2)
#: 1.5 * 2**23: adding it leaves no bit for a fraction, so the sum is rounded half to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def apply_tanh(x):
    """Hyperbolic tangent that cannot overflow, to fp32 accuracy also near 0."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * _LOG2E))
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    # Taylor series below 1/4: there 1 - decay cancels.
    small = size * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))))
    result = tl.where(size < 0.25, small, large)
    return tl.where(x < 0.0, -result, result)


@triton.jit
def round_half_even(x):
    """Nearest integer, ties to even, for |x| < 2**22; without a library call, so that it also runs interpreted."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def merge_weights(peak, part_lse):
    """Return the new peak, the weight of what was accumulated and the weight of a part with base-2 `part_lse`."""
    new_peak = tl.maximum(peak, part_lse)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, tl.exp2(peak - base), tl.exp2(part_lse - base)


@triton.jit
def normalise(peak, total):
    """Return the divisor of an accumulator and its base-2 log-sum-exp; 1 and -inf for nothing accumulated."""
    divisor = tl.where(total == 0.0, 1.0, total)
    return divisor, tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor))


@triton.jit
def finish(lse, sinks_ptr, heads, row_ok):
    """Return the factor of a normalised output and the natural log-sum-exp, both with the sinks of `heads`.

    A row that saw no key stays empty whatever its sink: factor 0, -inf.
    """
    if sinks_ptr is None:
        factor = tl.full(lse.shape, 1.0, tl.float32)
        result = lse * _LN2
    else:
        sink = tl.load(sinks_ptr + heads, mask=row_ok, other=float("-inf")) * _LOG2E
        empty = lse == float("-inf")
        peak = tl.where(empty, 0.0, tl.maximum(lse, sink))
        own = tl.exp2(lse - peak)
        total = own + tl.exp2(tl.where(empty, 0.0, sink) - peak)
        factor = tl.where(empty, 0.0, own / total)
        result = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * _LN2)
    return factor, result
