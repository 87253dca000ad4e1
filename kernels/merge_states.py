# mypy: allow-untyped-defs
"""`merge_states`: two attention results over disjoint keys -> the result over their union.

`out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b + e^sink)`, in fp32. One program per token and tile of
heads; it reads all that it needs before it writes, so `out` and `lse` may be one of the inputs. An empty part (LSE
-inf or +inf) is not read, and a part merged with an empty one comes out bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.compile_case import CompileCase, pointer
from hal.kernels.scratch import current_device

__all__ = ["compile_cases", "merge_kernel", "merge_states"]

_TILE_ELEMENTS = 2048


@triton.jit(do_not_specialize=["heads"])
def merge_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, sinks_ptr, out_ptr, lse_ptr, heads,
    stride_at, stride_ah, stride_lat, stride_lah, stride_bt, stride_bh, stride_lbt, stride_lbh, stride_ot, stride_oh, stride_lt,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_H heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    row_ok = head < heads
    d = tl.arange(0, DV_PAD)
    lse_a = tl.load(lse_a_ptr + token * stride_lat + head * stride_lah, mask=row_ok, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + token * stride_lbt + head * stride_lbh, mask=row_ok, other=float("-inf"))
    lse_a = tl.where(lse_a == float("inf"), float("-inf"), lse_a)
    lse_b = tl.where(lse_b == float("inf"), float("-inf"), lse_b)
    has_a = row_ok & (lse_a != float("-inf"))
    has_b = row_ok & (lse_b != float("-inf"))
    columns = (d < DV)[None, :]
    out_a = tl.load(out_a_ptr + token * stride_at + (head * stride_ah)[:, None] + d[None, :], mask=has_a[:, None] & columns, other=0.0)
    out_b = tl.load(out_b_ptr + token * stride_bt + (head * stride_bh)[:, None] + d[None, :], mask=has_b[:, None] & columns, other=0.0)
    some = has_a | has_b
    peak = tl.maximum(lse_a, lse_b)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf"))
        peak = tl.maximum(peak, sink)
    peak = tl.where(some, peak, 0.0)
    weight_a = tl.exp(lse_a - peak)
    weight_b = tl.exp(lse_b - peak)
    total = weight_a + weight_b
    if sinks_ptr is not None:
        total += tl.exp(sink - peak)
    total = tl.where(some, total, 1.0)
    merged = out_a.to(tl.float32) * weight_a[:, None] + out_b.to(tl.float32) * weight_b[:, None]
    merged = tl.div_rn(merged, tl.broadcast_to(total[:, None], merged.shape))
    result = tl.where(some, tl.where(total == 1.0, peak, peak + tl.log(total)), float("-inf"))
    tl.debug_barrier()
    tl.store(
        out_ptr + token * stride_ot + (head * stride_oh)[:, None] + d[None, :], merged.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & columns
    )
    tl.store(lse_ptr + token * stride_lt + head, result, mask=row_ok)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Write the merge of two states.

    Args:
        out_a: (T, H, Dv), last dimension contiguous.
        lse_a: (T, H) fp32, any strides, natural logarithm; -inf or +inf is empty.
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: (T, H, Dv), may be `out_a` or `out_b`.
        lse: (T, H) fp32, last dimension contiguous, may be `lse_a` or `lse_b`.
        sinks: (H,) fp32 or None.
    """
    tokens, heads, head_dim = out_a.shape
    if tokens == 0 or heads == 0:
        return
    padded = 1 << (head_dim - 1).bit_length()
    block = min(1 << (heads - 1).bit_length(), max(1, _TILE_ELEMENTS // padded))
    with current_device(out_a.device):
        merge_kernel[(tokens, triton.cdiv(heads, block))](
            out_a, lse_a, out_b, lse_b, sinks, out, lse, heads,
            out_a.stride(0), out_a.stride(1), *lse_a.stride(), out_b.stride(0), out_b.stride(1), *lse_b.stride(),
            out.stride(0), out.stride(1), lse.stride(0),
            head_dim, padded, block,
            num_warps=4, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Each dtype, with and without sinks, into its own dtype and fp32."""
    rows = dict.fromkeys(("stride_at", "stride_ah", "stride_bt", "stride_bh", "stride_ot", "stride_oh"), "i32:16")
    lses = dict.fromkeys(("stride_lat", "stride_lbt", "stride_lt"), "i32") | {"heads": "i32"}
    cases = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for sinks in (False, True):
            types = {"out_a_ptr": pointer(dtype), "out_b_ptr": pointer(dtype), "out_ptr": pointer(torch.float32 if sinks else dtype)}
            types |= dict.fromkeys(("lse_a_ptr", "lse_b_ptr", "lse_ptr"), "*fp32:16") | rows | lses
            constants: dict[str, object] = {"stride_lah": 1, "stride_lbh": 1, "DV": 128, "DV_PAD": 128, "BLOCK_H": 16}
            if sinks:
                types["sinks_ptr"] = "*fp32:16"
            else:
                constants["sinks_ptr"] = None
            name = f"merge/{str(dtype).removeprefix('torch.')}{'+sinks' if sinks else ''}"
            cases.append(CompileCase(name, merge_kernel, types, constants, warps=4, stages=1, fp_fusion=False, no_spills=True))
    return cases
