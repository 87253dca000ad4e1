"""Tolerances, each with its reason, and the comparison that uses them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LSE", "OUTPUT", "QUANTISED_ROWS", "REQUANTISED_ROWS", "ROUTER_WEIGHTS", "Tolerance", "assert_same_bits", "close"]


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted error, as a fraction of the largest magnitude of the expected tensor, and why."""

    limit: float
    reason: str


#: Per dtype of q. Outputs are compared with float64 on the same, already rounded, inputs.
OUTPUT = {
    torch.float32: Tolerance(2e-5, "fp32 sums of a few thousand terms lose about 1e-6; TF32, with 1e-3, must fail"),
    torch.float16: Tolerance(3e-3, "the result and the weights are rounded to 11 bits: 2^-11 each, several times over"),
    torch.bfloat16: Tolerance(2e-2, "the result and the weights are rounded to 8 bits: 2^-8 each, several times over"),
}
#: The LSE is fp32 whatever q's dtype; relative to max(1, magnitude), because merges exponentiate it.
LSE = {
    torch.float32: Tolerance(2e-5, "as outputs"),
    torch.float16: Tolerance(5e-4, "products of fp16 are exact in fp32; leaves room for q scaled in its own dtype"),
    torch.bfloat16: Tolerance(1e-3, "products of bf16 are exact in fp32; leaves room for q scaled in its own dtype"),
}
#: Router weights are fp32 whatever the logits' dtype; relative to the largest weight of the row.
ROUTER_WEIGHTS = Tolerance(2e-5, "fp32 from the load of the logits on")
#: Where the op itself quantises rows, whatever the dtype of its result.
QUANTISED_ROWS = Tolerance(2e-2, "a value in the middle between two codes may take either, and the result is rounded to 16 bits")
#: Where it also quantises what came of that, per dtype of the experts.
REQUANTISED_ROWS = {
    torch.int8: Tolerance(2e-2, "as for one quantisation: steps of int8 are small"),
    torch.float8_e4m3fn: Tolerance(8e-2, "another code in x may move the scale of an intermediate row and with it all its codes, each by up to 2^-4"),
}


def close(what: str, got: Tensor, expected: Tensor, tolerance: Tolerance, least: float = 0.0) -> float:
    """Check `got` against float64 `expected` and return the error as a fraction of the scale.

    Infinite expected entries, and rows that are expected to be exactly 0, must be met exactly.
    """
    if tuple(got.shape) != tuple(expected.shape):
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not got.numel():
        return 0.0
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    wrong = got.isnan() & ~expected.isnan()
    if bool(wrong.any()):
        raise AssertionError(f"{what}: {int(wrong.sum())} of {got.numel()} elements are NaN or unwritten, the first at {_first(wrong)}")
    exact = ~expected.isfinite() | ~got.isfinite() | _zero_rows(expected)
    wrong = exact & (got != expected)
    if bool(wrong.any()):
        at = _first(wrong)
        raise AssertionError(f"{what}: {float(got[at])} at {at}, expected exactly {float(expected[at])}")
    magnitude = max(least, float(expected[expected.isfinite()].abs().max()) if bool(expected.isfinite().any()) else 0.0)
    difference = torch.where(exact, torch.zeros_like(got), (got - expected).abs())
    worst = float(difference.max())
    error = worst / magnitude if magnitude else (math.inf if worst else 0.0)
    if error > tolerance.limit:
        at = _first(difference == difference.max())
        raise AssertionError(
            f"{what}: {float(got[at])} at {at}, expected {float(expected[at])}: error {error:.3g} of the largest magnitude {magnitude:.4g}; "
            f"accepted {tolerance.limit:g} ({tolerance.reason})"
        )
    return error


def _zero_rows(expected: Tensor) -> Tensor:
    if expected.dim() < 2:
        return torch.zeros_like(expected, dtype=torch.bool)
    return (expected == 0).all(dim=-1, keepdim=True).expand_as(expected)


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])


def assert_same_bits(what: str, got: Tensor, expected: Tensor) -> None:
    """Check that two tensors of one dtype agree bit for bit, NaN included."""
    if got.dtype != expected.dtype or tuple(got.shape) != tuple(expected.shape):
        raise AssertionError(f"{what}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    if not got.numel():
        return
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    got, expected = got.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    wrong = got.view(integers) != expected.view(integers)
    if bool(wrong.any()):
        at = _first(wrong)
        count = f"{int(wrong.sum())} of {got.numel()} elements differ in their bits"
        raise AssertionError(f"{what}: {count}, the first at {at}: {float(got[at])}, expected {float(expected[at])}")
