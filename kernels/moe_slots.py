# mypy: allow-untyped-defs
"""The experts for very few tokens: two launches, no sorting, no matrix instructions.

With one token the experts' weights are read once and used for one row, so each weight is a multiply-add: programs take some
rows of an expert's weights and reduce them along K. The first kernel makes the activated intermediate of each slot, the
second sums over the choices of a token, in their order, while it reads the down projections, so that nothing is left to
combine. Slots that share an expert read its weights each for itself (the second time mostly from L2): the launcher takes
this way only where that is rare.

The second kernel is placed while the first one drains, and asks L2 for its weights before it waits: they depend on the ids
only, and those were complete before the first kernel passed its wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hal.kernels.launch import pdl_begin, pdl_options, pdl_release, pdl_wait, prefetch_rows
from hal.kernels.moe_activation import activate
from hal.kernels.moe_configs import SlotConfig
from hal.kernels.moe_routing import VARYING, Routing, local_expert
from hal.kernels.scratch import current_device
from hal.kernels.tuning import supports_pdl

__all__ = ["slot_down", "slot_down_kernel", "slot_gate_up", "slot_gate_up_kernel"]


@triton.jit(do_not_specialize=VARYING)
def slot_gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, factors_ptr, inter_ptr, alpha, limit, columns, depth,
    stride_xt, stride_we, stride_wn, stride_wk, stride_be, stride_ft, stride_im,
    ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS elements of the intermediate of one slot."""
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
        step = tl.arange(0, BLOCK_K)
        weights = w_ptr + wide * stride_we
        gate_ptrs = weights + gate_row.to(tl.int64)[:, None] * stride_wn + (step.to(tl.int64) * stride_wk)[None, :]
        up_ptrs = weights + up_row.to(tl.int64)[:, None] * stride_wn + (step.to(tl.int64) * stride_wk)[None, :]
        gate = tl.zeros((ROWS, BLOCK_K), tl.float32)
        up = tl.zeros((ROWS, BLOCK_K), tl.float32)
        for begin in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            step_ok = begin + step < depth
            ok = row_ok[:, None] & step_ok[None, :]
            x = tl.load(x_ptr + token * stride_xt + begin + step, mask=step_ok, other=0.0).to(tl.float32)
            gate += tl.load(gate_ptrs, mask=ok, other=0.0).to(tl.float32) * x[None, :]
            up += tl.load(up_ptrs, mask=ok, other=0.0).to(tl.float32) * x[None, :]
            gate_ptrs += BLOCK_K * stride_wk
            up_ptrs += BLOCK_K * stride_wk
        gates = tl.sum(gate, 1)
        ups = tl.sum(up, 1)
        if factors_ptr is not None:
            factor = tl.load(factors_ptr + token * stride_ft + slot % top_k)
            gates *= factor
            ups *= factor
        if bias_ptr is not None:
            gates += tl.load(bias_ptr + wide * stride_be + gate_row, mask=row_ok, other=0.0).to(tl.float32)
            ups += tl.load(bias_ptr + wide * stride_be + up_row, mask=row_ok, other=0.0).to(tl.float32)
        result = activate(gates, ups, alpha, limit, ACTIVATION)
        tl.store(inter_ptr + slot.to(tl.int64) * stride_im + row, result.to(inter_ptr.dtype.element_ty), mask=row_ok)


