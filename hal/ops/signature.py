"""What call signatures hold of their arguments: two calls with equal signatures must get equal verdicts from the checks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from hal.ops.checks import FLOAT32_MAX

__all__ = ["facts", "number", "scale_facts", "types"]


def facts(t: Tensor | None) -> Hashable:
    """What a signature holds of an optional tensor."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad and torch.is_grad_enabled())


def number(x: Any) -> Hashable:
    """What it holds of a number whose value no check looks at, but for being one: varying values share a signature."""
    return x if x is None else (x.__class__, -FLOAT32_MAX <= x <= FLOAT32_MAX)


def scale_facts(scale: float | Tensor | None) -> Hashable:
    """What it holds of a KV scale."""
    if scale is None or isinstance(scale, Tensor):
        return facts(scale)
    return scale.__class__, 0.0 < scale <= FLOAT32_MAX


def types(*values: Any) -> tuple[type, ...]:
    """The classes of values that compare equal across types, as True, 1 and 1.0 do."""
    return tuple(value.__class__ for value in values)
