# mypy: allow-untyped-defs
"""Quantised experts for very few tokens: `moe_slots` for codes of int8 or e4m3.

Both kernels come behind one that quantises their rows (the first, where x is not quantised yet), and ask L2 for their
weights while that one runs: which experts those are was known before it. A tile is (outputs, groups of K, a group), so that
scales of blocks of 128 x 128 and scales that span K (one group) are the same code. Products of codes are exact in fp32; each
is multiplied by its scales before it is added up, so that threads exchange nothing before the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.launch import pdl_begin, pdl_options, pdl_release, pdl_wait, prefetch_rows
from hal.kernels.moe_activation import activate
from hal.kernels.moe_configs import SlotConfig
from hal.kernels.moe_experts import Activation, Scales, scale_strides
from hal.kernels.moe_quantise import GROUP
from hal.kernels.moe_routing import VARYING, Routing, local_expert
from hal.kernels.scratch import current_device
from hal.kernels.tuning import supports_pdl

__all__ = ["quantised_slot_down", "quantised_slot_down_kernel", "quantised_slot_gate_up", "quantised_slot_gate_up_kernel"]


@triton.jit
def _products(
    x_ptrs, w_ptrs, x_scales, w_scales, row, row_ok, block, column, depth, factor, stride_xsk, stride_wsn, stride_wsk,
    K_GROUP: tl.constexpr, N_GROUP: tl.constexpr,
):  # fmt: skip
    """`factor * x * w` of rows (R,) of the weights, blocks of K (G,) and columns (G, K_GROUP): (R, G, K_GROUP) fp32."""
    ok = row_ok[:, None, None] & (column < depth)[None, :, :]
    block_ok = block * K_GROUP < depth
    scale = tl.load(x_scales + block * stride_xsk, mask=block_ok, other=0.0)[None, :, None] * factor
    at = w_scales + (row // N_GROUP)[:, None, None] * stride_wsn + block[None, :, None] * stride_wsk
    scale *= tl.load(at, mask=row_ok[:, None, None] & block_ok[None, :, None], other=0.0)
    x = tl.load(x_ptrs, mask=ok, other=0.0).to(tl.float32)
    return (tl.load(w_ptrs, mask=ok, other=0.0).to(tl.float32) * x) * scale


@triton.jit(do_not_specialize=VARYING)
def quantised_slot_gate_up_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, factors_ptr, inter_ptr, alpha, limit, columns, depth,
    stride_xt, stride_we, stride_wn, stride_xst, stride_xsk, stride_wse, stride_wsn, stride_wsk, stride_be, stride_ft, stride_im,
    ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, K_GROUP: tl.constexpr,
    N_GROUP: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS elements of the intermediate of one slot; a step has GROUPS groups of K_GROUP columns."""
    BLOCK_K: tl.constexpr = GROUPS * K_GROUP
    if PREFETCH:
        pdl_release(PDL)
    else:
        pdl_begin(PDL)
    tiles = tl.cdiv(columns, ROWS)
    slot = tl.program_id(0) // tiles
    expert = local_expert(slot, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
    if expert < local:
        token = (slot // top_k).to(tl.int64)
        wide = expert.to(tl.int64)
        row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
        row_ok = row < columns
        gate_row = 2 * row if INTERLEAVED else row
        up_row = 2 * row + 1 if INTERLEAVED else columns + row
        weights = w_ptr + wide * stride_we
        if PREFETCH:
            prefetch_rows(weights, tl.where(row_ok, gate_row, 0), depth, stride_wn, BLOCK_K)
            prefetch_rows(weights, tl.where(row_ok, up_row, 0), depth, stride_wn, BLOCK_K)
            pdl_wait(PDL)
        group = tl.arange(0, GROUPS)
        step = group[:, None] * K_GROUP + tl.arange(0, K_GROUP)[None, :]
        gate_ptrs = weights + gate_row.to(tl.int64)[:, None, None] * stride_wn + step[None, :, :]
        up_ptrs = weights + up_row.to(tl.int64)[:, None, None] * stride_wn + step[None, :, :]
        # Each thread loads what it multiplies: a copy of x for every row.
        x_ptrs = x_ptr + token * stride_xt + tl.zeros((ROWS,), tl.int32)[:, None, None] + step[None, :, :]
        x_scales = x_scales_ptr + token * stride_xst
        w_scales = w_scales_ptr + wide * stride_wse
        gate = tl.zeros((ROWS, GROUPS, K_GROUP), tl.float32)
        up = tl.zeros((ROWS, GROUPS, K_GROUP), tl.float32)
        for begin in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            block = begin // K_GROUP + group
            gate += _products(
                x_ptrs + begin, gate_ptrs + begin, x_scales, w_scales, gate_row, row_ok, block, begin + step, depth, 1.0,
                stride_xsk, stride_wsn, stride_wsk, K_GROUP, N_GROUP,
            )  # fmt: skip
            up += _products(
                x_ptrs + begin, up_ptrs + begin, x_scales, w_scales, up_row, row_ok, block, begin + step, depth, 1.0,
                stride_xsk, stride_wsn, stride_wsk, K_GROUP, N_GROUP,
            )  # fmt: skip
        gates = tl.sum(tl.reshape(gate, (ROWS, BLOCK_K)), 1)
        ups = tl.sum(tl.reshape(up, (ROWS, BLOCK_K)), 1)
        if factors_ptr is not None:
            factor = tl.load(factors_ptr + token * stride_ft + slot % top_k)
            gates *= factor
            ups *= factor
        if bias_ptr is not None:
            gates += tl.load(bias_ptr + wide * stride_be + gate_row, mask=row_ok, other=0.0).to(tl.float32)
            ups += tl.load(bias_ptr + wide * stride_be + up_row, mask=row_ok, other=0.0).to(tl.float32)
        result = activate(gates, ups, alpha, limit, ACTIVATION)
        tl.store(inter_ptr + slot.to(tl.int64) * stride_im + row, result.to(inter_ptr.dtype.element_ty), mask=row_ok)
    elif PREFETCH:
        pdl_wait(PDL)


@triton.jit(do_not_specialize=VARYING)
def quantised_slot_down_kernel(
    inter_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, weights_ptr, out_ptr, columns, depth,
    stride_im, stride_we, stride_wn, stride_xst, stride_xsk, stride_wse, stride_wsn, stride_wsk, stride_be, stride_ft, stride_ot,
    ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, K_GROUP: tl.constexpr, N_GROUP: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS elements of the output of one token; `WHOLE`: one step covers K."""
    BLOCK_K: tl.constexpr = GROUPS * K_GROUP
    pdl_release(PDL)
    tiles = tl.cdiv(columns, ROWS)
    token = tl.program_id(0) // tiles
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    row_ok = row < columns
    if PREFETCH:
        for j in range(0, top_k):
            expert = local_expert(token * top_k + j, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
            if expert < local:
                prefetch_rows(w_ptr + expert.to(tl.int64) * stride_we, tl.where(row_ok, row, 0), depth, stride_wn, BLOCK_K)
    pdl_wait(PDL)
    group = tl.arange(0, GROUPS)
    step = group[:, None] * K_GROUP + tl.arange(0, K_GROUP)[None, :]
    row_offsets = row.to(tl.int64)[:, None, None] * stride_wn + step[None, :, :]
    x_offsets = tl.zeros((ROWS,), tl.int32)[:, None, None] + step[None, :, :]
    acc = tl.zeros((ROWS, GROUPS, K_GROUP), tl.float32)
    biases = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        expert = local_expert(slot, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
        used = expert < local
        wide = tl.where(used, expert, 0).to(tl.int64)
        end = tl.where(used, depth, 0)
        factor = 1.0
        if weights_ptr is not None:
            factor = tl.load(weights_ptr + token.to(tl.int64) * stride_ft + j, mask=used, other=0.0)
        if bias_ptr is not None:
            biases += factor * tl.load(bias_ptr + wide * stride_be + row, mask=row < tl.where(used, columns, 0), other=0.0).to(tl.float32)
        x_scales = x_scales_ptr + slot.to(tl.int64) * stride_xst
        w_scales = w_scales_ptr + wide * stride_wse
        x_ptrs = inter_ptr + slot.to(tl.int64) * stride_im + x_offsets
        w_ptrs = w_ptr + wide * stride_we + row_offsets
        if WHOLE:
            acc += _products(
                x_ptrs, w_ptrs, x_scales, w_scales, row, row_ok, group, step, end, factor, stride_xsk, stride_wsn, stride_wsk, K_GROUP, N_GROUP
            )
        else:
            for begin in tl.range(0, end, BLOCK_K, num_stages=STAGES):
                acc += _products(
                    x_ptrs + begin, w_ptrs + begin, x_scales, w_scales, row, row_ok, begin // K_GROUP + group, begin + step, end, factor,
                    stride_xsk, stride_wsn, stride_wsk, K_GROUP, N_GROUP,
                )  # fmt: skip
    result = tl.sum(tl.reshape(acc, (ROWS, BLOCK_K)), 1) + biases
    tl.store(out_ptr + token.to(tl.int64) * stride_ot + row, result.to(out_ptr.dtype.element_ty), mask=row_ok)


def _shared(x: Tensor, weight: Tensor, scales: Scales, config: SlotConfig) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """(strides of x, the weights and their scales, (groups of a step, columns of a group, rows of a scale))."""
    blocks = scales.weight.dim() == 3
    strides = (x.stride(0), weight.stride(0), weight.stride(1), *(*scales.rows.stride(), 0)[:2], *scale_strides(scales.weight))
    return strides, (max(1, config.block_k // GROUP), GROUP, GROUP) if blocks else (1, config.block_k, 1)


def _fitting(config: SlotConfig, depth: int) -> SlotConfig:
    """The config with no step far beyond K."""
    return replace(config, block_k=min(config.block_k, max(GROUP, triton.next_power_of_2(depth))))


def quantised_slot_gate_up(
    x: Tensor, weight: Tensor, scales: Scales, inter: Tensor, routing: Routing, config: SlotConfig,
    *, activation: Activation, bias: Tensor | None, factors: Tensor | None, ids_known: bool,
) -> None:  # fmt: skip
    """Write the activated intermediate of each slot that has an expert.

    Args:
        x: (T, H) codes.
        weight: (E, 2I, H) codes, H contiguous.
        scales: of both.
        inter: (T * k, I), written, not quantised.
        routing: what the ids mean.
        config: tile.
        activation: behind the product.
        bias: (E, 2I) or None.
        factors: (T, k) fp32 factors of x, or None.
        ids_known: the kernel before this one has waited for the ids.
    """
    slots, columns = inter.shape
    depth, pdl, config = x.shape[1], supports_pdl(x.device), _fitting(config, x.shape[1])
    strides, groups = _shared(x, weight, scales, config)
    arguments: tuple[Any, ...] = (
        x, weight, scales.rows, scales.weight, bias, factors, inter, activation.alpha, activation.limit, columns, depth,
        *strides, 0 if bias is None else bias.stride(0), 0 if factors is None else factors.stride(0), inter.stride(0), *routing.arguments(),
        activation.name, activation.interleaved, config.rows, *groups, config.stages, config.prefetch and pdl and ids_known, pdl,
    )  # fmt: skip
    with current_device(x.device):
        quantised_slot_gate_up_kernel[(slots * triton.cdiv(columns, config.rows),)](
            *arguments, num_warps=config.warps, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl)
        )


def quantised_slot_down(
    inter: Tensor, weight: Tensor, scales: Scales, out: Tensor, routing: Routing, config: SlotConfig,
    *, bias: Tensor | None, weights: Tensor | None,
) -> None:  # fmt: skip
    """Write the output of each token; right behind a kernel that has waited for the ids.

    Args:
        inter: (T * k, I) codes; rows of skipped slots are not read.
        weight: (E, H, I) codes, I contiguous.
        scales: of both.
        out: (T, H), written.
        routing: what the ids mean.
        config: tile.
        bias: (E, H) or None.
        weights: (T, k) fp32, or None for 1.
    """
    tokens, columns = out.shape
    depth, top_k, pdl = inter.shape[1], routing.ids.shape[1], supports_pdl(out.device)
    config = _fitting(config, depth)
    strides, groups = _shared(inter, weight, scales, config)
    arguments: tuple[Any, ...] = (
        inter, weight, scales.rows, scales.weight, bias, weights, out, columns, depth,
        *strides, 0 if bias is None else bias.stride(0), 0 if weights is None else weights.stride(0), out.stride(0), *routing.arguments(),
        top_k, config.rows, *groups, config.stages, depth <= config.block_k, config.prefetch and pdl, pdl,
    )  # fmt: skip
    with current_device(out.device):
        quantised_slot_down_kernel[(tokens * triton.cdiv(columns, config.rows),)](
            *arguments, num_warps=config.warps, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl)
        )
