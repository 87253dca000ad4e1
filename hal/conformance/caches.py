"""Paged caches for the tests: every layout, awkward strides, and poison in each slot that no call may look at."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.conformance.quantised import nearest_codes
from hal.ops.layouts import cache_shapes

__all__ = ["STORAGES", "CachePair", "blank_cache", "filled", "make_caches", "poison_value", "put"]

#: How the caches lie in memory: compact; K and V in one buffer [pages, 2, ...]; extra rows behind each page; axes
#: stored in another order; a slice of a stack of layers; only V padded, so that K and V strides differ; extra elements behind
#: each row of the last dimension.
STORAGES = ("compact", "interleaved", "padded", "permuted", "stacked", "v_padded", "wide_rows")

#: Order of the axes in memory for the storage "permuted", by number of axes; the contiguous one stays last.
_PERMUTED = {4: (1, 0, 2, 3), 5: (2, 0, 1, 3, 4)}


@dataclass(frozen=True)
class CachePair:
    """A K cache and a V cache, and the whole buffers that they are views of."""

    k: Tensor
    v: Tensor
    buffers: tuple[Tensor, ...]


def poison_value(dtype: torch.dtype) -> float:
    """Return what stands in memory that no call may look at: NaN, or the largest int8."""
    return 127.0 if dtype == torch.int8 else float("nan")


def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of any dtype filled with one value."""
    if dtype.itemsize > 1 or dtype == torch.int8:
        return torch.full(shape, value, dtype=dtype, device=device)
    code = nearest_codes(torch.tensor([value]), dtype).item()
    return torch.full(shape, code, dtype=torch.uint8, device=device).view(dtype)


def blank_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, storage: str, fill: float) -> tuple[Tensor, Tensor]:
    """Return a cache view of `shape` filled with `fill`, and the buffer it lies in."""
    if storage == "permuted":
        order = _PERMUTED[len(shape)]
        buffer = filled(tuple(shape[i] for i in order), fill, dtype, device)
        return buffer.permute(tuple(order.index(i) for i in range(len(shape)))), buffer
    if storage == "stacked":
        buffer = filled((shape[0], 3, *shape[1:]), fill, dtype, device)
        return buffer[:, 1], buffer
    if storage == "padded":
        buffer = filled((shape[0], shape[1] + 1, *shape[2:]), fill, dtype, device)
        return buffer[:, : shape[1]], buffer
    if storage == "wide_rows":
        buffer = filled((*shape[:-1], shape[-1] + 8), fill, dtype, device)
        return buffer[..., : shape[-1]], buffer
    buffer = filled(shape, fill, dtype, device)
    return buffer, buffer


def make_caches(
    layout: str, pages: int, size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, device: torch.device, storage: str, fill: float
) -> CachePair:
    """Return caches of `pages` pages of `size` slots, every element `fill`."""
    k_shape, v_shape = cache_shapes(layout, pages, size, heads, *dims, dtype.itemsize)
    if storage == "interleaved":
        if k_shape == v_shape:
            buffer = filled((pages, 2, *k_shape[1:]), fill, dtype, device)
            return CachePair(buffer[:, 0], buffer[:, 1], (buffer,))
        k_count, v_count = math.prod(k_shape[1:]), math.prod(v_shape[1:])
        buffer = filled((pages, k_count + v_count), fill, dtype, device)
        return CachePair(buffer[:, :k_count].unflatten(1, k_shape[1:]), buffer[:, k_count:].unflatten(1, v_shape[1:]), (buffer,))
    k_storage = "compact" if storage == "v_padded" else storage
    k, k_buffer = blank_cache(k_shape, dtype, device, k_storage, fill)
    v, v_buffer = blank_cache(v_shape, dtype, device, "padded" if storage == "v_padded" else storage, fill)
    return CachePair(k, v, (k_buffer, v_buffer))


def put(cache: Tensor, layout: str, which: str, slots: Tensor, rows: Tensor) -> None:
    """Store `rows` (N, Hkv, D), already in the cache's dtype, in `slots`."""
    raw, rows = (cache.view(torch.uint8), rows.view(torch.uint8)) if cache.dtype.itemsize == 1 else (cache, rows)
    split_k = layout in ("HND_SPLIT", "SPLIT_V0") and which == "k"
    transposed = layout == "SPLIT_V0" and which == "v"
    size = cache.shape[1] if layout == "NHD" else cache.shape[2] if layout == "HND" or (which == "v" and not transposed) else cache.shape[3]
    page, offset = slots.long() // size, slots.long() % size
    if layout == "NHD":
        raw[page, offset] = rows
    elif split_k:
        raw[page, :, :, offset] = rows.unflatten(2, (cache.shape[2], cache.shape[4]))
    elif transposed:
        raw[page, :, :, offset] = rows
    else:
        raw[page, :, offset] = rows