@triton.jit(do_not_specialize=VARYING)
def slot_down_kernel(
    inter_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, columns, depth,
    stride_im, stride_we, stride_wn, stride_wk, stride_be, stride_ft, stride_ot,
    ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS elements of the output of one token; `WHOLE`: BLOCK_K covers K."""
    pdl_release(PDL)
    tiles = tl.cdiv(columns, ROWS)
    token = tl.program_id(0) // tiles
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    row_ok = row < columns
    if PREFETCH:
        for j in range(0, top_k):
            expert = local_expert(token * top_k + j, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local)
            if expert < local:
                prefetch_rows(w_ptr + expert.to(tl.int64) * stride_we, tl.minimum(row, columns - 1), depth, stride_wn, BLOCK_K)
    pdl_wait(PDL)
    step = tl.arange(0, BLOCK_K)
    offsets = row.to(tl.int64)[:, None] * stride_wn + (step.to(tl.int64) * stride_wk)[None, :]
    acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
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
        base = inter_ptr + slot.to(tl.int64) * stride_im
        pointers = w_ptr + wide * stride_we + offsets
        if WHOLE:
            step_ok = step < end
            x = tl.load(base + step, mask=step_ok, other=0.0).to(tl.float32) * factor
            acc += tl.load(pointers, mask=row_ok[:, None] & step_ok[None, :], other=0.0).to(tl.float32) * x[None, :]
        else:
            for begin in tl.range(0, end, BLOCK_K, num_stages=STAGES):
                step_ok = begin + step < end
                x = tl.load(base + begin + step, mask=step_ok, other=0.0).to(tl.float32) * factor
                acc += tl.load(pointers, mask=row_ok[:, None] & step_ok[None, :], other=0.0).to(tl.float32) * x[None, :]
                pointers += BLOCK_K * stride_wk
    result = tl.sum(acc, 1) + biases
    tl.store(out_ptr + token.to(tl.int64) * stride_ot + row, result.to(out_ptr.dtype.element_ty), mask=row_ok)


def slot_gate_up(
    x: Tensor,
    weight: Tensor,
    inter: Tensor,
    routing: Routing,
    config: SlotConfig,
    *,
    activation: str,
    interleaved: bool,
    bias: Tensor | None,
    factors: Tensor | None,
    alpha: float,
    limit: float | None,
) -> None:
    """Write the activated intermediate of each slot that has an expert.

    Args:
        x: (T, H).
        weight: (E, 2I, H), either of the last dimensions contiguous.
        inter: (T * k, I), written.
        routing: what the ids mean.
        config: tile.
        activation: one of `moe_activation.ACTIVATIONS`.
        interleaved: gate and up rows alternate.
        bias: (E, 2I) or None.
        factors: (T, k) fp32 factors of x, or None.
        alpha: of swiglu_oai.
        limit: clamp or None.
    """
    slots, columns = inter.shape
    pdl = supports_pdl(x.device)
    with current_device(x.device):
        slot_gate_up_kernel[(slots * triton.cdiv(columns, config.rows),)](
            x, weight, bias, factors, inter, alpha, limit, columns, x.shape[1],
            x.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0), 0 if factors is None else factors.stride(0), inter.stride(0),
            *routing.arguments(), activation, interleaved, config.rows, config.block_k, config.stages, pdl,
            num_warps=config.warps, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
        )  # fmt: skip


def slot_down(
    inter: Tensor, weight: Tensor, out: Tensor, routing: Routing, config: SlotConfig, *, bias: Tensor | None, weights: Tensor | None
) -> None:
    """Write the output of each token.

    Args:
        inter: (T * k, I); rows of skipped slots are not read.
        weight: (E, H, I), either of the last dimensions contiguous.
        out: (T, H), written.
        routing: what the ids mean.
        config: tile.
        bias: (E, H) or None.
        weights: (T, k) fp32, or None for 1.
    """
    tokens, columns = out.shape
    depth, top_k = inter.shape[1], routing.ids.shape[1]
    pdl = supports_pdl(out.device)
    with current_device(out.device):
        slot_down_kernel[(tokens * triton.cdiv(columns, config.rows),)](
            inter, weight, bias, weights, out, columns, depth,
            inter.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0), 0 if weights is None else weights.stride(0), out.stride(0),
            *routing.arguments(), top_k, config.rows, config.block_k, config.stages, depth <= config.block_k,
            config.prefetch and pdl and weight.stride(2) == 1, pdl,
            num_warps=config.warps, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
        )  # fmt: skip
