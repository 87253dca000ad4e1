"""The four layouts of a paged KV cache and of its scales: their shapes and checks.

| layout       | K cache                      | V cache               |
|--------------|------------------------------|-----------------------|
| `NHD`        | (pages, P, Hkv, D)           | (pages, P, Hkv, Dv)   |
| `HND`        | (pages, Hkv, P, D)           | (pages, Hkv, P, Dv)   |
| `HND_SPLIT`  | (pages, Hkv, D/x, P, x)      | (pages, Hkv, P, Dv)   |  ColossalAI
| `SPLIT_V0`   | (pages, Hkv, D/x, P, x)      | (pages, Hkv, Dv, P)   |  vLLM v0, ixformer 3.2.3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.ops.checks import FLOATS, QUANTISED, Checker

__all__ = ["KV_LAYOUTS", "CacheFacts", "cache_shapes", "check_caches", "check_scale", "page_size_of", "scale_kind", "token_scale_shape"]

KV_LAYOUTS = ("NHD", "HND", "HND_SPLIT", "SPLIT_V0")
#: Where a K cache of each layout has its page size.
_PAGE_AXIS = {"NHD": 1, "HND": 2, "HND_SPLIT": 3, "SPLIT_V0": 3}


@dataclass(frozen=True)
class CacheFacts:
    """Sizes of a pair of caches: pages, page size P, kv heads, head dims of K and V, and x of a split K (0 if whole)."""

    pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    split: int


def check_caches(
    check: Checker, k: Tensor, v: Tensor, layout: str, dtype: torch.dtype, k_name: str = "k_cache", v_name: str = "v_cache"
) -> CacheFacts:
    """Check a pair of caches against a layout and the dtype of the query (or key), and return their sizes."""
    check.choice("kv_layout", layout, KV_LAYOUTS)
    split_k = layout in ("HND_SPLIT", "SPLIT_V0")
    allowed = (dtype, *QUANTISED)
    check.tensor(k_name, k, dtypes=allowed)
    check.tensor(v_name, v, dtypes=allowed)
    k_axes = {"NHD": "(pages, P, Hkv, D)", "HND": "(pages, Hkv, P, D)"}.get(layout, "(pages, Hkv, D/x, P, x)")
    if k.dim() != (5 if split_k else 4):
        raise check.fail(k_name, f"has shape {tuple(k.shape)}", f"{k_axes} for kv_layout {layout!r}")
    if layout == "NHD":
        pages, page_size, heads, head_dim = k.shape
    elif layout == "HND":
        pages, heads, page_size, head_dim = k.shape
    else:
        pages, heads, head_dim, page_size = k.shape[0], k.shape[1], k.shape[2] * k.shape[4], k.shape[3]
    v_shape = {"NHD": (pages, page_size, heads, None), "SPLIT_V0": (pages, heads, None, page_size)}.get(layout, (pages, heads, page_size, None))
    v_axes = {"NHD": "(pages, P, Hkv, Dv)", "SPLIT_V0": "(pages, Hkv, Dv, P)"}.get(layout, "(pages, Hkv, P, Dv)")
    check.tensor(v_name, v, shape=v_shape, axes=v_axes)
    if v.dtype != k.dtype:
        raise check.fail(v_name, f"has dtype {v.dtype}", f"the dtype of `{k_name}`, {k.dtype}")
    if page_size < 1 or heads < 1:
        raise check.fail(k_name, f"has shape {tuple(k.shape)}", "at least one slot a page and one kv head")
    head_dim_v = v.shape[2] if layout == "SPLIT_V0" else v.shape[3]
    return CacheFacts(pages, page_size, heads, head_dim, head_dim_v, k.shape[4] if split_k else 0)


def page_size_of(k_cache: Tensor, layout: str) -> int:
    """Slots of a page."""
    return k_cache.shape[_PAGE_AXIS[layout]]


def cache_shapes(
    layout: str, pages: int, page_size: int, num_kv_heads: int, head_dim: int, head_dim_v: int, itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a compact K cache and V cache; a split K packs 16 bytes in its last dimension."""
    if layout == "NHD":
        return (pages, page_size, num_kv_heads, head_dim), (pages, page_size, num_kv_heads, head_dim_v)
    if layout == "HND":
        return (pages, num_kv_heads, page_size, head_dim), (pages, num_kv_heads, page_size, head_dim_v)
    x = max(1, 16 // itemsize)
    while head_dim % x:
        x //= 2
    split_k = (pages, num_kv_heads, head_dim // x, page_size, x)
    if layout == "HND_SPLIT":
        return split_k, (pages, num_kv_heads, page_size, head_dim_v)
    return split_k, (pages, num_kv_heads, head_dim_v, page_size)


def token_scale_shape(layout: str, facts: CacheFacts) -> tuple[int, int, int]:
    """Shape of scales per token and head: the cache without its head dimension."""
    if layout == "NHD":
        return (facts.pages, facts.page_size, facts.num_kv_heads)
    return (facts.pages, facts.num_kv_heads, facts.page_size)


def scale_kind(scale: float | Tensor | None) -> str | None:
    """`None`, `scalar`, `head` or `token`: how a scale applies."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor) or (scale.numel() == 1 and scale.dim() <= 1):
        return "scalar"
    return "head" if scale.dim() == 1 else "token"


def check_scale(
    check: Checker, argument: str, scale: object, cache_dtype: torch.dtype, num_kv_heads: int, token_shape: tuple[int, ...] | None
) -> str | None:
    """Check one KV scale against the dtype of its cache and return its kind."""
    if cache_dtype in FLOATS:
        if scale is not None:
            raise check.fail(argument, "is given", f"None with an unquantised cache ({cache_dtype})")
        return None
    if scale is None:
        if cache_dtype == torch.int8:
            raise check.fail(argument, "is None", "a scale: an int8 cache has no meaning without one")
        return None
    if not isinstance(scale, Tensor):
        check.number(argument, scale, above=0.0)
        return "scalar"
    per_token = f", or per token and head {token_shape}" if token_shape else ""
    accepted = f"a float, a float32 tensor of shape () or (1,), ({num_kv_heads},) for kv heads{per_token}"
    check.tensor(argument, scale, dtypes=(torch.float32,), last_contiguous=False)
    shape = tuple(scale.shape)
    if shape not in ((), (1,), (num_kv_heads,), token_shape):
        raise check.fail(argument, f"has shape {shape}", accepted)
    return scale_kind(scale)
