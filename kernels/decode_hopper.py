# mypy: allow-untyped-defs
# ruff: noqa: SIM108 (a conditional expression cannot choose between constants and values here)
"""Main kernel of `flash_decode` on NVIDIA Hopper, in Gluon: the same pieces, partials and mathematics as `decode_kernel`.

What it adds is that copying and computing are done by different warps. The producer walks through the tiles of 64 keys
of a piece, across the units in it, and keeps a ring of STAGES tiles in shared memory full with asynchronous 16-byte
copies; it loads page ids one tile ahead of the copies that they address. The consumer computes tile after tile and
gives each slot back. So the memory stays busy while results are written and the next unit is set up.

Scores and output are transposed, (keys, rows) and (head dim, rows): K and V^T are the wide operand of `wgmma` and come
straight from shared memory, and the rows of a group are its narrow side (16 at least).

Quantised caches are converted to fp16, which holds every fp8 and int8 value; a bf16 query is scaled by a power of two
into fp16's range, and the score takes the power back. Keys in e4m3 meet a bf16 query without that: the query is written
as a sum of two e4m3 terms, the second of which holds what the first leaves over (4 + 4 bits are what bf16 has), and
both are multiplied with the keys as they are. Values are always converted: their sum runs over the whole context, where
the short accumulator of fp8 products would show.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.kernels.decode_partition import HEADER, RECORD
from hal.kernels.numerics import LN2, LOG2E
from hal.kernels.tuning import STEP

__all__ = ["VARYING", "decode_hopper_kernel", "hopper_dims", "merge_shape"]

_HEADER = gl.constexpr(int(HEADER))
_RECORD = gl.constexpr(int(RECORD))
_LOG2E = gl.constexpr(LOG2E)
_LN2 = gl.constexpr(LN2)
#: Keys of a tile and of a step: the rows of one `wgmma`.
TILE = gl.constexpr(STEP)
# Renamed between Triton 3.6 and 3.9.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_start_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

#: Integers that change from call to call: no variant of the kernel may depend on their value.
VARYING = ["window", "tokens", "sequences", "q_len", "pages", "max_keys", "pieces", "slots", "num_kv_heads", "stride_bt"]


def hopper_dims(head_dim: int, head_dim_v: int, kv_bytes: int, *, v_in_k: bool) -> bool:
    """Whether the kernel serves these head dims: V^T needs 64 rows, and two stages must fit into shared memory.

    Args:
        head_dim: D.
        head_dim_v: Dv.
        kv_bytes: bytes of a K or V element.
        v_in_k: values are the leading elements of the keys.
    """
    return min(head_dim, head_dim_v) >= 64 and (max(head_dim, head_dim_v) <= 256 or (v_in_k and kv_bytes == 2))


def merge_shape(rows: int, head_dim_v: int, registers: int) -> tuple[int, int]:
    """(rows, partials at a time) of the merge inside the kernel; (0, 0) where the rows are too many for one program.

    Args:
        rows: of a unit that hold a query.
        head_dim_v: Dv.
        registers: of a thread, for the partials.
    """
    rows = 1 << (rows - 1).bit_length()
    size = max(rows, 4) * max(128, 1 << (head_dim_v - 1).bit_length())  # what 4 warps hold of one partial
    return (rows, registers * 128 // size) if size <= 4096 else (0, 0)


@gluon.jit
def _tanh(x):
    """Hyperbolic tangent that cannot overflow; see `numerics.apply_tanh`."""
    size = gl.abs(x)
    decay = gl.exp2(size * (-2.0 * _LOG2E))
    square = x * x
    small = size * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))))
    result = gl.where(size < 0.25, small, (1.0 - decay) / (1.0 + decay))
    return gl.where(x < 0.0, -result, result)


@gluon.jit
def _block(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, max_keys):
    """(first token, query tokens, keys) of a sequence; the one after the last holds the padding rows and sees no key."""
    if cu_ptr is None:
        row_start = sequence * q_len
        queries = q_len
    else:
        row_start = gl.minimum(gl.maximum(gl.load(cu_ptr + gl.minimum(sequence, sequences)), 0), tokens)
        row_end = gl.load(cu_ptr + gl.minimum(sequence + 1, sequences))
        if sequence >= sequences:
            row_end = tokens
        queries = gl.minimum(gl.maximum(row_end, row_start), tokens) - row_start
    keys = 0
    if sequence < sequences:
        keys = gl.minimum(gl.maximum(gl.load(seq_lens_ptr + sequence), 0), max_keys)
    return row_start, queries, keys


@gluon.jit
def _segment(
    sequence, row_tile, step, left, steps_ptr, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys,
    TOKEN_ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The part of a unit that belongs to the piece, from `step` on.

    Returns (sequence, first token, query tokens, keys, first key, end key, first tile, tiles, steps taken, steps of the
    unit, row tile and sequence after it). Sequences without rows are passed over.
    """
    row_start, queries, keys = _block(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, max_keys)
    if cu_ptr is not None:
        while (queries == 0) & (sequence < sequences):
            sequence += 1
            row_start, queries, keys = _block(sequence, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, max_keys)
    planned = gl.load(steps_ptr + sequence)
    block_start = keys - queries
    first = 0
    if window is not None:
        first = gl.minimum(gl.maximum(block_start - window + 1, 0), keys)
    steps = gl.maximum((keys + TILE - 1) // TILE - first // TILE, 1)
    stop = gl.minimum(planned, step + left)
    begin = step
    end = stop
    if planned != steps:  # the lengths have changed since the plan was made
        begin = (step.to(gl.int64) * steps // planned).to(gl.int32)
        end = (stop.to(gl.int64) * steps // planned).to(gl.int32)
    begin += first // TILE
    end += first // TILE
    # No row of this tile sees beyond its own last token.
    last = gl.minimum(gl.maximum(block_start + (row_tile * BLOCK_M + BLOCK_M - 1) // TOKEN_ROWS + 1, 0), keys)
    last = gl.minimum(last, end * TILE)
    more = (row_tile + 1) * BLOCK_M < queries * TOKEN_ROWS
    next_row_tile = gl.where(more, row_tile + 1, 0)
    next_sequence = gl.where(more, sequence, sequence + 1)
    return sequence, row_start, queries, keys, first, last, begin, gl.maximum(end - begin, 1), stop - step, planned, next_row_tile, next_sequence


@gluon.jit
def _table(tables_ptr, sequence, sequences, stride_bt, max_keys):
    """A sequence's row of the block table, and the keys that it has room for: none behind the last sequence."""
    return tables_ptr + sequence.to(gl.int64) * stride_bt, gl.where(sequence < sequences, max_keys, 0)


@gluon.jit
def _page_ids(table, tile, room, P: gl.constexpr, LAYOUT: gl.constexpr):
    """Page ids of the keys of a tile, as the table has them; -1 beyond its width."""
    key = tile * TILE + gl.arange(0, TILE, LAYOUT)
    if P % TILE == 0:
        page = gl.load(table + tile // (P // TILE), mask=tile * TILE < room, other=-1)
        return gl.where(key < room, page, -1)
    else:
        return gl.load(table + key.to(gl.uint32) // P, mask=key < room, other=-1)


@gluon.jit
def _readable(page, tile, first, last, pages, LAYOUT: gl.constexpr):
    """Which keys of a tile may be read: inside [first, last), on a page of the cache."""
    key = tile * TILE + gl.arange(0, TILE, LAYOUT)
    return (page.to(gl.uint32) < pages.to(gl.uint32)) & (key >= first) & (key < last)


@gluon.jit
def _times(page, stride):
    """64-bit product; one instruction for 32-bit factors, whatever the compiler has hoisted."""
    if stride.dtype == gl.int32:
        product = gl.inline_asm_elementwise("mul.wide.s32 $0, $1, $2;", "=l,r,r", [page, stride], dtype=gl.int64, is_pure=True, pack=1)
    else:
        product = page.to(gl.int64) * stride
    return gl.multiple_of(product, [16])


@gluon.jit
def _in_page(tile, stride, P: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the keys of a tile inside their pages; the same for every tile where pages divide tiles."""
    if TILE % P == 0:
        return (gl.arange(0, TILE, LAYOUT) % P).to(gl.int64) * stride
    elif P % TILE == 0:
        return gl.arange(0, TILE, LAYOUT).to(gl.int64) * stride + (tile % (P // TILE) * TILE).to(gl.int64) * stride
    else:
        return ((tile * TILE + gl.arange(0, TILE, LAYOUT)).to(gl.uint32) % P).to(gl.int64) * stride


@gluon.jit
def _copy(smem, slot, base, rows, ok, D: gl.constexpr, BEGIN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying elements [BEGIN, BEGIN + WIDTH) of the keys at `base + rows`; what is not there becomes zero."""
    column = BEGIN + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    mask = ok[:, None]
    if BEGIN + WIDTH > D:
        mask = mask & (column < D)[None, :]
    _start_copy(smem.index(slot), (base[:, None] + column[None, :]) + rows[:, None], mask=mask)


@gluon.jit
def _convert(source, target, LAYOUT: gl.constexpr):
    """A quantised tile in the operands' dtype."""
    target.store(source.load(LAYOUT).to(target.dtype))


@gluon.jit
def _store_rows(base, rows, row_ok, values, D: gl.constexpr, BEGIN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Write transposed `values` (WIDTH, rows) to columns from BEGIN on of the rows at `base + rows`.

    Straight from the accumulator's layout: 8 lanes hold 8 neighbouring columns, a whole sector in fp32.
    """
    column = BEGIN + gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT))
    mask = row_ok[None, :]
    if BEGIN + WIDTH > D:
        mask = mask & (column < D)[:, None]
    gl.store(base + rows[None, :] + column[:, None], values.to(base.dtype.element_ty), mask=mask)


@gluon.jit
def _queries(
    q_ptr, row_tile, row_start, queries, kv_head, stride_qt, stride_qh,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, G: gl.constexpr, TOKEN_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The query rows of a unit, (BLOCK_M, D0) and (BLOCK_M, D1); the first again without D1."""
    row = row_tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
    rows = (row_start + row // TOKEN_ROWS).to(gl.int64) * stride_qt + (kv_head * G + row % TOKEN_ROWS) * stride_qh
    column = gl.arange(0, D0, gl.SliceLayout(0, LAYOUT))
    q0 = gl.load(q_ptr + rows[:, None] + column[None, :], mask=row_ok[:, None], other=0.0)
    q1 = q0
    if D1 > 0:
        column = D0 + gl.arange(0, D1, gl.SliceLayout(0, LAYOUT))
        q1 = gl.load(q_ptr + rows[:, None] + column[None, :], mask=row_ok[:, None] & (column < D)[None, :], other=0.0)
    return q0, q1


@gluon.jit
def _gather(
    part_ptr, lses, first_slot, begin, count, every, num_kv_heads, kv_head,
    ROWS: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, BATCH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Merge `count` partials of a unit: parts begin, begin + every, ...; part 0 lies in `first_slot`, part i two slots a piece on.

    Returns the base-2 log-sum-exp (ROWS,) and the normalised output (ROWS, DV padded to a power of two). Read past L1,
    which may hold what these places held before.
    """
    WIDTH: gl.constexpr = 1 << (DV - 1).bit_length()
    PARTS: gl.constexpr = gl.BlockedLayout([BATCH, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    LSE: gl.constexpr = gl.SliceLayout(2, PARTS)
    ROW: gl.constexpr = gl.SliceLayout(0, LSE)
    OUT: gl.constexpr = gl.SliceLayout(0, PARTS)
    row = gl.arange(0, ROWS, ROW)
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, OUT)), 0), 0)
    peak = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
    for at in range(0, count, BATCH):
        index = at + gl.arange(0, BATCH, gl.SliceLayout(1, LSE))
        part = begin + index * every
        place = (first_slot + 2 * part - gl.where(part > 0, 1, 0)).to(gl.int64) * num_kv_heads + kv_head
        places = place[:, None] * BLOCK_M + row[None, :]
        ok = (index < count)[:, None] & (row >= 0)[None, :]
        part_lse = gl.load(lses + places, mask=ok, other=float("-inf"), cache_modifier=".cg")
        values = gl.load(
            part_ptr + (gl.expand_dims(places * DV, 2) + column), mask=gl.expand_dims(ok, 2) & (column < DV), other=0.0, cache_modifier=".cg"
        )
        new_peak = gl.maximum(peak, gl.max(part_lse, 0))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        old = gl.exp2(peak - base)
        weight = gl.exp2(part_lse - base[None, :])
        total = total * old + gl.sum(weight, 0)
        acc = acc * gl.expand_dims(gl.convert_layout(old, gl.SliceLayout(1, OUT)), 1) + gl.sum(values * gl.expand_dims(weight, 2), 0)
        peak = new_peak
    divisor = gl.where(total == 0.0, 1.0, total)
    lse = gl.convert_layout(gl.where(total == 0.0, float("-inf"), peak + gl.log2(divisor)), gl.SliceLayout(1, OUT))
    return lse, acc / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(1, OUT)), 1)


@gluon.jit
def _with_sinks(lse, sinks_ptr, head, row_ok):
    """Factor of a normalised output and natural log-sum-exp, with the sinks; a row that saw no key stays empty."""
    factor = gl.full(lse.shape, 1.0, gl.float32, lse.type.layout)
    result = lse * _LN2
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")) * _LOG2E
        is_empty = lse == float("-inf")
        top = gl.where(is_empty, 0.0, gl.maximum(lse, sink))
        own = gl.exp2(lse - top)
        both = own + gl.exp2(gl.where(is_empty, 0.0, sink) - top)
        factor = gl.where(is_empty, 0.0, own / both)
        result = gl.where(is_empty, float("-inf"), (top + gl.log2(both)) * _LN2)
    return factor, result


@gluon.jit
def _piece_at(place, share, long_steps, short, long):
    """The piece that holds a place in the list of steps."""
    piece = place
    if place < long_steps:
        piece = place // share
    else:
        piece = long + (place - long_steps) // short
    return piece


@gluon.jit
def _merge(
    out_ptr, lse_ptr, part_ptr, lses, counter_ptr, sinks_ptr, value_scale,
    first_piece, parts, piece, pieces, kv_head, num_kv_heads, row_tile, row_start, queries, stride_ot, stride_oh, stride_lt,
    DV: gl.constexpr, G: gl.constexpr, TOKEN_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, BATCH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Count this piece's partial of a cut unit as written; whoever writes the last one merges them all.

    In groups of neighbouring partials, then the groups, so that a unit of hundreds is not merged by one program
    alone. Whoever completes a count puts it back to zero. The order of arithmetic does not depend on who that is.
    """
    GROUP: gl.constexpr = 2 * BATCH
    WIDTH: gl.constexpr = 1 << (DV - 1).bit_length()
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([BATCH, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0]))
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    groups = (parts + GROUP - 1) // GROUP
    group_first = (piece - first_piece) // GROUP * GROUP
    group_count = gl.minimum(GROUP, parts - group_first)
    first_slot = 2 * first_piece + 1
    group_slot = first_slot + 2 * group_first - gl.where(group_first > 0, 1, 0)
    group_counter = counter_ptr + group_slot * num_kv_heads + kv_head
    _barrier()
    if gl.atomic_add(group_counter, 1, sem="acq_rel", scope="gpu") == group_count - 1:
        gl.store(group_counter, 0)
        lse, out = _gather(part_ptr, lses, first_slot, group_first, group_count, 1, num_kv_heads, kv_head, ROWS, DV, BLOCK_M, BATCH, WARPS)
        complete = groups == 1
        row = gl.arange(0, ROWS, ROW)
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
        if groups > 1:
            part = group_slot.to(gl.int64) * num_kv_heads + kv_head
            offsets = (row * DV)[:, None] + column[None, :]
            gl.store(part_ptr + part * (BLOCK_M * DV) + offsets, out, mask=(column < DV)[None, :] & (row >= 0)[:, None])
            gl.store(lses + part * BLOCK_M + row, lse)
            counter = counter_ptr + (2 * pieces + first_piece) * num_kv_heads + kv_head
            _barrier()
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == groups - 1:
                gl.store(counter, 0)
                lse, out = _gather(part_ptr, lses, first_slot, 0, groups, GROUP, num_kv_heads, kv_head, ROWS, DV, BLOCK_M, BATCH, WARPS)
                complete = groups > 1
        if complete:
            row += row_tile * BLOCK_M
            row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
            token = (row_start + row // TOKEN_ROWS).to(gl.int64)
            head = kv_head * G + row % TOKEN_ROWS
            factor, result = _with_sinks(lse, sinks_ptr, head, row_ok)
            if lse_ptr is not None:
                gl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)
            out = out * (factor * value_scale)[:, None]
            places = (token * stride_ot + head * stride_oh)[:, None] + column[None, :]
            gl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (column < DV)[None, :])


@gluon.constexpr_function
def _copy_layout(width, element_bytes, warps):
    """16 bytes a thread, whole rows of `width` elements side by side."""
    vector = 16 // element_bytes
    threads = min(32, width // vector)
    return gl.BlockedLayout([1, vector], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.constexpr_function
def _operand_layout(width):
    """Shared memory as `wgmma` reads it, `width` 16-bit elements a row."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, 2)


@gluon.constexpr_function
def _staging_layout(width, element_bytes):
    """Shared memory that copies write: the operands' where no conversion follows."""
    return _operand_layout(width) if element_bytes == 2 else gl.SwizzledSharedLayout(16, 1, 8, [1, 0])


@gluon.constexpr_function
def _key_layout(width, element_bytes, whole):
    """Shared memory for keys; `whole`: 8-bit keys that are an operand as they are."""
    return gl.NVMMASharedLayout(min(128, width), 8, 2) if whole else _staging_layout(width, element_bytes)


@gluon.jit
def _store_terms(values, target, ROWS: gl.constexpr):
    """Write `values` (ROWS, width) as a sum of two terms in the dtype of `target` (2 * ROWS, width)."""
    first = values.to(target.dtype)
    target.slice(0, ROWS).store(first)
    target.slice(ROWS, ROWS).store((values - first.to(gl.float32)).to(target.dtype))


@gluon.jit
def _produce(
    k_base, v_base, tables_ptr, seq_lens_ptr, cu_ptr, steps_ptr, sequence, row_tile, step, left,
    window, tokens, sequences, q_len, pages, max_keys, stride_kp, stride_kt, stride_vp, stride_vt, stride_bt,
    k0_ring, k1_ring, v0_ring, v1_ring, full, empty,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, DV0: gl.constexpr, DV1: gl.constexpr,
    TOKEN_ROWS: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_IN_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of the piece into the ring."""
    COPY: gl.constexpr = _copy_layout(D0, k_base.dtype.element_ty.primitive_bitwidth // 8, WARPS)
    KEY: gl.constexpr = gl.SliceLayout(1, COPY)
    slot = 0
    phase = 1
    # Where the piece most likely begins: these ids are on their way while the lengths are looked up.
    guess = step
    table, room = _table(tables_ptr, sequence, sequences, stride_bt, max_keys)
    next_page = _page_ids(table, guess, room, P, KEY)
    while left > 0:
        sequence, _, _, _, first, last, tile, tiles, taken, _, row_tile, next_sequence = _segment(
            sequence, row_tile, step, left, steps_ptr, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M
        )
        table, room = _table(tables_ptr, sequence, sequences, stride_bt, max_keys)
        if tile != guess:
            next_page = _page_ids(table, tile, room, P, KEY)
        guess = -1
        for at in range(tile, tile + tiles):
            page = next_page
            next_page = _page_ids(table, at + 1, room, P, KEY)
            ok = _readable(page, at, first, last, pages, KEY)
            k_keys = k_base + _in_page(at, stride_kt, P, KEY)
            k_rows = _times(page, stride_kp)
            mbarrier.wait(empty.index(slot), phase)
            _copy(k0_ring, slot, k_keys, k_rows, ok, D, 0, D0, COPY)
            if D1 > 0:
                _copy(k1_ring, slot, k_keys, k_rows, ok, D, D0, D1, COPY)
            if not V_IN_K:
                v_keys = v_base + _in_page(at, stride_vt, P, KEY)
                v_rows = _times(page, stride_vp)
                _copy(v0_ring, slot, v_keys, v_rows, ok, DV, 0, DV0, COPY)
                if DV1 > 0:
                    _copy(v1_ring, slot, v_keys, v_rows, ok, DV, DV0, DV1, COPY)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
        left -= taken
        sequence = next_sequence
        step = step * 0


@gluon.jit
def _consume(
    q_ptr, out_ptr, lse_ptr, part_ptr, counter_ptr, tables_ptr, seq_lens_ptr, cu_ptr, slopes_ptr, sinks_ptr, steps_ptr,
    sequence, row_tile, step, left, share, long_steps, short, long, piece, pieces, kv_head, score_scale, value_scale, softcap, window,
    tokens, sequences, q_len, pages, max_keys, slots, num_kv_heads, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_bt,
    k0_ring, k1_ring, v0_ring, v1_ring, k0_wide, k1_wide, v0_wide, v1_wide, q0_smem, q1_smem, p_smem, full, empty,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, DV0: gl.constexpr, DV1: gl.constexpr,
    G: gl.constexpr, TOKEN_ROWS: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_IN_K: gl.constexpr,
    MERGE_ROWS: gl.constexpr, MERGE_BATCH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles of the piece as they arrive; write results and partials."""
    KV: gl.constexpr = k0_ring.dtype
    CONVERT: gl.constexpr = KV.primitive_bitwidth == 8
    DOT: gl.constexpr = p_smem.dtype
    RESCALE: gl.constexpr = CONVERT and q_ptr.dtype.element_ty == gl.bfloat16
    WHOLE: gl.constexpr = q0_smem.dtype == gl.float8e4nv
    # 8 elements a thread also where they have 8 bits: the wide stores then meet no bank twice.
    WIDEN: gl.constexpr = _copy_layout(D0, 2, WARPS)
    QUERY: gl.constexpr = _copy_layout(D0, 2, WARPS)
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    TERMS: gl.constexpr = 2 if WHOLE else 1
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TERMS * BLOCK_M, 16 * TERMS])
    KEY: gl.constexpr = gl.SliceLayout(1, SCORE)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORE)
    slot = 0
    phase = 0
    begin = gl.minimum(piece, long) * share + gl.maximum(piece - long, 0) * short  # place of the segment in the list of steps
    while left > 0:
        sequence, row_start, queries, keys, first, last, tile, tiles, taken, planned, next_row_tile, next_sequence = _segment(
            sequence, row_tile, step, left, steps_ptr, seq_lens_ptr, cu_ptr, sequences, tokens, q_len, window, max_keys, TOKEN_ROWS, BLOCK_M
        )
        whole = taken == planned
        first_piece = piece
        parts = 1
        if not whole:
            first_piece = _piece_at(begin - step, share, long_steps, short, long)
            parts = _piece_at(begin - step + planned - 1, share, long_steps, short, long) - first_piece + 1
        table, room = _table(tables_ptr, sequence, sequences, stride_bt, max_keys)
        next_page = _page_ids(table, tile, room, P, KEY)
        q0, q1 = _queries(q_ptr, row_tile, row_start, queries, kv_head, stride_qt, stride_qh, D, D0, D1, G, TOKEN_ROWS, BLOCK_M, QUERY)
        row_scale = gl.full([BLOCK_M], 1.0, gl.float32, ROW)
        if RESCALE:
            # Power of two of the largest element of each row: inf for a row that holds one, so that its scores are NaN.
            size = gl.max(gl.abs(q0.to(gl.float32)), 1)
            if D1 > 0:
                size = gl.maximum(size, gl.max(gl.abs(q1.to(gl.float32)), 1))
            power = (size.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
            power = gl.where(power > 1e-30, power, 1.0)
            if WHOLE:
                power = power * 0.0078125  # 2 ** -7: e4m3 reaches 448
                _store_terms(q0.to(gl.float32) / power[:, None], q0_smem, BLOCK_M)
                if D1 > 0:
                    _store_terms(q1.to(gl.float32) / power[:, None], q1_smem, BLOCK_M)
            else:
                q0_smem.store((q0.to(gl.float32) / power[:, None]).to(DOT))
                if D1 > 0:
                    q1_smem.store((q1.to(gl.float32) / power[:, None]).to(DOT))
            row_scale = gl.convert_layout(power, ROW)
        else:
            q0_smem.store(q0.to(DOT))
            if D1 > 0:
                q1_smem.store(q1.to(DOT))
        fence_async_shared()
        _barrier()
        row = row_tile * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
        row_ok = (row < queries * TOKEN_ROWS) & (row % TOKEN_ROWS < G)
        token = (row_start + row // TOKEN_ROWS).to(gl.int64)
        head = kv_head * G + row % TOKEN_ROWS
        position = gl.where(row_ok, keys - queries + row // TOKEN_ROWS, -1)
        slope = gl.full([BLOCK_M], 0.0, gl.float32, ROW)
        if slopes_ptr is not None:
            slope = gl.load(slopes_ptr + head, mask=row_ok, other=0.0) * _LOG2E
        peak = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
        total = gl.zeros([TILE, BLOCK_M], gl.float32, SCORE)
        acc0 = gl.zeros([DV0, BLOCK_M], gl.float32, SCORE)
        acc1 = gl.zeros([DV1 if DV1 > 0 else 64, BLOCK_M], gl.float32, SCORE)

        for at in range(tile, tile + tiles):
            page = next_page
            next_page = _page_ids(table, at + 1, room, P, KEY)
            key = at * TILE + gl.arange(0, TILE, KEY)
            visible = _readable(page, at, first, last, pages, KEY)[:, None] & (key[:, None] <= position[None, :])
            if window is not None:
                visible = visible & (position[None, :] - key[:, None] < window)
            mbarrier.wait(full.index(slot), phase)
            if CONVERT and not WHOLE:
                _convert(k0_ring.index(slot), k0_wide, WIDEN)
                if D1 > 0:
                    _convert(k1_ring.index(slot), k1_wide, WIDEN)
                fence_async_shared()
                _barrier()
            else:
                fence_async_shared()
            k0 = k0_wide if CONVERT and not WHOLE else k0_ring.index(slot)
            zero = gl.zeros([TILE, TERMS * BLOCK_M], gl.float32, PRODUCT)
            scores = warpgroup_mma(k0, q0_smem.permute([1, 0]), zero, use_acc=False, is_async=True)
            if D1 > 0:
                k1 = k1_wide if CONVERT and not WHOLE else k1_ring.index(slot)
                scores = warpgroup_mma(k1, q1_smem.permute([1, 0]), scores, is_async=True)
            if CONVERT:  # while the scores are computed
                if not V_IN_K:
                    _convert(v0_ring.index(slot), v0_wide, WIDEN)
                    if DV1 > 0:
                        _convert(v1_ring.index(slot), v1_wide, WIDEN)
                elif WHOLE:
                    _convert(k0_ring.index(slot), k0_wide, WIDEN)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if WHOLE:  # both terms of a row are in one thread
                scores = gl.convert_layout(gl.sum(gl.reshape(scores, [TILE, TERMS, BLOCK_M]), 1), SCORE)
            if RESCALE:
                scores = scores * row_scale[None, :]
            if softcap is not None:
                scores = softcap * _tanh(scores * score_scale / softcap) * _LOG2E
            else:
                scores = scores * (score_scale * _LOG2E)
            if slopes_ptr is not None:
                scores -= slope[None, :] * (position[None, :] - key[:, None]).to(gl.float32)
            scores = gl.where(visible, scores, float("-inf"))
            new_peak = gl.maximum(peak, gl.max(scores, 0))
            base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = gl.exp2(scores - base[None, :])
            alpha = gl.exp2(peak - base)
            total = total * alpha[None, :] + p
            peak = new_peak
            p_smem.store(p.to(DOT))
            fence_async_shared()
            _barrier()
            if CONVERT:
                mbarrier.arrive(empty.index(slot), count=1)
            acc0 = acc0 * alpha[None, :]
            v0 = (k0_wide if V_IN_K else v0_wide) if CONVERT else (k0_ring.index(slot) if V_IN_K else v0_ring.index(slot))
            acc0 = warpgroup_mma(v0.permute([1, 0]), p_smem, acc0, is_async=True)
            if DV1 > 0:
                acc1 = acc1 * alpha[None, :]
                v1 = v1_wide if CONVERT else v1_ring.index(slot)
                acc1 = warpgroup_mma(v1.permute([1, 0]), p_smem, acc1, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            if not CONVERT:
                _barrier()
                mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1

        amount = gl.sum(total, 0)
        divisor = gl.where(amount == 0.0, 1.0, amount)
        lse = gl.where(amount == 0.0, float("-inf"), peak + gl.log2(divisor))
        lses = part_ptr + slots.to(gl.int64) * num_kv_heads * (BLOCK_M * DV)
        if whole:
            factor, result = _with_sinks(lse, sinks_ptr, head, row_ok)
            if lse_ptr is not None:
                gl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)
            factor = factor * value_scale / divisor
            rows = token * stride_ot + head * stride_oh
            _store_rows(out_ptr, rows, row_ok, acc0 * factor[None, :], DV, 0, DV0, SCORE)
            if DV1 > 0:
                _store_rows(out_ptr, rows, row_ok, acc1 * factor[None, :], DV, DV0, DV1, SCORE)
        else:
            factor = 1.0 / divisor
            place = 2 * piece + (step == 0).to(gl.int32)
            part = place.to(gl.int64) * num_kv_heads + kv_head
            part_row = gl.arange(0, BLOCK_M, ROW)
            rows = (part_row * DV).to(gl.int64)
            outs = part_ptr + part * (BLOCK_M * DV)
            _store_rows(outs, rows, row_ok, acc0 * factor[None, :], DV, 0, DV0, SCORE)
            if DV1 > 0:
                _store_rows(outs, rows, row_ok, acc1 * factor[None, :], DV, DV0, DV1, SCORE)
            gl.store(lses + part * BLOCK_M + part_row, lse, mask=row_ok)
            if MERGE_ROWS > 0:
                _merge(
                    out_ptr, lse_ptr, part_ptr, lses, counter_ptr, sinks_ptr, value_scale,
                    first_piece, parts, piece, pieces, kv_head, num_kv_heads, row_tile, row_start, queries, stride_ot, stride_oh, stride_lt,
                    DV, G, TOKEN_ROWS, BLOCK_M, MERGE_ROWS, MERGE_BATCH, WARPS,
                )  # fmt: skip
        begin += taken
        left -= taken
        sequence = next_sequence
        row_tile = next_row_tile
        step = step * 0


@gluon.jit(do_not_specialize=VARYING)
def decode_hopper_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, counter_ptr, plan_ptr, seq_lens_ptr, tables_ptr, cu_ptr,
    slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    score_scale, value_scale, softcap, window,
    tokens, sequences, q_len, pages, max_keys, pieces, slots, num_kv_heads,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_lt, stride_bt, stride_ksh, stride_vsh,
    D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, DV0: gl.constexpr, DV1: gl.constexpr,
    G: gl.constexpr, TOKEN_ROWS: gl.constexpr, P: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_IN_K: gl.constexpr,
    MERGE_ROWS: gl.constexpr, MERGE_BATCH: gl.constexpr, COPY_WARPS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Program i serves piece `i // Hkv` and kv head `i % Hkv`: the heads of a page are read at about the same time."""
    KV: gl.constexpr = k_ptr.dtype.element_ty
    KV_BYTES: gl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    DOT: gl.constexpr = gl.float16 if KV_BYTES == 1 else q_ptr.dtype.element_ty
    WHOLE: gl.constexpr = k_ptr.dtype.element_ty == gl.float8e4nv and q_ptr.dtype.element_ty == gl.bfloat16
    QUERY: gl.constexpr = gl.float8e4nv if WHOLE else DOT
    TERMS: gl.constexpr = 2 if WHOLE else 1
    k0_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, D0], _key_layout(D0, KV_BYTES, WHOLE))
    q0_smem = gl.allocate_shared_memory(QUERY, [TERMS * BLOCK_M, D0], _key_layout(D0, KV_BYTES, WHOLE) if WHOLE else _operand_layout(D0))
    p_smem = gl.allocate_shared_memory(DOT, [TILE, BLOCK_M], _operand_layout(BLOCK_M))
    k1_ring = k0_ring
    q1_smem = q0_smem
    if D1 > 0:
        k1_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, D1], _key_layout(D1, KV_BYTES, WHOLE))
        q1_smem = gl.allocate_shared_memory(QUERY, [TERMS * BLOCK_M, D1], _key_layout(D1, KV_BYTES, WHOLE) if WHOLE else _operand_layout(D1))
    v0_ring = k0_ring
    v1_ring = k0_ring
    if not V_IN_K:
        v0_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, DV0], _staging_layout(DV0, KV_BYTES))
        if DV1 > 0:
            v1_ring = gl.allocate_shared_memory(KV, [STAGES, TILE, DV1], _staging_layout(DV1, KV_BYTES))
    k0_wide = k0_ring
    k1_wide = k0_ring
    v0_wide = k0_ring
    v1_wide = k0_ring
    if KV_BYTES == 1:
        if V_IN_K or not WHOLE:
            k0_wide = gl.allocate_shared_memory(DOT, [TILE, D0], _operand_layout(D0))
        if D1 > 0 and not WHOLE:
            k1_wide = gl.allocate_shared_memory(DOT, [TILE, D1], _operand_layout(D1))
        if not V_IN_K:
            v0_wide = gl.allocate_shared_memory(DOT, [TILE, DV0], _operand_layout(DV0))
            if DV1 > 0:
                v1_wide = gl.allocate_shared_memory(DOT, [TILE, DV1], _operand_layout(DV1))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * COPY_WARPS)
        mbarrier.init(empty.index(i), count=1)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    piece = gl.program_id(0) // num_kv_heads
    kv_head = (gl.program_id(0) % num_kv_heads).to(gl.int64)
    share = gl.load(plan_ptr)
    long_steps = gl.load(plan_ptr + 1)
    short = gl.load(plan_ptr + 2)
    long = gl.load(plan_ptr + 3)
    record = plan_ptr + _HEADER + piece * _RECORD
    sequence = gl.load(record)
    row_tile = gl.load(record + 1)
    step = gl.load(record + 2)
    left = gl.load(record + 3)
    steps_ptr = plan_ptr + _HEADER + pieces * _RECORD
    if k_scale_ptr is not None:
        score_scale *= gl.load(k_scale_ptr + kv_head * stride_ksh)
    if v_scale_ptr is not None:
        value_scale *= gl.load(v_scale_ptr + kv_head * stride_vsh)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ptr, out_ptr, lse_ptr, part_ptr, counter_ptr, tables_ptr, seq_lens_ptr, cu_ptr, slopes_ptr, sinks_ptr, steps_ptr,
                    sequence, row_tile, step, left, share, long_steps, short, long, piece, pieces, kv_head, score_scale, value_scale, softcap, window,
                    tokens, sequences, q_len, pages, max_keys, slots, num_kv_heads, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_bt,
                    k0_ring, k1_ring, v0_ring, v1_ring, k0_wide, k1_wide, v0_wide, v1_wide, q0_smem, q1_smem, p_smem, full, empty,
                    D, D0, D1, DV, DV0, DV1, G, TOKEN_ROWS, P, BLOCK_M, STAGES, V_IN_K, MERGE_ROWS, MERGE_BATCH, num_warps,
                ),
            ),
            (
                _produce,
                (
                    k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, tables_ptr, seq_lens_ptr, cu_ptr, steps_ptr,
                    sequence, row_tile, step, left,
                    window, tokens, sequences, q_len, pages, max_keys, stride_kp, stride_kt, stride_vp, stride_vt, stride_bt,
                    k0_ring, k1_ring, v0_ring, v1_ring, full, empty,
                    D, D0, D1, DV, DV0, DV1, TOKEN_ROWS, P, BLOCK_M, STAGES, V_IN_K, COPY_WARPS,
                ),
            ),
        ],
        [COPY_WARPS],
        [COPY_REGISTERS],
    )  # fmt: skip
