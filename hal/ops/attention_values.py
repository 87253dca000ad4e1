"""Checks of the values inside index tensors of the attention family. They run on every call with CPU tensors: keep them lean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.errors import ArgumentError
from hal.ops.layouts import page_size_of

__all__ = ["check_flash_decode_values", "check_flash_prefill_values", "check_plan_decode_values"]


def _bad(values: Tensor, wrong: Tensor) -> tuple[int, int]:
    """Index and value of the first wrong entry."""
    index = int(wrong.nonzero()[0, 0])
    return index, int(values[index])


def _check_lengths(op: str, seq_lens: Tensor, most: int) -> None:
    # A short list is the cheaper way to look.
    if seq_lens.numel() <= 32:
        lengths = seq_lens.tolist()
        if not lengths or (min(lengths) >= 0 and max(lengths) <= most):
            return
    low, high = seq_lens.aminmax()
    if low.item() < 0 or high.item() > most:
        index, value = _bad(seq_lens, (seq_lens < 0) | (seq_lens > most))
        raise ArgumentError(op, f"seq_lens[{index}]", f"is {value}", f"0..{most} (block_tables.shape[1] * page_size)")


def _check_offsets(op: str, argument: str, cu: Tensor, most: int, longest: int | None = None) -> None:
    values = cu.tolist()
    if values[0] != 0:
        raise ArgumentError(op, f"{argument}[0]", f"is {values[0]}", "0")
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            raise ArgumentError(op, f"{argument}[{index}]", f"is {values[index]}", f"non-decreasing offsets, at least {values[index - 1]}")
        if longest is not None and values[index] - values[index - 1] > longest:
            raise ArgumentError(op, f"{argument}[{index}]", f"ends a block of {values[index] - values[index - 1]}", f"blocks of at most {longest}")
    if values[-1] > most:
        raise ArgumentError(op, f"{argument}[{len(values) - 1}]", f"is {values[-1]}", f"at most the {most} rows given")


def _check_tables(op: str, block_tables: Tensor, seq_lens: Tensor, pages: int, page_size: int, window: int | None, blocks: Tensor | int) -> None:
    """Check the table entries that the call will use: those of visible keys."""
    if block_tables.numel() == 0:
        return
    low, high = block_tables.aminmax()
    if low.item() >= 0 and high.item() < pages:
        return  # no entry is bad, so none of the used ones is
    first = torch.zeros_like(seq_lens) if window is None else (seq_lens.long() - blocks - window + 1).clamp_min(0)
    column = torch.arange(block_tables.shape[1], device=block_tables.device)[None, :] * page_size
    used = (column < seq_lens[:, None]) & (column + page_size > first[:, None])
    wrong = used & ((block_tables < 0) | (block_tables >= pages))
    if bool(wrong.any()):
        row, col = (int(i) for i in wrong.nonzero()[0])
        raise ArgumentError(op, f"block_tables[{row}, {col}]", f"is {int(block_tables[row, col])}", f"a page id in 0..{pages - 1}")


def check_flash_decode_values(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    q_len: int = 1,
    cu_seqlens_q: Tensor | None = None,
    kv_layout: str = "NHD",
    window: int | None = None,
    tree_mask: Tensor | None = None,
    **_: Any,
) -> None:
    """Read lengths, offsets and table entries of a `flash_decode` call."""
    page_size = page_size_of(k_cache, kv_layout)
    _check_lengths("flash_decode", seq_lens, block_tables.shape[1] * page_size)
    blocks: Tensor | int = q_len
    if cu_seqlens_q is not None:
        _check_offsets("flash_decode", "cu_seqlens_q", cu_seqlens_q, q.shape[0], None if tree_mask is None else tree_mask.shape[1])
        blocks = cu_seqlens_q.diff()
    _check_tables("flash_decode", block_tables, seq_lens, k_cache.shape[0], page_size, window, blocks)


def check_flash_prefill_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_q_len: int,
    seq_lens: Tensor | None = None,
    block_tables: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kv_layout: str = "NHD",
    window: int | None = None,
    **_: Any,
) -> None:
    """Read lengths, offsets and table entries of a `flash_prefill` call."""
    _check_offsets("flash_prefill", "cu_seqlens_q", cu_seqlens_q, q.shape[0], max_q_len)
    if cu_seqlens_k is not None:
        _check_offsets("flash_prefill", "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if block_tables is not None and seq_lens is not None:
        page_size = page_size_of(k, kv_layout)
        _check_lengths("flash_prefill", seq_lens, block_tables.shape[1] * page_size)
        _check_tables("flash_prefill", block_tables, seq_lens, k.shape[0], page_size, window, cu_seqlens_q.diff())


def check_plan_decode_values(seq_lens: Tensor, *, max_seq_len: int, cu_seqlens_q: Tensor | None = None, **_: Any) -> None:
    """Read lengths and offsets of a `plan_decode` call."""
    _check_lengths("plan_decode", seq_lens, max_seq_len)
    if cu_seqlens_q is not None:
        _check_offsets("plan_decode", "cu_seqlens_q", cu_seqlens_q, 2**31 - 1)
