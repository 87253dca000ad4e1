# mypy: allow-untyped-defs
"""Routing of experts whose keys fit into registers: up to `MOST_EXPERTS` one warp takes whole rows, and chooses expert after expert.

weights, ids = the top k of softmax(logits) or sigmoid(logits), see `hal.ops`. The warp never meets another one, so that
nothing waits at a barrier. Its tile is (rows, experts), each row across all lanes, those of few experts across few. How
many neighbouring experts a lane holds is chosen through what the compiler is told of the row stride, a multiple of VEC.

Without a bias the order of scores is the order of logits, so that the search runs on the loaded bits and only winners
are exponentiated, beside the whole row where softmax is not renormalised. Winners are summed one after the other: a
row's bits depend neither on its neighbours nor on how many rows a program takes.

Where k is large a search for each winner takes longer than sorting: a few warps then take a row of up to `MOST_SORTED`
experts and sort its packed keys, which are distinct, so that any sort is a stable one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.launch import pdl_release, pdl_wait
from hal.kernels.route_keys import LOWEST, best_of, clean, key_of, lowest, pack, probability, share, unpack_id, unpack_key, usable, value_of

__all__ = ["MOST_CHOSEN", "MOST_EXPERTS", "MOST_SORTED", "best_groups", "route_kernel"]

#: Experts whose keys the registers of one warp hold, padded.
MOST_EXPERTS = 1024
#: k up to which the registers hold a row's results.
MOST_CHOSEN = 256
#: Experts whose keys the registers of several warps hold, padded.
MOST_SORTED = 4096


@triton.jit
def group_score_keys(score, SIZE: tl.constexpr, TOP2: tl.constexpr):
    """Keys (rows, groups) of the groups' scores from scores (rows, groups, experts) that are -inf where there is none."""
    best = tl.max(score, 2)
    if TOP2 and SIZE > 1:
        place = tl.arange(0, score.shape[2])[None, None, :]
        first = tl.min(tl.where(score == best[:, :, None], place, score.shape[2]), 2)
        best += tl.max(tl.where(place == first[:, :, None], float("-inf"), score), 2)
    return key_of(clean(best))


@triton.jit
def best_groups(key, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Which of (rows, groups) are among the best, 1 or 0; `key` is theirs."""
    group = tl.arange(0, key.shape[1])[None, :]
    key = tl.where(group < GROUPS, key, LOWEST)
    chosen = tl.zeros(key.shape, tl.int32)
    for _ in range(TOP_GROUPS):
        best = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == best, group, key.shape[1]), 1)[:, None]
        chosen = tl.where(group == at, 1, chosen)
        key = tl.where(group == at, LOWEST, key)
    return chosen


@triton.jit(do_not_specialize=["tokens", "steps", "stride_w", "stride_i"])
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, scale, tokens, steps, stride_w, stride_i,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, TOP2: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, TOP_K_PAD: tl.constexpr, ROWS: tl.constexpr, VEC: tl.constexpr,
    ID_BITS: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr, SORTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Route ROWS tokens; `steps` is the row stride of the logits in units of VEC."""
    if EARLY:
        pdl_release(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = row < tokens
    SIZE: tl.constexpr = EXPERTS // GROUPS
    place = tl.arange(0, GROUPS_PAD * SIZE_PAD)[None, :]
    if SIZE == SIZE_PAD:
        expert = place
        real = place < EXPERTS
    else:
        expert = place // SIZE_PAD * SIZE + place % SIZE_PAD
        real = (place % SIZE_PAD < SIZE) & (place // SIZE_PAD < GROUPS)
    full: tl.constexpr = EXPERTS == GROUPS_PAD * SIZE_PAD
    wanted = row_ok[:, None] if full else row_ok[:, None] & real
    source = logits_ptr + (row * steps * VEC)[:, None] + expert

    pdl_wait(PDL)
    if not EARLY:
        pdl_release(PDL)
    x = clean(tl.load(source, mask=wanted, other=float("-inf")).to(tl.float32))
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + tl.zeros((ROWS, 1), tl.int32) + expert, mask=wanted, other=0.0)
        x = tl.where(bias == bias, x, float("-inf"))
    logit_key = key_of(x)
    peak = tl.zeros((ROWS,), tl.float32) if SIGMOID else value_of(tl.max(logit_key, 1))
    total = tl.zeros((ROWS,), tl.float32)
    if not SIGMOID and (not RENORMALIZE or bias_ptr is not None or TOP2):
        total = tl.sum(probability(x, peak[:, None], False), 1)

    key = logit_key
    score = x
    if bias_ptr is not None or TOP2:
        score = probability(x, peak[:, None], SIGMOID)
        if not SIGMOID:
            score *= share(1.0, total)[:, None]
        if bias_ptr is not None:
            score += bias
        score = tl.where(x == float("-inf"), float("-inf"), score)
        if bias_ptr is not None:
            key = key_of(score)
    packed = pack(key, expert, ID_BITS)
    allowed = real
    if TOP_GROUPS < GROUPS:
        by_group = tl.reshape(score, (ROWS, GROUPS_PAD, SIZE_PAD))
        chosen = best_groups(group_score_keys(by_group, SIZE, TOP2), GROUPS, TOP_GROUPS)
        spread = tl.broadcast_to(chosen[:, :, None], (ROWS, GROUPS_PAD, SIZE_PAD))
        allowed = real & (tl.reshape(spread, (ROWS, GROUPS_PAD * SIZE_PAD)) != 0)
    if TOP_GROUPS < GROUPS or not full:
        packed = tl.where(allowed, packed, lowest(ID_BITS))

    if SORTED:
        column = place
        packed = tl.sort(packed, 1, descending=True)
        ids = unpack_id(packed, ID_BITS)
        if bias_ptr is None:
            x = value_of(unpack_key(packed, ID_BITS))
        else:
            x, _ = usable((logits_ptr + row * steps * VEC)[:, None], bias_ptr, ids, row_ok[:, None] & (column < TOP_K))
        weights = tl.where(column < TOP_K, probability(x, peak[:, None], SIGMOID), 0.0)
        chosen_total = tl.sum(weights, 1)
    else:
        column = tl.arange(0, TOP_K_PAD)[None, :]
        weights = tl.zeros((ROWS, TOP_K_PAD), tl.float32)
        ids = tl.zeros((ROWS, TOP_K_PAD), tl.int32)
        chosen_total = tl.zeros((ROWS,), tl.float32)
        for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
            best, at, packed = best_of(packed, expert, ID_BITS)
            if bias_ptr is not None:
                best = tl.max(tl.where(expert == at[:, None], logit_key, LOWEST), 1)
            weight = probability(value_of(best), peak, SIGMOID)
            chosen_total += weight
            weights = tl.where(column == j, weight[:, None], weights)
            ids = tl.where(column == j, at[:, None], ids)
    factor = tl.zeros((ROWS,), tl.float32) + scale
    if RENORMALIZE:
        total = chosen_total
    if RENORMALIZE or not SIGMOID:
        factor = share(factor, total)
    kept = row_ok[:, None] & (column < TOP_K)
    tl.store(weights_ptr + row[:, None] * stride_w + column, weights * factor[:, None], mask=kept)
    tl.store(ids_ptr + row[:, None] * stride_i + column, ids, mask=kept)
