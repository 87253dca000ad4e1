"""Strides of paged caches and of their scales, in the order in which the kernels address them."""

from __future__ import annotations

from torch import Tensor

__all__ = ["copied_in_16_bytes", "head_dims", "key_strides", "page_size_of", "scale_arguments", "split_of", "value_strides"]

_SPLIT_K = ("HND_SPLIT", "SPLIT_V0")


def split_of(k: Tensor, layout: str) -> int:
    """Elements x of the last dimension of a split K cache, 0 for a whole one."""
    return k.shape[4] if layout in _SPLIT_K else 0


def page_size_of(k: Tensor, layout: str) -> int:
    """P."""
    return k.shape[1] if layout == "NHD" else k.shape[2] if layout == "HND" else k.shape[3]


def head_dims(k: Tensor, v: Tensor, layout: str) -> tuple[int, int, int]:
    """(Hkv, D, Dv)."""
    head_dim_v = v.shape[2] if layout == "SPLIT_V0" else v.shape[3]
    if layout in _SPLIT_K:
        return k.shape[1], k.shape[2] * k.shape[4], head_dim_v
    return (k.shape[2] if layout == "NHD" else k.shape[1]), k.shape[3], head_dim_v


def key_strides(k: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(page, token, head, group of x) strides of a K cache in elements; the last is 0 for a whole head dim."""
    if layout == "NHD":
        page, token, head, _ = k.stride()
        return page, token, head, 0
    if layout == "HND":
        page, head, token, _ = k.stride()
        return page, token, head, 0
    page, head, group, token, _ = k.stride()
    return page, token, head, group


def value_strides(v: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(page, token, head, element) strides of a V cache in elements."""
    if layout == "NHD":
        page, token, head, element = v.stride()
    elif layout == "SPLIT_V0":
        page, head, element, token = v.stride()
    else:
        page, head, token, element = v.stride()
    return page, token, head, element


def _token_scale_strides(scale: Tensor, layout: str) -> tuple[int, int, int]:
    """(page, token, head) strides of scales per token and head."""
    if layout == "NHD":
        page, token, head = scale.stride()
    else:
        page, head, token = scale.stride()
    return page, token, head


def scale_arguments(scale: float | Tensor | None, layout: str) -> tuple[Tensor | None, float, tuple[int, int, int]]:
    """(tensor read on the device, factor known on the host, (page, token, head) strides) of a KV scale."""
    if scale is None:
        return None, 1.0, (0, 0, 0)
    if not isinstance(scale, Tensor):
        return None, float(scale), (0, 0, 0)
    if scale.dim() == 3:
        return scale, 1.0, _token_scale_strides(scale, layout)
    return scale, 1.0, (0, 0, scale.stride(0) if scale.numel() > 1 else 0)


def copied_in_16_bytes(layout: str, key_strides: tuple[int, ...], value_strides: tuple[int, ...], address: int) -> bool:
    """Whether both caches can be copied 16 bytes at a time: whole head dims, aligned."""
    aligned = all(stride % 16 == 0 for stride in (*key_strides[:3], *value_strides[:3]))
    return layout in ("NHD", "HND") and value_strides[3] == 1 and aligned and address % 16 == 0
