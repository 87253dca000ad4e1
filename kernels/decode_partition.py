# mypy: allow-untyped-defs
"""Partition of a decode step over its keys, computed on the device.

A unit is a tile of `block_m` packed rows (token, head of one kv group) of one sequence; it exists once per kv head. Its
keys are counted in steps. The steps of all units, sequence after sequence, form one list, which is cut into `pieces`:
one program of the main kernel per piece and kv head, on a grid that depends on nothing but the shapes (as in stream-K,
Osama et al., 2023). A unit inside a piece is written directly; a unit that a boundary cuts leaves one partial per piece (per
chunk in a batch-invariant call), merged by the last writer on Hopper, else by the reduction.

The first `long` pieces have one length. Multiprocessors do not all read equally fast, so with much work (96 steps a
piece or more) the last eighth of the list is left to short pieces, which start as places become free.

`plan_kernel` finds where each piece begins, in one program per piece; a plan is that answer, kept for all layers of a
step. It counts the steps that the lengths had when it was made, and the main kernel stretches them over the keys that a
unit has now: a plan out of date costs balance only.

Plan buffer, int32: `[0]` steps of a long piece, `[1]` steps of all long pieces, `[2]` steps of a short piece,
`[3]` long pieces, then 4 words per piece (sequence, row tile, step, steps left), then the
steps of each sequence and of the padding rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.compile_case import CompileCase
from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.tuning import INVARIANT_CHUNK, STEP, packed_rows

__all__ = [
    "HEADER",
    "RECORD",
    "Partition",
    "PlanBuffer",
    "compile_cases",
    "locate",
    "partition_of",
    "plan_kernel",
    "unit_rows",
    "work_of",
    "write_plan",
]

#: Words before the records of a plan, and of each record.
HEADER = tl.constexpr(4)
RECORD = tl.constexpr(4)
_BLOCK = tl.constexpr(128)
#: Chunks of a batch-invariant call that may be spread over pieces, per piece. A call with more gives every unit to one
#: program, to the same bits; the bound keeps scratch small for any length.
_CHUNKS_PER_PIECE = 8
#: More waves of programs than this gain nothing when the kv heads do not divide the programs of the device.
_MOST_WAVES = 3
#: Steps of a piece from which the last eighth of the list is left to short pieces.
_SHORT_FROM = tl.constexpr(96)
#: One program per multiprocessor reads as fast as two while its piece has fewer steps than this, and merges less.
_FEW_STEPS = tl.constexpr(16)


@dataclass(frozen=True)
class Partition:
    """Sizes of a partition, known on the host.

    Attributes:
        block_m: rows of a unit.
        token_rows: rows that a token takes: its group, padded to whole units in a batch-invariant call, because a
            matrix product may round a row differently in another place of the tile.
        pieces: pieces of the list of steps; 1 if nothing can be cut.
        long: how many of them are long; all, if there cannot be enough work for short ones.
        few: pieces that give each multiprocessor one program: enough for little work.
        slots: scratch slots of partials per kv head.
        step: keys of a step.
        invariant: batch-invariant call: a step is a chunk that is summed up by itself.
    """

    block_m: int
    token_rows: int
    pieces: int
    long: int
    few: int
    slots: int
    step: int
    invariant: bool

    @property
    def splits(self) -> bool:
        """Whether a unit can be cut."""
        return self.slots > 0

    def words(self, sequences: int) -> int:
        """int32 words of the plan of as many sequences."""
        return int(HEADER) + int(RECORD) * self.pieces + sequences + 1


@dataclass(frozen=True)
class PlanBuffer:
    """A partition of uniform blocks on the device; `words` is None for a call that does not read one."""

    partition: Partition
    words: Tensor | None


def _pieces(programs: int, num_kv_heads: int) -> int:
    """Pieces per kv head that fill `programs` places best: a whole number of waves, or nearly."""
    waves = range(1, _MOST_WAVES + 1)
    fill = {w: (w * programs // num_kv_heads) * num_kv_heads / (w * programs) for w in waves}
    best = next((w for w in waves if fill[w] >= 0.95), max(waves, key=lambda w: fill[w]))
    return max(1, best * programs // num_kv_heads)


def unit_rows(kernel: str, tokens: int, sequences: int, q_len: int | None, group: int, head_dim: int, invariant: bool) -> int:
    """Rows of a unit: those of a sequence, up to what a program holds."""
    queries = 1 if invariant else q_len or -(-tokens // max(1, sequences))
    return packed_rows(kernel, group * queries, head_dim, sequences)


def partition_of(
    sequences: int,
    tokens: int,
    q_len: int | None,
    group: int,
    num_kv_heads: int,
    block_m: int,
    max_keys: int,
    invariant: bool,
    programs: int,
    residents: int,
    short_pieces: bool,
) -> Partition:
    """Return the sizes of the partition of a call; a pure function of facts that the host knows.

    Args:
        sequences: B.
        tokens: T.
        q_len: tokens of every sequence, None if they vary.
        group: query heads of a kv head.
        num_kv_heads: Hkv.
        block_m: rows of a unit.
        max_keys: most keys of a sequence.
        invariant: batch-invariant call.
        programs: programs that fill the device.
        residents: programs that a multiprocessor holds at once; 1 if little work takes them all as well.
        short_pieces: whether much work may end in short pieces.
    """
    token_rows = -(-group // block_m) * block_m if invariant else group
    units = tokens * token_rows // block_m + sequences + 1 if q_len is None else sequences * -(-q_len * token_rows // block_m)
    step = INVARIANT_CHUNK if invariant else STEP
    most = -(-max(1, max_keys) // step) * units
    fill = _pieces(programs, num_kv_heads)
    few = fill if residents == 1 else max(1, -(-programs // residents // num_kv_heads))
    # As the planner cuts the most steps that there can be: programs without work would take places of others.
    wide = -(-most // few)
    share = max(1, -(-most // fill), wide if wide <= int(_FEW_STEPS) else 0)
    long = max(1, min(fill, -(-most // share)))
    pieces = long * 2 if short_pieces and not invariant and most >= int(_SHORT_FROM) * long else long
    cut = pieces > 1 and max_keys > step  # a unit of one step cannot be cut
    slots = 0 if not cut else pieces * _CHUNKS_PER_PIECE if invariant else 2 * pieces
    return Partition(block_m, token_rows, pieces, long, few, slots, step, invariant)


@triton.jit
def work_of(
    sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys,
    TOKEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Row tiles of `sequence` (a scalar or a block) and the steps of each; a unit without keys takes one step."""
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
    first = keys * 0
    if window is not None:
        first = tl.minimum(tl.maximum(keys - queries - window + 1, 0), keys)
    return tl.cdiv(queries * TOKEN_ROWS, BLOCK_M), tl.maximum(tl.cdiv(keys, STEP) - first // STEP, 1)


@triton.jit
def locate(
    piece, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, pieces, long, few, slots,
    TOKEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    """Where `piece` begins: the first three words of the plan's header, then (sequence, row tile, step, steps left).

    In a batch-invariant call with more chunks than slots a piece takes the units that begin in it, each whole.
    """
    blocks = sequences
    if cu_ptr is not None:
        blocks += 1
    total = tl.zeros((), tl.int64)
    longest = 1
    for begin in range(0, blocks, _BLOCK):
        row_tiles, steps = work_of(
            begin + tl.arange(0, _BLOCK), seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M, STEP
        )
        total += tl.sum(row_tiles.to(tl.int64) * steps)
        longest = tl.maximum(longest, tl.max(tl.where(row_tiles > 0, steps, 1)))
    share = tl.maximum((total + long - 1) // long, 1)
    short = share
    if not INVARIANT:
        wide = (total + few - 1) // few
        share = tl.where(wide <= _FEW_STEPS, tl.maximum(share, wide), share)
        if (pieces > long) & (share >= _SHORT_FROM):
            share = share - share // 8
            short = tl.maximum((total - long * share + (pieces - long) - 1) // (pieces - long), 1)
        else:
            # Equal units are cut evenly, or not at all, if that makes a piece a sixteenth longer at most, or by a step where a
            # multiprocessor has one program: a piece over two units takes longer than that.
            spare = tl.maximum(share // 16, tl.where((wide <= _FEW_STEPS) & (share >= 4), 1, 0))
            even = tl.where(longest > share, tl.cdiv(longest, tl.maximum(longest // share, 1)), tl.cdiv(share, longest) * longest)
            share = tl.where(even <= share + spare, even, share)
            short = share
    position = tl.minimum(piece, long) * share + tl.maximum(piece - long, 0) * short
    length = tl.where(piece < long, share, short)
    found = 0
    before = tl.zeros((), tl.int64)
    passed = tl.zeros((), tl.int64)
    for begin in range(0, blocks, _BLOCK):
        row_tiles, steps = work_of(
            begin + tl.arange(0, _BLOCK), seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M, STEP
        )
        own = row_tiles.to(tl.int64) * steps
        end = passed + tl.cumsum(own, 0)
        behind = end <= position
        found += tl.sum(behind.to(tl.int32))
        before += tl.sum(tl.where(behind, own, 0))
        passed += tl.sum(own)
    found = tl.minimum(found, blocks)
    _, steps = work_of(found, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M, STEP)
    inside = position - before
    row_tile = inside // steps
    step = inside - row_tile * steps
    left = tl.minimum(length, tl.maximum(total - position, 0))
    if INVARIANT:  # noqa: SIM102 (the outer one is a constant)
        if (total > slots) & (step > 0):
            left = tl.maximum(left - (steps - step), 0)
            row_tile += 1
            step = step * 0
    return share.to(tl.int32), (share * long).to(tl.int32), short.to(tl.int32), found, row_tile.to(tl.int32), step.to(tl.int32), left.to(tl.int32)


@triton.jit(do_not_specialize=["sequences", "tokens", "q_len", "window", "max_keys", "pieces", "long", "few", "slots"])
def plan_kernel(
    plan_ptr, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, pieces, long, few, slots,
    TOKEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, INVARIANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i writes the record of piece i; program `pieces` writes the steps of the sequences."""
    pdl_begin(PDL)
    piece = tl.program_id(0)
    if piece < pieces:
        share, long_steps, short, sequence, row_tile, step, left = locate(
            piece, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, pieces, long, few, slots,
            TOKEN_ROWS, BLOCK_M, STEP, INVARIANT,
        )  # fmt: skip
        if piece == 0:
            tl.store(plan_ptr, share)
            tl.store(plan_ptr + 1, long_steps)
            tl.store(plan_ptr + 2, short)
            tl.store(plan_ptr + 3, long)
        record = plan_ptr + HEADER + piece * RECORD
        tl.store(record, sequence)
        tl.store(record + 1, row_tile)
        tl.store(record + 2, step)
        tl.store(record + 3, left)
    else:
        for begin in range(0, sequences + 1, _BLOCK):
            sequence = begin + tl.arange(0, _BLOCK)
            _, steps = work_of(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M, STEP)
            tl.store(plan_ptr + HEADER + pieces * RECORD + sequence, steps, mask=sequence <= sequences)


def write_plan(
    buffer: Tensor,
    partition: Partition,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    tokens: int,
    q_len: int,
    window: int | None,
    max_keys: int,
    *,
    pdl: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """Launch the planner into `buffer`, int32 of `partition.words`; the current device is the buffer's.

    Returns the compiled kernel and its arguments.
    """
    arguments = (
        buffer, seq_lens, cu_seqlens_q, seq_lens.shape[0], tokens, q_len, window, max_keys,
        partition.pieces, partition.long, partition.few, partition.slots,
        partition.token_rows, partition.block_m, partition.step, partition.invariant, pdl,
    )  # fmt: skip
    grid = (partition.pieces + 1,)
    return plan_kernel[grid](*arguments, num_warps=4, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl)), arguments


#: (name, variable blocks, window, batch-invariant) of the variants that are compiled ahead of time.
_VARIANTS = (("uniform", False, False, False), ("window", False, True, False), ("variable", True, True, False), ("invariant", True, True, True))


def compile_cases() -> list[CompileCase]:
    """With and without a window, balanced and batch-invariant."""
    integers = dict.fromkeys(("sequences", "tokens", "q_len", "max_keys", "pieces", "long", "few", "slots"), "i32")
    cases = []
    for name, variable, window, invariant in _VARIANTS:
        types = {"plan_ptr": "*i32:16", "seq_lens_ptr": "*i32:16"} | integers
        constants: dict[str, object] = {"TOKEN_ROWS": 4, "BLOCK_M": 16, "INVARIANT": invariant}
        constants["STEP"] = INVARIANT_CHUNK if invariant else STEP
        for argument, kind, present in (("cu_ptr", "*i32:16", variable), ("window", "i32", window)):
            if present:
                types[argument] = kind
            else:
                constants[argument] = None
        for pdl, targets in ((True, ("sm_90",)), (False, ("sm_80", "gfx942"))):
            cases.append(CompileCase(f"plan/{name}", plan_kernel, types, constants | {"PDL": pdl}, warps=4, stages=1, targets=targets))
    return cases
