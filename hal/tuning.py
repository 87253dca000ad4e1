"""Measured choices of speed, as plain frozen data: what `hal tune` writes and the key `tuning:` of a device config names.

`hal.tuning_file` reads and writes the files. A backend that takes such choices names a function for them in its
`BackendSpec.tuning`. None of them changes a result beyond rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["ExpertsEntry", "Tuning"]

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
