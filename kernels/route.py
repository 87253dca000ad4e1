"""Launcher of `route` and `topk_softmax`: one kernel launch, whatever is asked."""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal.kernels.launch import pdl_options
from hal.kernels.repeat import Repeats
from hal.kernels.route_kernel import MOST_CHOSEN, MOST_EXPERTS, MOST_SORTED, route_kernel
from hal.kernels.route_keys import PACKED_BITS
from hal.kernels.route_large import route_large_kernel
from hal.kernels.route_tuning import SORT_CONFIG, SORT_FROM, RouteConfig, route_config, sort_warps
from hal.kernels.scratch import current_device
from hal.kernels.tuning import supports_pdl

__all__ = ["LARGE_WARPS", "RouteConstants", "large_constants", "launch_route", "route", "route_constants", "sorts_rows"]

#: Warps of a program of the large kernel, and experts that it looks at together.
LARGE_WARPS = 8
_LARGE_BLOCK = 2048
_LANES = 32
_REPEATS = Repeats("logits_ptr", "bias_ptr", "weights_ptr", "ids_ptr")
_thread = threading.get_ident


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scale: float = 1.0,
    weights: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose k experts of every token; arguments as in the contract of `route`.

    Args:
        logits: (T, E) fp32, fp16 or bf16, last dimension contiguous.
        top_k: k.
        scoring: `softmax` or `sigmoid`.
        renormalize: divide the weights by their sum.
        correction_bias: (E,) fp32, contiguous, or None.
        num_groups: groups of experts.
        top_groups: groups that experts are chosen from.
        group_score: `max` or `top2`.
        scale: factor of the weights.
        weights: (T, k) fp32, last dimension contiguous, or None.
        ids: (T, k) int32, last dimension contiguous, or None.

    Returns:
        (weights, ids).
    """
    tokens, device = logits.shape[0], logits.device
    if weights is None:
        weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    if ids is None:
        ids = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    if tokens == 0:
        return weights, ids
    if not logits.is_cuda:
        launch_route(logits, top_k, scoring, renormalize, correction_bias, num_groups, top_groups, group_score, scale, weights, ids)
        return weights, ids
    key = (
        _thread(), logits.get_device(), logits.dtype, logits.shape, logits.stride(), top_k, scoring, renormalize, correction_bias is None,
        num_groups, top_groups, group_score, scale, weights.stride(), ids.stride(),
    )  # fmt: skip
    pointers = (logits, weights, ids) if correction_bias is None else (logits, correction_bias, weights, ids)
    if not _REPEATS.launch(key, pointers):
        done = launch_route(logits, top_k, scoring, renormalize, correction_bias, num_groups, top_groups, group_score, scale, weights, ids)
        _REPEATS.remember(key, *done, pdl=supports_pdl(device))
    return weights, ids


def launch_route(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    correction_bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    group_score: str,
    scale: float,
    weights: Tensor,
    ids: Tensor,
    config: RouteConfig | None = None,
) -> tuple[Any, tuple[Any, ...], int]:
    """Launch through Triton; return the compiled kernel, its arguments and the number of programs.

    Args:
        logits: as in `route`; the others too, `weights` and `ids` present.
        config: how to run the kernel for few experts; None for the tuned choice.
    """
    tokens, experts = logits.shape
    groups, chosen_groups = (1, 1) if top_groups == num_groups else (num_groups, top_groups)
    pdl, padded = supports_pdl(logits.device), _padded(groups) * _padded(experts // groups)
    modes = (groups, chosen_groups, scoring == "sigmoid", renormalize, group_score == "top2" and groups > 1)
    outputs = (weights, ids, float(scale), tokens)
    options: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": False} | pdl_options(pdl)
    arguments: tuple[Any, ...]
    with current_device(logits.device):
        sorts = sorts_rows(padded, top_k)
        if padded > MOST_EXPERTS and not sorts:
            arguments = (
                logits, correction_bias, *outputs, experts // groups, top_k, logits.stride(0), weights.stride(0), ids.stride(0),
                *modes, *large_constants(experts, groups), pdl,
            )  # fmt: skip
            return route_large_kernel[(tokens,)](*arguments, num_warps=LARGE_WARPS, **options), arguments, tokens
        config = config or (SORT_CONFIG if sorts else route_config(padded, groups > 1, tokens))
        constants = route_constants(experts, top_k, groups, logits.stride(0), logits.element_size(), correction_bias is not None, config)
        arguments = (
            logits, correction_bias, *outputs, logits.stride(0) // constants.VEC, weights.stride(0), ids.stride(0),
            experts, top_k, *modes, *constants, pdl,
        )  # fmt: skip
        programs = -(-tokens // config.rows)
        return route_kernel[(programs,)](*arguments, num_warps=sort_warps(padded) if sorts else 1, **options), arguments, programs


def sorts_rows(padded: int, top_k: int) -> bool:
    """Whether rows of `padded` experts are sorted for k winners; if not, they are searched for each."""
    return padded <= MOST_SORTED and (top_k > MOST_CHOSEN or (padded > MOST_EXPERTS and top_k >= SORT_FROM))


class RouteConstants(NamedTuple):
    """Constants of `route_kernel` that its config and the sizes decide, in its order and by its names."""

    GROUPS_PAD: int
    SIZE_PAD: int
    TOP_K_PAD: int
    ROWS: int
    VEC: int
    ID_BITS: int
    UNROLL: int
    EARLY: bool
    SORTED: bool


@lru_cache(maxsize=4096)
def route_constants(experts: int, top_k: int, groups: int, stride: int, element_size: int, biased: bool, config: RouteConfig) -> RouteConstants:
    """The constants for logits of a row stride and an element size.

    A lane holds at most what 16 aligned bytes do, and a 32nd of a row if a row has 32 experts.
    """
    size = experts // groups
    groups_pad, size_pad = _padded(groups), _padded(size)
    padded = groups_pad * size_pad
    shift = 0 if groups == 1 or size == size_pad else size  # groups are moved apart: each must begin aligned
    vec = math.gcd(config.vec, 16 // element_size, padded if padded < _LANES else padded // _LANES, stride, shift)
    id_bits = PACKED_BITS if element_size == 2 and not biased else config.packed // 2
    sorts = sorts_rows(padded, top_k)
    top_k_pad, unroll = (1, 1) if sorts else (_padded(top_k), min(config.unroll, top_k))  # not looked at where rows are sorted
    return RouteConstants(groups_pad, size_pad, top_k_pad, config.rows, vec, id_bits, unroll, config.early, sorts)


def large_constants(experts: int, groups: int) -> tuple[int, int]:
    """`GROUPS_PAD` and `BLOCK` of `route_large_kernel`."""
    return _padded(groups), min(_padded(experts // groups), _LARGE_BLOCK)


def _padded(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
