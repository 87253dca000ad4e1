"""Launcher of the grouped product, and the op `group_gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hal.kernels.launch import pdl_options
from hal.kernels.moe_configs import GemmConfig
from hal.kernels.moe_gemm import moe_gemm_kernel
from hal.kernels.moe_quantise import QMAX, Rows, empty_rows, quantise
from hal.kernels.moe_quantised_tuning import quantised_config
from hal.kernels.moe_tiles import list_tiles, most_tiles
from hal.kernels.moe_tuning import fitted, moe_config, multiprocessors
from hal.kernels.scratch import current_device
from hal.kernels.tuning import interpreting, supports_pdl

__all__ = ["Activation", "Gather", "Scales", "group_gemm", "grouped_product", "scale_strides"]

#: Programs per multiprocessor that may be placed before the kernel before is done.
_EARLY = 4


@dataclass(frozen=True)
class Activation:
    """Gated activation behind a product: its name, whether gate and up rows alternate, slope (only read by swiglu_oai) and clamp."""

    name: str
    interleaved: bool
    alpha: float
    limit: float | None


#: A product without one.
_NONE = Activation("", False, 1.0, None)


@dataclass(frozen=True)
class Gather:
    """Where the rows of a product come from.

    Attributes:
        sorted_slots: slot of each sorted row; row `slot // top_k` of x is used.
        top_k: k.
        factors: (T, k) fp32 factors of the rows, or None.
    """

    sorted_slots: Tensor
    top_k: int
    factors: Tensor | None = None


@dataclass(frozen=True)
class Scales:
    """fp32 scales of a product of codes.

    Attributes:
        rows: of x: one of a row, or (rows, ceil(K / 128)) beside blocks of the weights.
        weight: (E,), (E, N), or (E, ceil(N / 128), ceil(K / 128)).
        result: (M, ceil(N / 128)), written: the result is quantised by groups of 128 columns; None for no.
    """

    rows: Tensor
    weight: Tensor
    result: Tensor | None = None


def scale_strides(scales: Tensor) -> tuple[int, int, int]:
    """Strides of the experts, outputs and blocks of K of scales that may have one or two of these dimensions only."""
    strides = (*scales.stride(), 0, 0)
    return strides[0], strides[1], strides[2]


def _scale_arguments(scales: Scales | None) -> tuple[tuple[Any, ...], tuple[int, ...], str]:
    """(pointers, strides, kind) of scales, as the kernel takes them."""
    if scales is None:
        return (None, None, None), (0,) * 6, ""
    row_strides = (*scales.rows.stride(), 0)
    strides = (*row_strides[:2], *scale_strides(scales.weight), 0 if scales.result is None else scales.result.stride(0))
    return (scales.rows, scales.weight, scales.result), strides, "block" if scales.weight.dim() == 3 else "row"


def _described(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: list[int]) -> TensorDescriptor | None:
    """TMA descriptor of a view, or None where the hardware cannot address it."""
    size = tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in strides[:-1]) and max(shape) < 2**31
    return TensorDescriptor(tensor, list(shape), list(strides), block) if aligned and strides[-1] == 1 and min(shape) > 0 else None


def _weights_described(weight: Tensor, config: GemmConfig, paired: bool) -> TensorDescriptor | None:
    """Descriptor whose tile has `block_n` rows of one expert, half of them of the second half of N if `paired`."""
    experts, n, k = weight.shape
    stride_e, stride_n, stride_k = weight.stride()
    k_inner = stride_k == 1
    n_block = [2, config.block_n // 2] if paired else [config.block_n]
    n_shape = (2, n // 2) if paired else (n,)
    n_strides = (n // 2 * stride_n, stride_n) if paired else (stride_n,)
    if k_inner:
        return _described(weight, (experts, *n_shape, k), (stride_e, *n_strides, 1), [1, *n_block, config.block_k])
    return _described(weight, (experts, k, *n_shape), (stride_e, stride_k, *n_strides), [1, config.block_k, *n_block])


def grouped_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiles: Tensor,
    bound: int,
    block_m: int,
    config: GemmConfig,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    gather: Gather | None = None,
    scales: Scales | None = None,
    tiles_known: bool = False,
) -> None:
    """Multiply sorted rows by the weights of their expert.

    Args:
        x: (M, K) sorted rows, or with `gather` (T, K) in any order.
        weight: (E, N, K), either of the last dimensions contiguous.
        out: (M, N), with `activation` (M, N / 2), written.
        tiles: the list of tiles of `block_m` rows (`moe_index`).
        bound: most tiles that it can hold.
        block_m: rows of a tile.
        config: how.
        bias: (E, N) or None.
        activation: None for none.
        gather: None if x is sorted.
        scales: of quantised x and weights; None for others.
        tiles_known: the kernel before this one has waited for the list of tiles.
    """
    device, columns, depth = x.device, out.shape[1], weight.shape[2]
    if bound == 0 or columns == 0:
        return
    act = activation or _NONE
    k_inner = weight.stride(2) == 1
    descriptor = _weights_described(weight, config, act.name != "" and not act.interleaved) if config.w_tma else None
    rows = _described(x, (x.shape[0], depth), (x.stride(0), 1), [block_m, config.block_k]) if config.x_tma and gather is None else None
    out_n = config.block_n // 2 if activation else config.block_n
    column_tiles = triton.cdiv(columns, out_n)
    programs = bound * column_tiles
    if config.programs:
        programs = min(programs, config.programs * multiprocessors(device))
    factors = gather.factors if gather else None
    pointers, strides, kind = _scale_arguments(scales)
    halves = kind == "block" and (act.name == "" or act.interleaved or columns % out_n == 0)
    upcast = interpreting() and weight.element_size() > 1  # products of codes are right there
    pdl = supports_pdl(device)
    ahead = config.ahead if tiles_known and pdl and k_inner else 0
    arguments: tuple[Any, ...] = (
        x, weight, rows, descriptor, out, bias, factors, gather.sorted_slots if gather else None, tiles, *pointers,
        act.alpha, act.limit, columns, depth, gather.top_k if gather else 1, _EARLY * multiprocessors(device),
        x.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0), 0 if factors is None else factors.stride(0), out.stride(0), *strides,
        act.name, act.interleaved, block_m, config.block_n, config.block_k, config.group_m, config.swap,
        k_inner, columns % out_n == 0, depth % config.block_k == 0, config.programs > 0, ahead, upcast,
        kind, halves, QMAX.get(out.dtype, 0.0), pdl,
    )  # fmt: skip
    with current_device(device):
        moe_gemm_kernel[(programs,)](*arguments, num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True, **pdl_options(pdl))


def group_gemm(
    x: Tensor,
    weight: Tensor,
    expert_sizes: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    w_scales: Tensor | None = None,
    x_scales: Tensor | None = None,
) -> None:
    """The op `group_gemm`.

    Args:
        x: (M, K), rows sorted by expert; beside quantised weights of their dtype with `x_scales`, or a float dtype.
        weight: (E, N, K), either of the last dimensions contiguous.
        expert_sizes: (E,) int32 on the device.
        out: (M, N), written up to the sum of the sizes.
        bias: (E, N) or None.
        w_scales: (E,), (E, N) or (E, ceil(N / 128), ceil(K / 128)) fp32 of quantised weights, else None.
        x_scales: (M,), or (M, ceil(K / 128)) beside scales of blocks, of quantised x, else None.
    """
    rows, experts = x.shape[0], weight.shape[0]
    if rows == 0 or experts == 0 or out.shape[1] == 0:
        return
    scales = None
    if w_scales is None:
        config = moe_config(x.device, x.element_size(), rows, experts)
    else:
        blocks = w_scales.dim() == 3
        config = quantised_config(x.device, weight.dtype, blocks, rows, experts)
        given = quantise(x, empty_rows("x", rows, x.shape[1], weight.dtype, blocks, x.device)) if x_scales is None else Rows(x, x_scales)
        x, scales = given.codes, Scales(given.scales, w_scales)
    tiles = list_tiles(expert_sizes, rows, config.block_m)
    bound = most_tiles(rows, experts, config.block_m)
    down = config.down if scales is not None else fitted(config.down, out.shape[1], x.shape[1])
    grouped_product(x, weight, out, tiles, bound, config.block_m, down, bias=bias, scales=scales)
