# mypy: allow-untyped-defs
"""Routing of any number of experts and any k, where no faster way will do: a program reads its row again for every expert that it chooses.

What was chosen is not remembered: keys are distinct integers of 64 bits, so that the next expert is the largest key
below the last one. Weights are written as they come and multiplied by their common factor at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.launch import pdl_begin
from hal.kernels.route_kernel import best_groups
from hal.kernels.route_keys import clean, key_of, lowest, pack, probability, share, unpack_id, unpack_key, usable, value_of

__all__ = ["route_large_kernel"]

_ALL = tl.constexpr(2**63 - 1)


@triton.jit
def _scores(x, bias, peak, total, SIGMOID: tl.constexpr):
    """Biased scores, -inf where the logit is."""
    score = probability(x, peak, SIGMOID)
    if not SIGMOID:
        score *= share(1.0, total)
    return tl.where(x == float("-inf"), float("-inf"), score + bias)


@triton.jit
def _group_key(row_ptr, bias_ptr, first, size, peak, total, SIGMOID: tl.constexpr, TOP2: tl.constexpr, BLOCK: tl.constexpr):
    """Key of the score of the group of `size` experts from `first` on."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    second = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        x, bias = usable(row_ptr, bias_ptr, first + offset, offset < size)
        if bias_ptr is not None or TOP2:
            x = _scores(x, bias, peak, total, SIGMOID)
        second = tl.maximum(second, tl.minimum(best, x))
        best = tl.maximum(best, x)
    score = tl.max(best, 0)
    if TOP2:
        place = tl.arange(0, BLOCK)
        at = tl.min(tl.where(best == score, place, BLOCK), 0)
        runner_up = tl.maximum(tl.max(tl.where(place == at, float("-inf"), best), 0), tl.max(second, 0))
        score += tl.where(size == 1, 0.0, runner_up)
    return key_of(clean(score))


@triton.jit(do_not_specialize=["tokens", "size", "top_k", "stride_l", "stride_w", "stride_i"])
def route_large_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, scale, tokens, size, top_k, stride_l, stride_w, stride_i,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, TOP2: tl.constexpr,
    GROUPS_PAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Route one token over GROUPS groups of `size` experts."""
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_l
    weights_ptr += row * stride_w
    ids_ptr += row * stride_i
    experts = GROUPS * size
    peak = 0.0
    total = 1.0
    if not SIGMOID:
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, experts, BLOCK):
            expert = start + tl.arange(0, BLOCK)
            x, _ = usable(row_ptr, bias_ptr, expert, expert < experts)
            highest = tl.maximum(highest, x)
        peak = tl.max(highest, 0)
        parts = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, experts, BLOCK):
            expert = start + tl.arange(0, BLOCK)
            x, _ = usable(row_ptr, bias_ptr, expert, expert < experts)
            parts += probability(x, peak, False)
        total = tl.sum(parts, 0)

    group = tl.arange(0, GROUPS_PAD)
    allowed = tl.full((GROUPS_PAD,), 1, tl.int32)
    if TOP_GROUPS < GROUPS:
        group_keys = tl.zeros((GROUPS_PAD,), tl.int32)
        for g in range(GROUPS):
            group_keys = tl.where(group == g, _group_key(row_ptr, bias_ptr, g * size, size, peak, total, SIGMOID, TOP2, BLOCK), group_keys)
        allowed = tl.reshape(best_groups(group_keys[None, :], GROUPS, TOP_GROUPS), (GROUPS_PAD,))

    last = tl.full((), _ALL, tl.int64)
    chosen_total = 0.0
    for j in range(top_k):
        best = tl.zeros((BLOCK,), tl.int64) + lowest(32)
        for g in range(GROUPS):
            if tl.max(tl.where(group == g, allowed, 0), 0) > 0:
                for start in range(0, size, BLOCK):
                    offset = start + tl.arange(0, BLOCK)
                    expert = g * size + offset
                    x, bias = usable(row_ptr, bias_ptr, expert, offset < size)
                    if bias_ptr is not None:
                        x = _scores(x, bias, peak, total, SIGMOID)
                    packed = pack(key_of(x), expert, 32)
                    best = tl.maximum(best, tl.where((offset < size) & (packed < last), packed, lowest(32)))
        last = tl.max(best, 0)
        at = unpack_id(last, 32)
        if bias_ptr is None:
            x = value_of(unpack_key(last, 32))
        else:
            x, _ = usable(row_ptr, bias_ptr, at, True)
        weight = probability(x, peak, SIGMOID)
        chosen_total += weight
        tl.store(weights_ptr + j, weight)
        tl.store(ids_ptr + j, at)

    factor = scale
    if RENORMALIZE:
        factor = share(scale, chosen_total)
    elif not SIGMOID:
        factor = share(scale, total)
    tl.debug_barrier()
    for start in range(0, top_k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        weight = tl.load(weights_ptr + column, mask=column < top_k)
        tl.store(weights_ptr + column, weight * factor, mask=column < top_k)
