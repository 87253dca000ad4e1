"""Measured choices of speed, as plain frozen data: what `hal tune` writes and the key `tuning:` of a device config names.

`hal.tuning_file` reads and writes the files. A backend that takes such choices names a function for them in its
`BackendSpec.tuning`. None of them changes a result beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ExpertsEntry", "Tuner", "Tuning"]

Options = Mapping[str, "int | bool"]


@dataclass(frozen=True)
class ExpertsEntry:
    """The best way of `fused_moe` for some experts and tokens.

    Attributes:
        experts: E, held by one device.
        hidden: H.
        inner: I.
        top_k: k.
        tokens: T that was measured; it serves numbers near it too.
        dtype: of x and the weights.
        k_inner: K is the contiguous dimension of both weights; false for (E, K, N) storage.
        path: `sorted` or `slots`.
        block_m: rows of a tile, sorted path only.
        up: options of the first product.
        down: options of the second.
        microseconds: of the whole op.
    """

    experts: int
    hidden: int
    inner: int
    top_k: int
    tokens: int
    dtype: Literal["bfloat16", "float16", "float32"]
    k_inner: bool
    path: Literal["sorted", "slots"]
    block_m: int | None
    up: Options
    down: Options
    microseconds: float


@dataclass(frozen=True)
class Tuning:
    """Measurements of one kind of device.

    Attributes:
        device: the name that torch gives it; other devices do not use them.
        fused_moe: entries, in any order.
        source: file that they came from.
    """

    device: str
    fused_moe: tuple[ExpertsEntry, ...]
    source: str = ""


class Tuner(Protocol):
    """The module of a backend that `hal tune moe` measures with. Its configs are its own matter: what one function gives, others take.

    Attributes:
        Experts: called with E, H, I, k, bytes of an element, and whether K is the contiguous dimension of both weights; the experts
            that the functions speak of.
    """

    @property
    def Experts(self) -> Callable[[int, int, int, int, int, bool], Any]:
        """See the class."""

    def served(self, device: torch.device, experts: Any, tokens: int) -> Any:
        """Return the config that serves these experts and T tokens now."""

    def candidates(self, device: torch.device, experts: Any, tokens: int, best: Callable[[], Any]) -> Iterator[Any]:
        """Yield configs to measure; `best` gives the best so far of the kind that was yielded last."""

    def fixed(self, device: torch.device, experts: Any, tokens: int, config: Any) -> AbstractContextManager[None]:
        """Serve these experts and tokens by one config inside, and as before afterwards."""

    def entry_of(self, experts: Any, dtype: str, tokens: int, config: Any, microseconds: float) -> ExpertsEntry:
        """Return the entry of a file for a config and the time of the whole op."""

    def layer(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, out: Tensor) -> Tensor:
        """Run the op once, on x (T, H), w_gate_up (E, 2I, H), w_down (E, H, I), weights and ids (T, k), and return `out` (T, H)."""
