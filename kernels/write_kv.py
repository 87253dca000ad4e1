# mypy: allow-untyped-defs
"""`write_kv`: scatter new keys and values into a paged cache, quantised if the cache is.

One program per token and tile of heads takes whole rows of K and of V, so that a row's scale needs no second pass and
no tile straddles a head. A stored value is `x / scale` rounded half to even and saturated; with scale caches per token
and head the scale is `amax / qmax` of the row and is written beside it.

A row is many stores, so rows that share a slot must not race: the last of them alone stores. Up to `_SCANNED` rows,
each program looks through the slots of all later rows, one load beside those of its row; of more, two small kernels
first make a table of the last row of each slot (`last_rows.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.compile_case import CompileCase, pointer, refusals
from hal.kernels.last_rows import last_rows
from hal.kernels.launch import pdl_begin, pdl_options
from hal.kernels.layouts import head_dims, key_strides, page_size_of, scale_arguments, split_of, value_strides
from hal.kernels.numerics import round_half_even
from hal.kernels.scratch import current_device
from hal.kernels.tuning import supports_pdl

__all__ = ["compile_cases", "write_kernel", "write_kv"]

_TILE_ELEMENTS = 2048
#: Most rows whose slots each program looks through, a power of two: four or less for each thread.
_SCANNED = 512
#: Largest finite value of each quantised dtype; int8 also saturates below at -128.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


@triton.jit
def _write_rows(
    x, target, target_ok, scale_ptr, scale_factor, head, head_ok, scale_base, stride_scale_head,
    QMAX: tl.constexpr, TOKEN_SCALE: tl.constexpr,
):  # fmt: skip
    """Quantise (QMAX > 0) and store rows `x` (heads, elements), 0 where `target_ok` is not."""
    if QMAX == 0:
        tl.store(target, x, mask=target_ok)
    else:
        x = x.to(tl.float32)
        if TOKEN_SCALE:
            # NaN is no measure of a row.
            amax = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 1)
            scale = tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32))
            tl.store(scale_base + head * stride_scale_head, scale, mask=head_ok)
        elif scale_ptr is None:
            scale = tl.zeros(head.shape, tl.float32) + scale_factor
        else:
            scale = tl.load(scale_ptr + head * stride_scale_head, mask=head_ok, other=1.0)
        divisor = tl.where(scale == 0.0, 1.0, scale)
        x = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
        if target.dtype.element_ty == tl.int8:
            x = tl.where(x != x, 0.0, x)
            x = round_half_even(tl.minimum(tl.maximum(x, -128.0), 127.0))
        else:
            # Comparisons, not minimum: NaN stays NaN.
            x = tl.where(x > QMAX, QMAX, tl.where(x < -QMAX, -QMAX, x))
        tl.store(target, x.to(target.dtype.element_ty), mask=target_ok)


@triton.jit(do_not_specialize=["slots", "rows", "heads"])
def write_kernel(
    key_ptr, value_ptr, k_ptr, v_ptr, slot_ptr, last_ptr, k_scale_ptr, v_scale_ptr, k_factor, v_factor, slots, rows, heads,
    stride_nt, stride_nh, stride_ut, stride_uh,
    stride_kp, stride_kt, stride_kh, stride_kx, stride_vp, stride_vt, stride_vh, stride_vd,
    stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, P: tl.constexpr, SPLIT_X: tl.constexpr, BLOCK_H: tl.constexpr,
    QMAX: tl.constexpr, K_TOKEN_SCALE: tl.constexpr, V_TOKEN_SCALE: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_H heads of one token; a slot outside [0, slots), or one that a later row names, is skipped."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= slots):
        return
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    head_ok = head < heads
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    k_ok = head_ok[:, None] & (d < D)[None, :]
    v_ok = head_ok[:, None] & (dv < DV)[None, :]
    # Both rows are on their way while the slots of the others come.
    k_rows = tl.load(key_ptr + token * stride_nt + (head * stride_nh)[:, None] + d[None, :], mask=k_ok, other=0.0)
    v_rows = tl.load(value_ptr + token * stride_ut + (head * stride_uh)[:, None] + dv[None, :], mask=v_ok, other=0.0)
    if last_ptr is None:
        row = tl.arange(0, SCAN)
        same = tl.load(slot_ptr + row, mask=(row > token) & (row < rows), other=-1).to(tl.int64) == slot
        last = tl.sum(same.to(tl.int32), 0) == 0
    else:
        last = tl.load(last_ptr + slot) == token
    if not last:
        return
    page = slot // P
    offset = slot % P
    k_element = d.to(tl.int64) if SPLIT_X == 0 else (d // SPLIT_X).to(tl.int64) * stride_kx + d % SPLIT_X
    _write_rows(
        k_rows, k_ptr + page * stride_kp + offset * stride_kt + (head * stride_kh)[:, None] + k_element[None, :], k_ok,
        k_scale_ptr, k_factor, head, head_ok, k_scale_ptr + page * stride_ksp + offset * stride_kst if K_TOKEN_SCALE else None, stride_ksh,
        QMAX, K_TOKEN_SCALE,
    )  # fmt: skip
    _write_rows(
        v_rows, v_ptr + page * stride_vp + offset * stride_vt + (head * stride_vh)[:, None] + (dv.to(tl.int64) * stride_vd)[None, :], v_ok,
        v_scale_ptr, v_factor, head, head_ok, v_scale_ptr + page * stride_vsp + offset * stride_vst if V_TOKEN_SCALE else None, stride_vsh,
        QMAX, V_TOKEN_SCALE,
    )  # fmt: skip


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> None:
    """Write rows of `key` and `value` into their slots; of rows that share a slot, the last.

    Args:
        key: (T, Hkv, D), last dimension contiguous.
        value: (T, Hkv, Dv).
        k_cache: paged keys in `kv_layout`.
        v_cache: paged values.
        slot_mapping: (N,) int32 or int64, N <= T.
        kv_layout: layout of the caches.
        k_scale: None, float, scalar tensor, (Hkv,), or the scale cache per token and head, which is written.
        v_scale: the same for V.
    """
    rows, heads = slot_mapping.shape[0], key.shape[1]
    page_size = page_size_of(k_cache, kv_layout)
    slots = k_cache.shape[0] * page_size
    if rows == 0 or slots == 0:
        return
    _, head_dim, head_dim_v = head_dims(k_cache, v_cache, kv_layout)
    padded, padded_v = 1 << (head_dim - 1).bit_length(), 1 << (head_dim_v - 1).bit_length()
    block = min(1 << (heads - 1).bit_length(), max(1, _TILE_ELEMENTS // max(padded, padded_v)))
    k_tensor, k_factor, k_strides = scale_arguments(k_scale, kv_layout)
    v_tensor, v_factor, v_strides = scale_arguments(v_scale, kv_layout)
    pdl = supports_pdl(key.device)
    with current_device(key.device):
        last = last_rows(slot_mapping, slots, pdl=pdl) if rows > _SCANNED else None
        write_kernel[(rows, triton.cdiv(heads, block))](
            key, value, k_cache, v_cache, slot_mapping, last, k_tensor, v_tensor, k_factor, v_factor, slots, rows, heads,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            *key_strides(k_cache, kv_layout), *value_strides(v_cache, kv_layout), *k_strides, *v_strides,
            head_dim, padded, head_dim_v, padded_v, page_size, split_of(k_cache, kv_layout), block,
            _LARGEST.get(k_cache.dtype, 0.0), k_tensor is not None and k_tensor.dim() == 3, v_tensor is not None and v_tensor.dim() == 3,
            _SCANNED, pdl, num_warps=4, num_stages=1, enable_fp_fusion=False, **pdl_options(pdl),
        )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Each key dtype into each cache dtype, over the layouts, the kinds of scales, and few rows or many."""
    return [
        _compile_case(dtype, cache, token_scale, many, pdl)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for cache in (dtype, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
        for token_scale in ((False, True) if cache is not dtype else (False,))
        for many in (False, True)
        for pdl in (False, True)
    ]


def _compile_case(dtype: torch.dtype, cache: torch.dtype, token_scale: bool, many: bool, pdl: bool) -> CompileCase:
    # One case of each (dtype, cache) walks NHD, the other the split layout of vLLM v0.
    types = {"key_ptr": pointer(dtype), "value_ptr": pointer(dtype), "k_ptr": pointer(cache), "v_ptr": pointer(cache), "slot_ptr": "*i64:16"}
    types |= {"slots": "i64", "rows": "i32", "heads": "i32", "k_factor": "fp32", "v_factor": "fp32"}
    strides = "stride_nt stride_nh stride_ut stride_uh stride_kp stride_kt stride_kh stride_kx stride_vp stride_vt stride_vh"
    types |= dict.fromkeys(strides.split(), "i32:16")
    types |= dict.fromkeys(("stride_ksp", "stride_kst", "stride_ksh", "stride_vsp", "stride_vst", "stride_vsh"), "i32")
    constants: dict[str, object] = {"D": 128, "D_PAD": 128, "DV": 128, "DV_PAD": 128, "P": 16, "BLOCK_H": 8, "QMAX": _LARGEST.get(cache, 0.0)}
    constants |= {"SPLIT_X": 8 if token_scale else 0, "K_TOKEN_SCALE": token_scale, "V_TOKEN_SCALE": token_scale, "SCAN": _SCANNED, "PDL": pdl}
    if token_scale:
        types |= {"k_scale_ptr": "*fp32:16", "v_scale_ptr": "*fp32:16", "stride_vd": "i32:16"}
    else:
        constants |= {"k_scale_ptr": None, "v_scale_ptr": None, "stride_vd": 1}
    if many:
        types["last_ptr"] = "*i32:16"
    else:
        constants["last_ptr"] = None
    names = [str(d).removeprefix("torch.") for d in (dtype, cache)]
    name = f"write_kv/{names[0]}->{names[1]}{'+token' if token_scale else ''}{'+many' if many else ''}"
    refused, unserved = refusals(cache)
    return CompileCase(
        name, write_kernel, types, constants, 4, 1, False, refused, unserved, cache is dtype, ("sm_90",) if pdl else ("sm_80", "gfx942")
    )
