"""`write_kv` of the reference backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.backends.reference_limits import on_host
from hal.ops.checks import FLOATS

__all__ = ["write_kv"]

#: layout -> order that puts the pages and the slots of a cache first: (pages, P, Hkv, *head dim); K, V, scales per token.
_SLOT_FIRST = {
    "NHD": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2)),
    "HND": ((0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1)),
    "HND_SPLIT": ((0, 3, 1, 2, 4), (0, 2, 1, 3), (0, 2, 1)),
    "SPLIT_V0": ((0, 3, 1, 2, 4), (0, 3, 1, 2), (0, 2, 1)),
}


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write new keys and values into a paged cache, in place; the contract is `hal.ops.kv_cache.WriteKV`.

    An int8 value lies in -128..127; a scale per token is `amax / 127` for int8, NaN left out of the maximum.
    Of rows that share a slot only the last is written: torch copies with several threads, which could mix two of them.
    Extra memory: the rows written, in fp32.
    """
    if kv_layout == "NHD" and _write_plain(key, value, k_cache, v_cache, slot_mapping):
        return
    k_order, v_order, scale_order = _SLOT_FIRST[kv_layout]
    limit = k_cache.shape[0] * k_cache.permute(k_order).shape[1]
    if not (slot_mapping.shape[0] and limit):
        return
    select = _select_on_host if on_host(key) else _select_on_device
    chosen = select(slot_mapping, limit)
    if not chosen.slots.shape[0]:
        return
    for new, cache, order, scale in ((key, k_cache, k_order, k_scale), (value, v_cache, v_order, v_scale)):
        new = new[: slot_mapping.shape[0]] if chosen.rows is None else new.index_select(0, chosen.rows)
        if cache.dtype in FLOATS:
            _store(cache.permute(order), chosen, new)
            continue
        if isinstance(scale, Tensor) and scale.dim() > 1:
            divisor = _token_scale(new, cache.dtype)
            _store(scale.permute(scale_order), chosen, divisor)
            divisor = divisor.masked_fill(divisor == 0.0, 1.0)[..., None]
        else:
            divisor = _given_scale(scale, key.device)
        _store(cache.permute(order), chosen, _quantise(new.float() / divisor, cache.dtype))


def _write_plain(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> bool:
    """Serve what a decode step on a CPU asks for in as few calls as possible; False if there is more to do."""
    rows = slot_mapping.shape[0]
    if not (rows == key.shape[0] and k_cache.dtype == key.dtype and k_cache.is_contiguous() and v_cache.is_contiguous() and key.is_cpu):
        return False
    slots = slot_mapping.tolist()
    pages, page_size, heads, head_dim = k_cache.shape
    if not rows or min(slots) < 0 or max(slots) >= pages * page_size or len(set(slots)) < rows:
        return False
    slots_64 = slot_mapping.long()
    k_cache.view(-1, heads, head_dim).index_copy_(0, slots_64, key)
    v_cache.view(-1, heads, v_cache.shape[3]).index_copy_(0, slots_64, value)
    return True


@dataclass(frozen=True)
class _Chosen:
    """Which rows go where.

    Attributes:
        slots: (M,) int64, all inside the cache.
        rows: (M,) int64 rows of the input, None for the first M.
        any: 0-d bool, False if no row is to be written after all; None if that is not in question.
    """

    slots: Tensor
    rows: Tensor | None = None
    any: Tensor | None = None


def _select_on_host(slot_mapping: Tensor, limit: int) -> _Chosen:
    """Drop slots outside the cache, and all but the last row of each slot."""
    slots = slot_mapping.tolist()
    if min(slots) >= 0 and max(slots) < limit and len(set(slots)) == len(slots):
        return _Chosen(slot_mapping.long())
    kept = {slot: row for row, slot in enumerate(slots) if 0 <= slot < limit}
    return _Chosen(torch.tensor(list(kept), dtype=torch.int64), torch.tensor(list(kept.values()), dtype=torch.int64))


def _select_on_device(slot_mapping: Tensor, limit: int) -> _Chosen:
    """Do the same without reading a value: a row that must not be written repeats the write of one that is."""
    slots = slot_mapping.long()
    valid = (slots >= 0) & (slots < limit)
    rows = torch.arange(slots.shape[0], device=slots.device)
    rows = rows.where(valid, (rows * valid).amax())  # the last valid row, which is also the last of its slot
    slots = slots.index_select(0, rows)
    ordered, order = slots.sort(stable=True)
    last = order[torch.searchsorted(ordered, slots, right=True) - 1]
    return _Chosen(slots.masked_fill(~valid.any(), 0), rows.index_select(0, last), valid.any())


def _store(cache: Tensor, chosen: _Chosen, new: Tensor) -> None:
    """Write rows (M, Hkv, ...) into a cache (pages, P, Hkv, *head dim) of any strides."""
    new = new.reshape(-1, *cache.shape[2:])
    if cache.dtype.itemsize == 1:  # not every torch build can index fp8
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    if chosen.any is not None:  # nothing to write: slot 0 keeps what it holds
        new = torch.where(chosen.any, new, cache[0, 0])
    page_size = cache.shape[1]
    if cache.stride(0) == page_size * cache.stride(1):
        cache.flatten(0, 1).index_copy_(0, chosen.slots, new)
    else:
        page = chosen.slots.div(page_size, rounding_mode="floor")
        cache.index_put_((page, chosen.slots - page * page_size), new)


def _token_scale(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return amax / qmax of each row (M, Hkv, D); a NaN has no magnitude."""
    return rows.float().abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(-1) / _largest(dtype)


def _given_scale(scale: float | Tensor | None, device: torch.device) -> Tensor:
    """Return a scale that divides (M, Hkv, D). A tensor, since CUDA multiplies by the reciprocal of a Python number."""
    if isinstance(scale, Tensor):
        return scale.view(-1, 1)
    return torch.full((), 1.0 if scale is None else scale, dtype=torch.float32, device=device)


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _quantise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round half to even and saturate; NaN becomes 0 in int8 and stays NaN in fp8."""
    if dtype == torch.int8:
        return x.round_().nan_to_num_(nan=0.0).clamp_(-128, 127).to(dtype)
    return x.clamp_(-_largest(dtype), _largest(dtype)).to(dtype)
