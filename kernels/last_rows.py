# mypy: allow-untyped-defs
"""Which row of a slot mapping is the last to name its slot, in two passes over the rows.

A table in work memory has one int32 for each slot of the cache. The first pass empties the entries that this call's rows
name, the second raises each to the largest of its rows. No other entry is read or written, so the table needs no other
clearing: a graph that is replayed with other slots finds its own entries empty, whatever was in them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.compile_case import EVERYWHERE, CompileCase
from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.scratch import scratch

__all__ = ["compile_cases", "last_row_kernel", "last_rows"]

#: Rows of a program, one for each thread.
_BLOCK = 256


@triton.jit(do_not_specialize=["slots", "rows"])
def last_row_kernel(last_ptr, slot_ptr, slots, rows, EMPTY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Empty the entries of BLOCK rows' slots, or raise them to those rows; a slot outside [0, slots) has none."""
    pdl_begin(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < slots)
    if EMPTY:
        tl.store(last_ptr + slot, tl.full([BLOCK], -1, tl.int32), mask=inside)
    else:
        tl.atomic_max(last_ptr + slot, row, mask=inside, sem="relaxed")


def last_rows(slot_mapping: Tensor, slots: int, *, pdl: bool) -> Tensor:
    """Return a table whose entry for each slot in `slot_mapping` is the last row that names it; launches on the current device.

    Args:
        slot_mapping: (N,) int32 or int64, any values.
        slots: slots of the cache; those outside [0, slots) are skipped.
        pdl: take part in programmatic dependent launch.

    Returns:
        (at least slots,) int32 in work memory; entries of slots that no row names are undefined.
    """
    rows = slot_mapping.shape[0]
    table = scratch("last_rows", slots, torch.int32, slot_mapping.device)
    for empty in (True, False):
        last_row_kernel[(triton.cdiv(rows, _BLOCK),)](
            table, slot_mapping, slots, rows, empty, _BLOCK, pdl, num_warps=_BLOCK // 32, num_stages=1, **pdl_options(pdl)
        )  # fmt: skip
    return table


def compile_cases() -> list[CompileCase]:
    """Both passes, over either dtype of slots."""
    cases = []
    for empty in (True, False):
        for name in ("i32", "i64"):
            types = {"last_ptr": "*i32:16", "slot_ptr": f"*{name}:16", "slots": "i64", "rows": "i32"}
            for pdl, targets in EVERYWHERE:
                constants = {"EMPTY": empty, "BLOCK": _BLOCK, "PDL": pdl}
                case = f"last_rows/{name}-{'empty' if empty else 'raise'}"
                cases.append(CompileCase(case, last_row_kernel, types, constants, _BLOCK // 32, 1, no_spills=True, targets=targets))
    return cases
