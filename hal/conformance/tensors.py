"""The tensors among the arguments of a call, those inside tuples such as an index included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["mapped", "tensors"]


def tensors(args: dict[str, Any]) -> dict[str, Tensor]:
    """Return every tensor by name; the i-th of a tuple called `index` is `index.i`."""
    found: dict[str, Tensor] = {}
    for name, value in args.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= {f"{name}.{i}": part for i, part in enumerate(value) if isinstance(part, Tensor)}
    return found


def mapped(args: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the arguments with every tensor changed."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, tuple):
            parts = [one(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    return {name: one(value) for name, value in args.items()}
