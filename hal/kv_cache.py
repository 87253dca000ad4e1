"""What an engine should allocate: the paged KV cache that a backend serves natively."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.errors import ArgumentError
from hal.ops.checks import FLOATS, QUANTISED, names
from hal.ops.layouts import KV_LAYOUTS, CacheFacts, cache_shapes, token_scale_shape
from hal.spec import KVCachePreference

__all__ = ["KVCacheSpec", "kv_cache_spec"]


@dataclass(frozen=True)
class KVCacheSpec:
    """A paged cache for one layer.

    Attributes:
        backend: who serves it natively.
        layout: the `kv_layout` to pass to ops.
        page_size: P.
        dtype: dtype of K and V.
        num_kv_heads, head_dim, head_dim_v: Hkv, D, Dv.
    """

    backend: str
    layout: str
    page_size: int
    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    head_dim_v: int

    def shapes(self, pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the K cache and the V cache for a number of pages."""
        return cache_shapes(self.layout, pages, self.page_size, self.num_kv_heads, self.head_dim, self.head_dim_v, self.dtype.itemsize)

    def scale_shape(self, pages: int) -> tuple[int, int, int] | None:
        """Shape of `k_scale` and `v_scale` (fp32, per token and head) for a quantised cache, else None."""
        if self.dtype not in QUANTISED:
            return None
        return token_scale_shape(self.layout, CacheFacts(pages, self.page_size, self.num_kv_heads, self.head_dim, self.head_dim_v, 0))

    def allocate(self, pages: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return empty K and V caches; slots that were never written are never read."""
        k_shape, v_shape = self.shapes(pages)
        return torch.empty(k_shape, dtype=self.dtype, device=device), torch.empty(v_shape, dtype=self.dtype, device=device)


def kv_cache_spec(
    backend: str, preference: KVCachePreference, num_kv_heads: int, head_dim: int, dtype: torch.dtype, head_dim_v: int | None
) -> KVCacheSpec:
    """Combine a backend's preference with a model's sizes; raises ArgumentError."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for argument, value in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError("kv_cache_spec", argument, f"is {value!r}", "an integer >= 1")
    if dtype not in (*FLOATS, *QUANTISED):
        raise ArgumentError("kv_cache_spec", "dtype", f"is {dtype!r}", names((*FLOATS, *QUANTISED)))
    assert preference.layout in KV_LAYOUTS
    return KVCacheSpec(backend, preference.layout, preference.page_size, dtype, num_kv_heads, head_dim, head_dim_v)
