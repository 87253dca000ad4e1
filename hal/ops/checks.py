"""Input checks that the op contracts share. Each raises ArgumentError naming the argument, the value and what is accepted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.errors import ArgumentError

__all__ = ["FLOAT32_MAX", "FLOATS", "QUANTISED", "Checker", "names"]

#: dtypes of queries, activations and unquantised caches.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Numbers that kernels compute with are within this.
FLOAT32_MAX = torch.finfo(torch.float32).max
#: dtypes of quantised KV caches.
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """`float32, float16` for a tuple of dtypes."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _matches(found: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    return len(found) == len(wanted) and all(w in (None, size) for size, w in zip(found, wanted, strict=True))


class Checker:
    """The checks of one call: knows the op's name and the device all its tensors must share."""

    def __init__(self, op: str, device: torch.device) -> None:
        self.op, self.device = op, device

    def fail(self, argument: str, problem: str, accepted: str, fix: str = "") -> ArgumentError:
        """Return the error for the caller to raise."""
        return ArgumentError(self.op, argument, problem, accepted, fix)

    def tensor(
        self,
        argument: str,
        value: Any,
        *,
        shape: tuple[int | None, ...] | None = None,
        axes: str = "",
        dtypes: tuple[torch.dtype, ...] = (),
        last_contiguous: bool = True,
    ) -> Tensor:
        """Check that `value` is a strided tensor on the call's device; None in `shape` matches any size."""
        if not isinstance(value, Tensor):
            raise self.fail(argument, f"is {type(value).__name__}", f"a tensor {axes}".rstrip())
        if value.layout is not torch.strided:
            raise self.fail(argument, f"has layout {value.layout}", "a strided tensor")
        if value.device != self.device:
            raise self.fail(argument, f"is on {value.device}", f"the device of the other tensors, {self.device}")
        if dtypes and value.dtype not in dtypes:
            raise self.fail(argument, f"has dtype {names((value.dtype,))}", names(dtypes))
        if shape is not None and not _matches(value.shape, shape):
            wanted = "(" + ", ".join("*" if w is None else str(w) for w in shape) + ("," if len(shape) == 1 else "") + ")"
            raise self.fail(argument, f"has shape {tuple(value.shape)}", f"{axes} = {wanted}" if axes else wanted)
        if last_contiguous and value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1 and value.numel():
            raise self.fail(
                argument, f"has strides {value.stride()}", "any strides that keep the last dimension contiguous", "Call .contiguous() on it."
            )
        return value

    def output(self, argument: str, value: Any, *, shape: tuple[int, ...], axes: str, dtypes: tuple[torch.dtype, ...]) -> None:
        """Check an optional output tensor: its elements must also be distinct in memory."""
        if value is None:
            return
        self.tensor(argument, value, shape=shape, axes=axes, dtypes=dtypes)
        if value.requires_grad and torch.is_grad_enabled():
            raise self.fail(argument, "requires grad", "tensors that do not require grad", "Use torch.no_grad() or .detach().")
        self.distinct(argument, value)

    def distinct(self, argument: str, value: Tensor) -> None:
        """Refuse a tensor to be written whose elements may share memory."""
        span = 1
        for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1):
            if stride < span:
                raise self.fail(argument, f"has shape {tuple(value.shape)} and strides {value.stride()}", "an output whose elements do not overlap")
            span += (size - 1) * stride

    def integer(self, argument: str, value: Any, *, least: int, most: int | None = None) -> int:
        """Check a Python integer in a closed range; booleans are refused."""
        accepted = f"an integer >= {least}" if most is None else f"an integer in {least}..{most}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(argument, f"is {value!r}", accepted)
        if value < least or (most is not None and value > most):
            raise self.fail(argument, f"is {value}", accepted)
        return value

    def number(self, argument: str, value: Any, *, least: float | None = None, above: float | None = None) -> float:
        """Check a Python number within float32, optionally at least or above a bound."""
        bound = f" >= {least:g}" if least is not None else f" > {above:g}" if above is not None else ""
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not -FLOAT32_MAX <= value <= FLOAT32_MAX
            or (isinstance(value, int) and not -(2**63) <= value < 2**63)
            or (least is not None and value < least)
            or (above is not None and value <= above)
        ):
            raise self.fail(argument, f"is {value!r}", f"a finite float32 number{bound}")
        return float(value)

    def flag(self, argument: str, value: Any) -> bool:
        """Check a boolean."""
        if not isinstance(value, bool):
            raise self.fail(argument, f"is {value!r}", "True or False")
        return value

    def choice(self, argument: str, value: Any, choices: tuple[str, ...]) -> str:
        """Check one of a few words."""
        if value not in choices:
            raise self.fail(argument, f"is {value!r}", " | ".join(repr(c) for c in choices))
        return value

    def no_grad(self, **tensors: Any) -> None:
        """Refuse inputs that require grad while grad is enabled: no op here has a backward."""
        if torch.is_grad_enabled():
            for argument, value in tensors.items():
                if isinstance(value, Tensor) and value.requires_grad:
                    raise self.fail(
                        argument, "requires grad", "tensors that do not require grad (no backward exists)", "Use torch.no_grad() or .detach()."
                    )
