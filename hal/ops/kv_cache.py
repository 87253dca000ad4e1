# mypy: disable-error-code="no-untyped-def"
# (the `_..._signature` functions: their types are those of the Protocol above each, and a test compares the parameters)
"""The KV-cache family: `write_kv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hal.ops.checks import FLOATS, Checker
from hal.ops.layouts import check_caches, check_scale, token_scale_shape
from hal.ops.op import Arguments, Op, TensorMeta
from hal.ops.signature import scale_facts

__all__ = ["WRITE_KV", "WriteKV", "WriteKVCall"]


class WriteKV(Protocol):
    """Type of `backend.write_kv`."""

    def __call__(
        self,
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
        """Write new keys and values into a paged cache, in place.

        Args:
            key: (T, Hkv, D) fp32, fp16 or bf16; any strides with the last dimension contiguous. It and `value` must not
                share memory with the caches.
            value: (T, Hkv, Dv), the dtype of `key`.
            k_cache: paged keys in `kv_layout` (`hal.ops.layouts`), key's dtype or fp8 e4m3, fp8 e5m2, int8.
            v_cache: paged values, the dtype of `k_cache`.
            slot_mapping: (N,) int32 or int64, N <= T: row t goes to slot `page * P + offset`. Rows from N on, and
                slots below 0 or beyond the cache, are skipped. Which row wins a duplicate slot is unspecified,
                separately for K, V and head, but it wins whole: no head of a slot mixes two rows. No other slot changes.
            kv_layout: see `hal.ops.layouts`.
            k_scale: for a quantised cache, stored = x / k_scale: a float, fp32 () or (1,), or (Hkv,). Given per token
                and head (shaped as the cache without D), the op computes `amax / qmax` of each row and writes it
                there. int8 needs a scale; fp8 without one means 1.
            v_scale: the same for V.

        Quantised values are rounded half to even and saturate (fp8 at the largest finite value, int8 at -128 and 127);
        fp8 NaN stays NaN, int8 NaN becomes 0. `qmax` of int8 is 127. An all-zero row gets scale 0 and zeros.

        Raises:
            ArgumentError: an argument is outside this contract; nothing was written.
        """


def _signature(key, value, k_cache, v_cache, slot_mapping, *, kv_layout="NHD", k_scale=None, v_scale=None):
    return (
        key.shape, key.stride(), key.dtype, key.device,
        value.shape, value.stride(), value.dtype, value.device,
        k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device,
        v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device,
        slot_mapping.shape, slot_mapping.stride(), slot_mapping.dtype, slot_mapping.device, kv_layout,
        k_scale if k_scale is None else scale_facts(k_scale),
        v_scale if v_scale is None else scale_facts(v_scale),
        torch.is_grad_enabled() and (key.requires_grad or value.requires_grad or k_cache.requires_grad or v_cache.requires_grad),
    )  # fmt: skip


@dataclass(frozen=True)
class WriteKVCall:
    """What a gate sees of a `write_kv` call; names as in `hal.ops.attention_checks.AttentionCall`."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    tokens: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    kv_layout: str
    k_scale: str | None
    v_scale: str | None
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]


def check_write_kv(a: Arguments) -> WriteKVCall:
    """Check a `write_kv` call and return what gates look at."""
    check = Checker("write_kv", a.key.device)
    check.tensor("key", a.key, shape=(None, None, None), axes="(T, Hkv, D)", dtypes=FLOATS)
    tokens, heads, dim = a.key.shape
    check.tensor("value", a.value, shape=(tokens, heads, None), axes="(T, Hkv, Dv)", dtypes=(a.key.dtype,))
    check.no_grad(key=a.key, value=a.value, k_cache=a.k_cache, v_cache=a.v_cache)
    caches = check_caches(check, a.k_cache, a.v_cache, a.kv_layout, a.key.dtype)
    for name, found, wanted in (
        ("k_cache", caches.num_kv_heads, heads),
        ("k_cache", caches.head_dim, dim),
        ("v_cache", caches.head_dim_v, a.value.shape[2]),
    ):
        if found != wanted:
            raise check.fail(name, f"has shape {tuple(getattr(a, name).shape)}", f"{heads} kv heads and the head dim of the new rows, {wanted}")
    for name in ("k_cache", "v_cache"):
        check.output(name, getattr(a, name), shape=tuple(getattr(a, name).shape), axes="", dtypes=(a.k_cache.dtype,))
    check.tensor("slot_mapping", a.slot_mapping, shape=(None,), axes="(N,)", dtypes=(torch.int32, torch.int64))
    if a.slot_mapping.shape[0] > tokens:
        raise check.fail("slot_mapping", f"has {a.slot_mapping.shape[0]} entries", f"at most the {tokens} rows of `key`")
    token_shape = token_scale_shape(a.kv_layout, caches)
    check.no_grad(k_scale=a.k_scale, v_scale=a.v_scale)
    kinds = [check_scale(check, n, getattr(a, n), a.k_cache.dtype, heads, token_shape) for n in ("k_scale", "v_scale")]
    for name, kind in zip(("k_scale", "v_scale"), kinds, strict=True):
        if kind == "token":
            check.distinct(name, getattr(a, name))
    return WriteKVCall(
        a.key.dtype,
        a.k_cache.dtype,
        tokens,
        heads,
        dim,
        caches.head_dim_v,
        caches.page_size,
        a.kv_layout,
        kinds[0],
        kinds[1],
        a.k_cache.stride(),
        a.v_cache.stride(),
    )


def _meta(a: Arguments) -> tuple[TensorMeta, ...]:
    return ()


WRITE_KV = Op("write_kv", WriteKV, _signature, check_write_kv, _meta)
