"""Where the reference backend reads keys and values: a paged cache in any layout, gathered chunk by chunk.

Packed keys (Tk, Hkv, D) are a cache of Tk pages of one slot, whose tables hold consecutive ids: one path serves both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Chunk", "Keys", "Span"]

#: layout -> (axis of the slots of a page in a cache, order that turns gathered (N, W, *page) into (N, Hkv, W, P, *head dim)).
_K_AXES = {
    "NHD": (1, (0, 3, 1, 2, 4)),
    "HND": (2, (0, 2, 1, 3, 4)),
    "HND_SPLIT": (3, (0, 2, 1, 4, 3, 5)),
    "SPLIT_V0": (3, (0, 2, 1, 4, 3, 5)),
}
_V_AXES = {"NHD": _K_AXES["NHD"], "HND": _K_AXES["HND"], "HND_SPLIT": _K_AXES["HND"], "SPLIT_V0": (3, (0, 2, 1, 4, 3))}
#: the same for scales per token and head, (pages, P, Hkv) with NHD and (pages, Hkv, P) otherwise.
_SCALE_AXES = {"NHD": (1, (0, 3, 1, 2))}
_SCALE_AXES_HND = (2, (0, 2, 1, 3))


@dataclass(frozen=True)
class Span:
    """Part of every sequence: slots `offset .. offset + slots - 1` of the pages in table columns `column .. column + columns - 1`."""

    column: int
    columns: int
    offset: int
    slots: int


@dataclass(frozen=True)
class Chunk:
    """Gathered keys of N sequences.

    Attributes:
        k: (N, Hkv, C, D) fp32, dequantised. v: (N, Hkv, C, Dv) fp32.
        index: (C,) place of each key in its sequence.
        exists: (N, C) bool, the page id is one of the cache.
    """

    k: Tensor
    v: Tensor
    index: Tensor
    exists: Tensor


@dataclass(frozen=True)
class Keys:
    """A pair of caches with the tables of B sequences.

    Attributes:
        k, v: caches in `layout`.
        tables: (B, max_pages) page ids, or (B,) first page ids of sequences whose pages are consecutive.
        k_scale, v_scale: as in the contract.
    """

    k: Tensor
    v: Tensor
    layout: str
    tables: Tensor
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None
    page_size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size", self.k.shape[_K_AXES[self.layout][0]])

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def head_dim_v(self) -> int:
        """Dv."""
        return self.v.shape[2 if self.layout == "SPLIT_V0" else 3]

    def spans(self, first: int, end: int, size: int, *, whole: bool) -> Iterator[Span]:
        """Cut keys `first .. end - 1` into spans of about `size` keys whose borders depend on the page size only.

        With `whole`, the last span is as long as the others.
        """
        page = self.page_size
        if page >= size:
            for column in range(first // page, -(-end // page)):
                for offset in range(0, page, size):
                    slots = min(size, page - offset)
                    if column * page + offset < end and column * page + offset + slots > first:
                        yield Span(column, 1, offset, slots)
            return
        columns, last = size // page, -(-end // page)
        for column in range(first // page // columns * columns, last, columns):
            yield Span(column, columns if whole else min(columns, last - column), 0, page)

    def load(self, sequences: Tensor, span: Span) -> Chunk:
        """Gather a span of the sequences (N,); ids outside the cache are read as page 0 and reported in `exists`."""
        ids = self._page_ids(sequences, span)
        exists = (ids >= 0) & (ids < self.k.shape[0])
        ids = ids.masked_fill(~exists, 0)
        start = span.column * self.page_size + span.offset
        return Chunk(
            k=self._dequantise(_gather(self.k, _K_AXES[self.layout], ids, span).flatten(4), self.k_scale, ids, span).flatten(2, 3),
            v=self._dequantise(_gather(self.v, _V_AXES[self.layout], ids, span), self.v_scale, ids, span).flatten(2, 3),
            index=torch.arange(start, start + span.columns * span.slots, device=ids.device),
            exists=exists[..., None].expand(-1, -1, span.slots).flatten(1),
        )

    def _page_ids(self, sequences: Tensor, span: Span) -> Tensor:
        if self.tables.dim() == 1:
            return self.tables[sequences, None] + torch.arange(span.column, span.column + span.columns, device=self.tables.device)
        ids = self.tables[:, span.column : span.column + span.columns].index_select(0, sequences).long()
        missing = span.columns - ids.shape[1]
        return torch.nn.functional.pad(ids, (0, missing), value=-1) if missing else ids

    def _dequantise(self, x: Tensor, scale: float | Tensor | None, ids: Tensor, span: Span) -> Tensor:
        """Multiply gathered (N, Hkv, W, P, D) by its scale, in place."""
        if scale is None:
            return x
        if isinstance(scale, Tensor) and scale.dim() == 1:
            scale = scale.view(-1, 1, 1, 1)
        elif isinstance(scale, Tensor) and scale.dim() > 1:
            scale = _gather(scale, _SCALE_AXES.get(self.layout, _SCALE_AXES_HND), ids, span)[..., None]
        return x.mul_(scale)


def _gather(cache: Tensor, axes: tuple[int, tuple[int, ...]], ids: Tensor, span: Span) -> Tensor:
    """Return the span of pages `ids` (N, W) as compact fp32 (N, Hkv, W, P, ...)."""
    slot_axis, order = axes
    if span.slots != cache.shape[slot_axis]:
        cache = cache.narrow(slot_axis, span.offset, span.slots)
    stored = cache.dtype
    if stored.itemsize == 1:  # not every torch build can index fp8
        cache = cache.view(torch.uint8)
    pages = cache.index_select(0, ids.flatten()).view(stored).unflatten(0, ids.shape).permute(order)
    return torch.empty(pages.shape, dtype=torch.float32, device=pages.device).copy_(pages)
