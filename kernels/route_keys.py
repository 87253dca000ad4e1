# mypy: allow-untyped-defs
"""Scores as integers that sort like them, and the search for the best one: what both routing kernels are made of.

A key is the fp32 bit pattern with the sign turned into order, so that one warp-wide integer maximum finds the best
expert (one instruction on NVIDIA from compute capability 8.0 on, where a float maximum takes five shuffles). Three ways
to break ties by id, all exact:

- packed 32: a 16-bit logit leaves the low 13 bits of its key free (fp16; 16 for bf16); the id, counted down, lies there.
- packed 64: key and id in one 64-bit integer.
- two searches: the largest key, then the smallest id among its holders.

`LOWEST` is below every key, -inf's too: it marks what cannot be chosen, or no longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "LOWEST",
    "PACKED_BITS",
    "best_of",
    "clean",
    "key_of",
    "lowest",
    "pack",
    "probability",
    "share",
    "unpack_id",
    "unpack_key",
    "usable",
    "value_of",
]

#: Bits of an id in a packed 32-bit key.
PACKED_BITS = 13

LOWEST = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(2**31 - 1)
_MOST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def clean(x):
    """NaN as -inf, else x."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def usable(row_ptr, bias_ptr, expert, real):
    """fp32 logits of a row, -inf where they cannot be used or are not `real`; and the bias."""
    x = clean(tl.load(row_ptr + expert, mask=real, other=float("-inf")).to(tl.float32))
    if bias_ptr is None:
        bias = 0.0
    else:
        bias = tl.load(bias_ptr + expert, mask=real, other=0.0)
        x = tl.where(bias == bias, x, float("-inf"))
    return x, bias


@triton.jit
def key_of(x):
    """Keys of fp32 values without NaN: int32 in their order, equal for both zeros."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)  # -0.0
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def value_of(key):
    """The fp32 values of keys."""
    return (key ^ ((key >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def pack(key, ids, ID_BITS: tl.constexpr):
    """Keys with the ids in their low bits, the smaller one above."""
    if ID_BITS == 0:
        return key
    elif ID_BITS == 32:
        return (key.to(tl.int64) << 32) | (ids ^ _MOST_ID).to(tl.int64)
    else:
        LOW: tl.constexpr = 2**ID_BITS - 1
        return (key & ~LOW) | (ids ^ LOW)


@triton.jit
def unpack_id(packed, ID_BITS: tl.constexpr):
    """The ids of packed keys."""
    if ID_BITS == 32:
        return packed.to(tl.int32) ^ _MOST_ID
    else:
        LOW: tl.constexpr = 2**ID_BITS - 1
        return (packed & LOW) ^ LOW


@triton.jit
def unpack_key(packed, ID_BITS: tl.constexpr):
    """The keys of packed keys."""
    if ID_BITS == 0:
        return packed
    elif ID_BITS == 32:
        return (packed >> 32).to(tl.int32)
    else:
        LOW: tl.constexpr = 2**ID_BITS - 1
        # The low bits of a key are zeros, and ones where the value is negative.
        return (packed & ~LOW) | ((packed >> 31) & LOW)


@triton.jit
def lowest(ID_BITS: tl.constexpr):
    """`LOWEST` as a packed key."""
    if ID_BITS == 32:
        return tl.full((), LOWEST, tl.int64) << 32
    else:
        return tl.full((), LOWEST, tl.int32)


@triton.jit
def best_of(packed, ids, ID_BITS: tl.constexpr):
    """Return key and id of the best expert of each row of a tile (rows, experts), and the tile without it."""
    best = tl.max(packed, 1)
    if ID_BITS == 0:
        at = tl.min(tl.where(packed == best[:, None], ids, _MOST_ID), 1)
        taken = ids == at[:, None]
    else:
        at = unpack_id(best, ID_BITS)
        taken = packed == best[:, None]
    return unpack_key(best, ID_BITS), at, tl.where(taken, lowest(ID_BITS), packed)


@triton.jit
def probability(x, peak, SIGMOID: tl.constexpr):
    """Sigmoid of x, or e^(x - peak), which is 1 where x is the peak, also at +inf; -inf gives 0, also below a peak of -inf."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        base = tl.where(peak == float("-inf"), 0.0, peak)
        return tl.exp(tl.where(x == base, 0.0, x - base))


@triton.jit
def share(factor, total):
    """factor / total, 0 where the total is 0."""
    return tl.where(total > 0.0, factor / tl.where(total > 0.0, total, 1.0), 0.0)
