"""Attention of single (token, head) pairs in float64, by gathering their keys: what results are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.bench.decode.buffers import Buffers
from hal.bench.guard import relative

__all__ = ["TOLERANCES", "exact_error"]

#: Of a result's dtype, relative to the largest magnitude of the expected values.
TOLERANCES = {"fp16": 3e-3, "bf16": 2e-2}


def exact_error(buffers: Buffers, out: Tensor, index: int) -> float:
    """Return the largest relative error of a few rows of `out` (T, H, Dv), computed on set `index`."""
    case = buffers.case
    if not case.batch:
        return 0.0
    longest = max(range(case.batch), key=case.lengths.__getitem__)
    shortest = min(range(case.batch), key=case.lengths.__getitem__)
    picks = {(longest, case.q_len - 1, case.heads - 1), (shortest, 0, 0), (case.batch // 2, case.q_len - 1, case.heads // 2)}
    return max(relative(out[b * case.q_len + i, h], _attend(buffers, index, b, i, h)) for b, i, h in sorted(picks))


def _attend(buffers: Buffers, index: int, sequence: int, row: int, head: int) -> Tensor:
    """Exact output (Dv,) of one query token and head."""
    case = buffers.case
    place = case.lengths[sequence] - case.q_len + row
    first = 0 if case.window is None else max(0, place - case.window + 1)
    kv_head = head // (case.heads // case.kv_heads)
    q = buffers.q[sequence * case.q_len + row, head].double()
    slots = torch.arange(first, place + 1, device=q.device)
    pages, offsets = buffers.tables[sequence].long()[slots // case.page], slots % case.page

    def gathered(cache: Tensor, scale: float | Tensor | None) -> Tensor:
        rows = cache[pages, offsets, kv_head].double()
        if isinstance(scale, Tensor):
            return rows * scale[pages, offsets, kv_head].double()[:, None]
        return rows * (1.0 if scale is None else scale)

    keys = gathered(buffers.keys(index), buffers.key_scale(index))
    values = gathered(buffers.values(index), buffers.value_scale(index))
    return torch.softmax(keys @ q * case.head_dim**-0.5, dim=0) @ values
