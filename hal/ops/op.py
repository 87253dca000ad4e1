"""What every op contract consists of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["Arguments", "Op", "TensorMeta"]

#: All arguments of a call by name, defaults filled in.
Arguments = SimpleNamespace


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of an output."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Op:
    """The contract of one op; its prose is the docstring of `protocol.__call__`.

    Attributes:
        name: name of the op and of the attribute of the backend object.
        protocol: `typing.Protocol` whose `__call__` carries the signature and the docstring.
        signature: same parameters -> a hashable of everything that `check` and the gates look at. It runs on every
            call: keep it flat. Two calls with equal signatures get equal verdicts.
        check: arguments -> the facts that gates judge; raises ArgumentError. A pure function of the signature.
        check_values: same parameters (those it does not read may be swallowed) -> None; reads values inside tensors,
            raises ArgumentError.
        meta: arguments -> shapes and dtypes of the outputs, in order.
    """

    name: str
    protocol: type
    signature: Callable[..., Hashable]
    check: Callable[[Arguments], Any]
    meta: Callable[[Arguments], tuple[TensorMeta, ...]]
    check_values: Callable[..., None] | None = None

    @cached_property
    def parameters(self) -> inspect.Signature:
        """The contract's signature, without `self`."""
        full = inspect.signature(self.protocol.__call__)
        return full.replace(parameters=list(full.parameters.values())[1:])

    @property
    def doc(self) -> str:
        """The contract's prose."""
        return inspect.getdoc(self.protocol.__call__) or ""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments by name, defaults filled in; raises TypeError as a Python call would."""
        bound = self.parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return Arguments(**bound.arguments)
