# mypy: allow-untyped-defs
"""Partition of a decode step over its keys, computed on the device.

A unit is a tile of `block_m` packed rows (token, head of one group) of one sequence; it exists once per kv head. The
keys of all units are cut into pieces of nearly equal size, about as many as programs fill the device, and each piece
becomes an item: one program of the main kernel per item and kv head. A unit of one item writes its result directly;
the items of a split unit write partials into consecutive scratch slots, which the reduction merges.

An item names its split and the number of splits, never a range of keys: the main kernel divides the keys that the
unit has at that moment, so a partition that is out of date costs balance only. (Idea of balanced pieces: the
schedulers of FlashInfer and FlashMLA; here in one Triton program, without a host copy.)

Buffer, int32: `[0]` items, `[1]` split units, then 8 words per item (sequence, row tile, split, splits, slot), then
the first item of each split unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.compile_case import CompileCase
from hal.kernels.tuning import INVARIANT_CHUNK, MIN_SPLIT_KEYS, packed_rows, target_programs

__all__ = ["HEADER", "ITEM", "PLAN_TILE", "Partition", "compile_cases", "partition_of", "plan_kernel", "write_plan"]

HEADER = tl.constexpr(8)
ITEM = tl.constexpr(8)
#: Keys that the planner counts as one step of work; independent of the main kernel's tile.
PLAN_TILE = 64
_BLOCK = 128
_WIDTH = tl.constexpr(8)
#: Chunks of a batch-invariant call that may be spread, per program that fills the device. Units beyond are summed up
#: by one program, to the same bits; the bound keeps scratch small for any length.
_INVARIANT_SLOTS = 8


@dataclass(frozen=True)
class Partition:
    """Sizes of a partition, known on the host.

    Attributes:
        block_m: rows of a unit.
        token_rows: rows that a token takes: its group, padded to whole units in a batch-invariant call, because a
            matrix product may round a row differently in another place of the tile.
        row_tiles: units of a sequence (0 with variable blocks).
        pieces: pieces per kv head that fill the device.
        max_items: no more items per kv head exist.
        max_slots: no more scratch slots per kv head are used; 0 if nothing can be split.
        invariant: cut at fixed keys.
        planned: a plan buffer is needed; else item i is unit i, unsplit.
    """

    block_m: int
    token_rows: int
    row_tiles: int
    pieces: int
    max_items: int
    max_slots: int
    invariant: bool
    planned: bool

    @property
    def words(self) -> int:
        """int32 words of the plan buffer."""
        return int(HEADER) + int(ITEM) * self.max_items + self.max_slots // 2 + 1


@lru_cache(maxsize=4096)
def partition_of(
    sequences: int,
    tokens: int,
    q_len: int | None,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    max_keys: int,
    invariant: bool,
    device: torch.device,
) -> Partition:
    """Return the sizes of the partition of a call; a pure function of facts that the host knows.

    Args:
        sequences: B.
        tokens: T.
        q_len: tokens of every sequence, None if they vary.
        group: query heads of a kv head.
        num_kv_heads: Hkv.
        head_dim: the larger of D and Dv.
        max_keys: most keys of a sequence.
        invariant: batch-invariant call.
        device: of the call.
    """
    rows = group * (1 if invariant else q_len or -(-tokens // max(1, sequences)))
    block_m = packed_rows(rows, head_dim)
    token_rows = -(-group // block_m) * block_m if invariant else group
    row_tiles = 0 if q_len is None else -(-q_len * token_rows // block_m)
    units = tokens * token_rows // block_m + sequences + 1 if q_len is None else sequences * row_tiles
    pieces = max(1, target_programs(device) // num_kv_heads)
    splittable = max_keys > (INVARIANT_CHUNK if invariant else MIN_SPLIT_KEYS) and (pieces > 1 or invariant)
    max_slots = 0 if not splittable else pieces * _INVARIANT_SLOTS if invariant else 2 * pieces
    return Partition(block_m, token_rows, row_tiles, pieces, units + max_slots, max_slots, invariant, splittable or q_len is None)


@triton.jit
def _work(
    sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys,
    TOKEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, CHUNK_TILES: tl.constexpr,
):  # fmt: skip
    """Row tiles of each sequence, and its steps of keys (chunks of an absolute grid in a batch-invariant call)."""
    real = sequence < sequences
    if cu_ptr is None:
        queries = tl.where(real, q_len, 0)
    else:
        # The pseudo-sequence after the last one holds the padding rows; it sees no key.
        start = tl.load(cu_ptr + sequence, mask=sequence <= sequences, other=0)
        end = tl.load(cu_ptr + sequence + 1, mask=real, other=tokens)
        start = tl.minimum(tl.maximum(start, 0), tokens)
        end = tl.minimum(tl.maximum(end, start), tokens)
        queries = tl.where(sequence <= sequences, end - start, 0)
    keys = tl.load(seq_lens_ptr + sequence, mask=real, other=0)
    keys = tl.minimum(tl.maximum(keys, 0), max_keys)
    first = tl.zeros_like(keys)
    if window is not None:
        first = tl.minimum(tl.maximum(keys - queries - window + 1, 0), keys)
    width = CHUNK_TILES * TILE if CHUNK_TILES > 0 else TILE
    return tl.cdiv(queries * TOKEN_ROWS, BLOCK_M), tl.cdiv(keys, width) - first // width


@triton.jit(do_not_specialize=["sequences", "tokens", "q_len", "window", "max_keys", "pieces", "max_items", "max_slots"])
def plan_kernel(
    plan_ptr, seq_lens_ptr, cu_ptr,
    sequences, tokens, q_len, window, max_keys, pieces, max_items, max_slots,
    TOKEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr, CHUNK_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the items and the list of split units; one program."""
    blocks = sequences
    if cu_ptr is not None:
        blocks += 1
    share = 1
    if CHUNK_TILES == 0:
        total = tl.zeros((), tl.int64)
        for begin in range(0, blocks, BLOCK):
            row_tiles, steps = _work(
                begin + tl.arange(0, BLOCK), seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M, TILE, CHUNK_TILES
            )
            total += tl.sum(row_tiles.to(tl.int64) * steps)
        share = tl.minimum(tl.maximum(MIN_TILES, (total + pieces - 1) // pieces), 1 << 28).to(tl.int32)
    items = 0
    slots = 0
    split_units = 0
    for begin in range(0, blocks, BLOCK):
        sequence = begin + tl.arange(0, BLOCK)
        row_tiles, steps = _work(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M, TILE, CHUNK_TILES)
        if CHUNK_TILES > 0:
            wanted = tl.where(steps > 1, row_tiles * steps, 0)
            fits = slots + tl.cumsum(wanted, 0) <= max_slots
            splits = tl.where(fits, tl.maximum(steps, 1), 1)
        else:
            # A piece may exceed its share by a quarter: else equal sequences would each leave a sliver.
            splits = tl.maximum((4 * steps + 3 * share - 1) // (4 * share), 1)
        own_items = row_tiles * splits
        own_slots = tl.where(splits > 1, own_items, 0)
        own_units = tl.where(splits > 1, row_tiles, 0)
        item_base = items + tl.cumsum(own_items, 0) - own_items
        slot_base = slots + tl.cumsum(own_slots, 0) - own_slots
        unit_base = split_units + tl.cumsum(own_units, 0) - own_units
        for offset in range(0, tl.max(own_items, 0), _WIDTH):
            step = offset + tl.arange(0, _WIDTH)[None, :]
            item = item_base[:, None] + step
            mask = (step < own_items[:, None]) & (item < max_items)
            row_tile = step // splits[:, None]
            split = step % splits[:, None]
            is_split = splits[:, None] > 1
            record = plan_ptr + HEADER + item * ITEM
            tl.store(record, sequence[:, None] + tl.zeros_like(item), mask=mask)
            tl.store(record + 1, row_tile, mask=mask)
            tl.store(record + 2, split, mask=mask)
            tl.store(record + 3, splits[:, None] + tl.zeros_like(item), mask=mask)
            tl.store(record + 4, slot_base[:, None] + step, mask=mask)
            unit = unit_base[:, None] + row_tile
            tl.store(plan_ptr + HEADER + max_items * ITEM + unit, item, mask=mask & is_split & (split == 0) & (unit <= max_slots // 2))
        items += tl.sum(own_items)
        slots += tl.sum(own_slots)
        split_units += tl.sum(own_units)
    tl.store(plan_ptr, tl.minimum(items, max_items))
    tl.store(plan_ptr + 1, split_units)


def write_plan(
    buffer: Tensor,
    partition: Partition,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    tokens: int,
    q_len: int,
    window: int | None,
    max_keys: int,
) -> None:
    """Launch the planner into `buffer`, int32 of `partition.words`; the current device is the buffer's."""
    chunk_tiles = INVARIANT_CHUNK // PLAN_TILE if partition.invariant else 0
    plan_kernel[(1,)](
        buffer, seq_lens, cu_seqlens_q,
        seq_lens.shape[0], tokens, q_len, window, max_keys, partition.pieces, partition.max_items, partition.max_slots,
        partition.token_rows, partition.block_m, PLAN_TILE, MIN_SPLIT_KEYS // PLAN_TILE, chunk_tiles, _BLOCK,
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


#: (name, variable blocks, window, tiles of an invariant chunk) of the variants that are compiled ahead of time.
_VARIANTS = (("uniform", False, False, 0), ("window", False, True, 0), ("variable", True, True, 0), ("invariant", True, True, 8))


def compile_cases() -> list[CompileCase]:
    """Uniform and variable blocks, with and without a window, balanced and batch-invariant."""
    integers = dict.fromkeys(("sequences", "tokens", "q_len", "max_keys", "pieces", "max_items", "max_slots"), "i32")
    pointers = {"plan_ptr": "*i32:16", "seq_lens_ptr": "*i32:16"}
    cases = []
    for name, variable, window, chunk in _VARIANTS:
        types = dict(pointers) | integers
        constants: dict[str, object] = {"TOKEN_ROWS": 4, "BLOCK_M": 16, "TILE": PLAN_TILE, "MIN_TILES": 2, "CHUNK_TILES": chunk, "BLOCK": _BLOCK}
        for argument, kind, present in (("cu_ptr", "*i32:16", variable), ("window", "i32", window)):
            if present:
                types[argument] = kind
            else:
                constants[argument] = None
        cases.append(CompileCase(f"plan/{name}", plan_kernel, types, constants, warps=4, stages=1))
    return cases
