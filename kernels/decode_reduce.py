# mypy: allow-untyped-defs
"""The two small kernels beside the main one of `flash_decode`: the merge of split units, and the depths of a draft tree.

The reduction walks over the splits of a unit in order, with the arithmetic of `hal.kernels.numerics`. The base of each
partial is added to the scalar pointer and never to the two-dimensional offsets: Triton 3.5.0 to 3.6.0 miscompile that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.decode_plan import HEADER, ITEM
from hal.kernels.numerics import finish, merge_weights, normalise

__all__ = ["REDUCE_ROWS", "depth_kernel", "reduce_kernel"]

#: Rows of one program of the reduction; the 16 of the smallest tile are spread over four programs.
REDUCE_ROWS = 4
_ROWS = tl.constexpr(16)
_COLUMNS = tl.constexpr(32)


@triton.jit(do_not_specialize=["tokens", "sequences", "q_len", "max_items", "max_slots", "num_kv_heads"])
def reduce_kernel(
    out_ptr, lse_ptr, part_ptr, plan_ptr, cu_ptr, sinks_ptr, v_scale_ptr, value_scale,
    tokens, sequences, q_len, max_items, max_slots, num_kv_heads,
    stride_ot, stride_oh, stride_lt, stride_vsh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, G: tl.constexpr,
    TOKEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, V_TOKEN_SCALE: tl.constexpr,
):  # fmt: skip
    """Merge the partials of ROWS rows of one split unit and kv head; programs beyond the split units return at once."""
    row_blocks = BLOCK_M // ROWS
    row_block = tl.program_id(0) % row_blocks
    kv_head = ((tl.program_id(0) // row_blocks) % num_kv_heads).to(tl.int64)
    unit = tl.program_id(0) // row_blocks // num_kv_heads
    if unit >= tl.load(plan_ptr + 1):
        return
    item = tl.load(plan_ptr + HEADER + max_items * ITEM + unit)
    record = plan_ptr + HEADER + item * ITEM
    sequence = tl.load(record)
    row_tile = tl.load(record + 1)
    splits = tl.load(record + 3)
    slot = tl.load(record + 4).to(tl.int64)
    if cu_ptr is None:
        row_start = sequence * q_len
        queries = q_len
    else:
        row_start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), tokens)
        row_end = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
        queries = tl.minimum(tl.maximum(row_end, row_start), tokens) - row_start
    part_row = row_block * ROWS + tl.arange(0, ROWS)
    row = row_tile * BLOCK_M + part_row
    row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
    if row_tile * BLOCK_M + row_block * ROWS >= queries * TOKEN_ROWS:
        return

    d = tl.arange(0, DV_PAD)
    mask = row_ok[:, None] & (d < DV)[None, :]
    offsets = part_row[:, None] * DV + d[None, :]
    part = part_ptr + (slot * num_kv_heads + kv_head) * (BLOCK_M * DV)
    lses = part_ptr + (max_slots.to(tl.int64) * num_kv_heads) * (BLOCK_M * DV) + (slot * num_kv_heads + kv_head) * BLOCK_M
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DV_PAD), tl.float32)
    for _ in range(0, splits):
        values = tl.load(part + offsets, mask=mask, other=0.0)
        peak, old, new = merge_weights(peak, tl.load(lses + part_row, mask=row_ok, other=float("-inf")))
        total = total * old + new
        acc = acc * old[:, None] + values * new[:, None]
        part += num_kv_heads.to(tl.int64) * (BLOCK_M * DV)
        lses += num_kv_heads.to(tl.int64) * BLOCK_M
    divisor, lse = normalise(peak, total)
    acc = tl.div_rn(acc, tl.broadcast_to(divisor[:, None], acc.shape))

    head = kv_head * G + row % TOKEN_ROWS
    token = (row_start + row // TOKEN_ROWS).to(tl.int64)
    if v_scale_ptr is not None and not V_TOKEN_SCALE:
        value_scale *= tl.load(v_scale_ptr + kv_head * stride_vsh)
    factor, result = finish(lse, sinks_ptr, head, row_ok)
    factor *= value_scale
    out_rows = out_ptr + token * stride_ot + head * stride_oh
    tl.store(out_rows[:, None] + d[None, :], (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)


@triton.jit(do_not_specialize=["tokens", "q_len", "stride_tree", "tree_cols"])
def depth_kernel(depth_ptr, tree_ptr, cu_ptr, tokens, q_len, stride_tree, tree_cols):
    """Depth of every draft token: true entries of its row within its block minus 1, not below 0. One program a sequence."""
    sequence = tl.program_id(0)
    if cu_ptr is None:
        row_start = sequence * q_len
        queries = q_len
    else:
        row_start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), tokens)
        queries = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence + 1), row_start), tokens) - row_start
    columns = tl.minimum(queries, tree_cols)
    for begin in range(0, queries, _ROWS):
        query = begin + tl.arange(0, _ROWS)
        token = (row_start + query).to(tl.int64)
        count = tl.zeros((_ROWS,), tl.int32)
        for first in range(0, columns, _COLUMNS):
            column = first + tl.arange(0, _COLUMNS)
            mask = (query < queries)[:, None] & (column < columns)[None, :]
            seen = tl.load(tree_ptr + token[:, None] * stride_tree + column[None, :], mask=mask, other=0)
            count += tl.sum((seen != 0).to(tl.int32), 1)
        tl.store(depth_ptr + token, tl.maximum(count - 1, 0), mask=query < queries)
