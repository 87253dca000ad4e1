"""What transformers' mask functions mean, so that a pattern which attention ops cannot express is refused, not ignored.

transformers describes a mask as a composition of small functions over (batch, head, query index, key index) and lets
each attention implementation turn it into what it needs. Here that is the 2-D padding mask, with the pattern noted on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

from hal.errors import ArgumentError

__all__ = ["PADDED", "WINDOW", "padding_mask"]

#: Attribute of a mask: the sliding window of its pattern, or None.
WINDOW = "hal_window"
#: Attribute of a mask: whether the caller gave a padding mask at all.
PADDED = "hal_padded"

_AND = and_masks().__code__
_CAUSAL = causal_mask_function.__code__
_SLIDING = sliding_window_overlay(1).__code__


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Hand the 2-D padding mask on to the attention function (an entry of transformers' `AttentionMaskInterface`).

    Args:
        batch_size: B.
        q_length: new tokens of each sequence.
        kv_length: tokens seen so far, the new ones included.
        q_offset: position of the first new token.
        kv_offset: position of the first key.
        mask_function: the pattern, a composition of transformers' mask functions.
        attention_mask: (B, kv_length) bool, True for real tokens; None if all are.
        device: where to make a mask when none is given.
        **kwargs: what other implementations need.

    Returns:
        (B, kv_length) bool, with the attributes `hal_window` and `hal_padded`.

    Raises:
        ArgumentError: the pattern is neither causal nor causal with a sliding window.
    """
    window = _window(mask_function)
    if attention_mask is None:
        mask = torch.ones((batch_size, kv_length), dtype=torch.bool, device=device)
    else:
        mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    setattr(mask, WINDOW, window)
    setattr(mask, PADDED, attention_mask is not None)
    return mask


def _window(mask_function: Callable[..., Any]) -> int | None:
    """Return the sliding window of a causal pattern, None if it has none; raise for any other pattern."""
    windows: list[int] = []
    causal = False
    for part in _parts(mask_function):
        code = getattr(part, "__code__", None)
        if code is _CAUSAL:
            causal = True
        elif code is _SLIDING:
            windows.append(int(_captured(part)))
        else:
            raise _refusal(f"contains {getattr(part, '__qualname__', repr(part))}")
    if not causal:
        raise _refusal("is not causal")
    return min(windows, default=None)


def _parts(mask_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the functions that a pattern is the intersection of."""
    if getattr(mask_function, "__code__", None) is not _AND:
        yield mask_function
        return
    for part in _captured(mask_function):
        yield from _parts(part)


def _captured(function: Callable[..., Any]) -> Any:
    """What a function made by another one has of it: the parts of an intersection, the width of a window."""
    assert function.__closure__ is not None
    return function.__closure__[0].cell_contents


def _refusal(problem: str) -> ArgumentError:
    return ArgumentError(
        "attention", "mask_function", problem, "a causal pattern, with a sliding window or without", "Load the model with attn_implementation='sdpa'."
    )
