"""Products of fp32 matrices in fp32 accuracy on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["matmul", "split_product", "tf32_part"]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in fp32 accuracy, also where TF32 is switched on."""
    return a @ b if a.device.type == "cpu" else split_product(a, b, torch.matmul)


def split_product(a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Product of fp32 matrices from TF32 products: each operand is a part that TF32 holds exactly, plus a rest.

    The product of the two rests is below fp32 rounding (the 3xTF32 scheme of CUTLASS). fp64 is no way out: some
    accelerators have none.
    """
    a_high, b_high = tf32_part(a), tf32_part(b)
    product = multiply(a_high, b_high)
    rest = multiply(a_high, b - b_high) + multiply(a - a_high, b_high)
    return product + rest.masked_fill_(~product.isfinite(), 0.0)  # Inf - Inf in a rest must not hide an Inf


def tf32_part(x: Tensor) -> Tensor:
    """Clear the 13 lowest bits of finite fp32 values."""
    return torch.where(x.isfinite(), (x.contiguous().view(torch.int32) & -8192).view(torch.float32), x)
