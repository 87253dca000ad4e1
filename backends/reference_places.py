"""Where the keys of each sequence lie in NHD caches on a CPU: in the caches if its pages follow one another, else in a copy.

A copy holds at most 2^20 values of K and as many of V (4 MiB each in fp32), however long the sequence: as many kv heads
at a time as fit. It is made when its turn comes, into memory that all copies of a host thread share.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MOST_KEYS", "Piece", "Places", "find"]

#: Keys of a row above which PyTorch's fp32 sums come too close to the tolerance (measured: 1.1e-5 at 2**16, 2.1e-5 at 2**17).
MOST_KEYS = 2**16
#: Values of K, and of V, in a copy. With 2**19, 8 kv heads of 128 at 2k keys go one at a time, which leaves a core idle:
#: 1.4 times as slow at batch 16. Copies of all heads at once are a seventh faster.
_COPY_VALUES = 2**20
#: Memory of copies, kept by each thread: to touch fresh pages took 1.0 of 1.3 ms at 2k keys, 3 kv heads of 64, batch 1.
_KEPT = threading.local()


@dataclass(frozen=True)
class Piece:
    """The keys in use of some kv heads of a sequence.

    Attributes:
        k, v: (pages, P, heads, D), the caches or a copy.
        origin: slot of the sequence's key 0, supposing that all its pages were there; below 0 if a copy leaves out the first.
        head: kv head of the sequence that is head 0 of `k` and `v`.
    """

    k: Tensor
    v: Tensor
    origin: int
    head: int

    def rows_of(self, x: Tensor, kv_heads: int) -> Tensor:
        """View the query heads of x (T, H, D) that attend to the piece's out of `kv_heads` kv heads."""
        group = x.shape[1] // kv_heads
        return x.narrow(1, self.head * group, self.k.shape[2] * group)


@dataclass(frozen=True)
class Places:
    """The places of the keys of B sequences.

    Attributes:
        k, v: (pages, P, Hkv, D) caches.
        tables: (B, max_pages) page ids.
        used: columns of the table that each sequence uses.
        origins: slot of key 0 of each sequence whose pages follow one another, None where a copy is needed.
    """

    k: Tensor
    v: Tensor
    tables: Tensor
    used: Sequence[slice]
    origins: Sequence[int | None]

    def pieces(self, sequence: int) -> Iterator[Piece]:
        """Yield all kv heads of a sequence, in order. A copy lasts until the thread asks for the next piece."""
        origin = self.origins[sequence]
        if origin is not None:
            yield Piece(self.k, self.v, origin, 0)
            return
        used = self.used[sequence]
        ids, (_, page_size, kv_heads, dim) = self.tables[sequence, used], self.k.shape
        calls = math.ceil(kv_heads / (_COPY_VALUES // (ids.shape[0] * page_size * dim)))
        size = math.ceil(kv_heads / calls)
        for head in range(0, kv_heads, size):
            k, v = (_copy(cache[:, :, head : head + size], ids, name) for cache, name in ((self.k, "k"), (self.v, "v")))
            yield Piece(k, v, -used.start * page_size, head)


def _copy(cache: Tensor, ids: Tensor, name: str) -> Tensor:
    """Copy the pages `ids` into the memory that this thread keeps under `name`."""
    shape = (ids.shape[0], *cache.shape[1:])
    kept, size = getattr(_KEPT, name, None), math.prod(shape) * cache.dtype.itemsize
    if kept is None or kept.nbytes < size:
        with torch.inference_mode(False):  # memory made in inference mode could be written there only
            kept = torch.empty(size, dtype=torch.uint8, device="cpu")
        setattr(_KEPT, name, kept)
    return torch.index_select(cache, 0, ids, out=kept[:size].view(cache.dtype).view(shape))


def find(k: Tensor, v: Tensor, tables: Tensor, lows: Sequence[int], lengths: Sequence[int]) -> Places | None:
    """Find the keys `lows[b] .. lengths[b] - 1` of each sequence b.

    Args:
        k: (pages, P, Hkv, D) cache.
        v: the same for V.
        tables: (B, max_pages) page ids, or (B,) the first of pages of one slot that follow one another.
        lows: the oldest key in use of each sequence.
        lengths: the keys of each sequence.

    Returns:
        None for what is left to the general path: sequences too long for PyTorch's sums or for a copy, and pages outside
        the cache.
    """
    if any(s - low > MOST_KEYS for s, low in zip(lengths, lows, strict=True)):
        return None
    pages, page_size, _, dim = k.shape
    if tables.dim() == 1:
        first = tables.tolist()
        inside = all(f >= 0 and f + s <= pages for f, s in zip(first, lengths, strict=True))
        return Places(k, v, tables, (), first) if inside else None
    used = [slice(low // page_size, math.ceil(s / page_size)) for low, s in zip(lows, lengths, strict=True)]
    rows = tables[:, : max((u.stop for u in used), default=0)].tolist()
    ids = [row[u] for row, u in zip(rows, used, strict=True)]
    if not all(0 <= min(i) <= max(i) < pages for i in ids if i):
        return None
    even = _evenly_spaced(k) and _evenly_spaced(v)
    origins = [_origin(i, u.start, page_size, even) for i, u in zip(ids, used, strict=True)]
    copied = max((len(i) for i, origin in zip(ids, origins, strict=True) if origin is None), default=0) * page_size * dim
    return Places(k, v, tables, used, origins) if copied <= _COPY_VALUES else None


def _origin(ids: list[int], column: int, page_size: int, even: bool) -> int | None:
    """Slot of key 0 of a sequence whose pages from `column` on are `ids`; None if their slots are not evenly spaced."""
    if not ids:
        return 0
    follow = even and ids == list(range(ids[0], ids[0] + len(ids)))
    return (ids[0] - column) * page_size if follow else None


def _evenly_spaced(cache: Tensor) -> bool:
    """Whether the slots of consecutive pages are."""
    return cache.shape[1] == 1 or cache.shape[0] == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)
