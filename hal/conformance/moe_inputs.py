"""Calls of the expert pipeline as data, and the arguments made from them: random values, and NaN wherever no call may look."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.conformance import moe_oracle as oracle
from hal.conformance.caches import filled, poison_value
from hal.conformance.cases import DTYPES
from hal.conformance.inputs import Built, strided_slice
from hal.conformance.quantised import QMAX, nearest_codes
from hal.conformance.tensors import mapped
from hal.ops.moe_checks import BLOCK, MoeIndex

__all__ = ["GARBAGE", "Moe", "build_moe", "expert_weight", "gemm_args", "index_of", "rows_of"]

#: Ids of no expert, whatever the number of experts.
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(frozen=True)
class Moe:
    """One `fused_moe` call, as data. Names are those of the contract; the rest is how ids and memory look.

    Attributes:
        tokens, experts, top_k, hidden, inter: T, E, k, H, I.
        dtype: of x and of unquantised weights. quantised: "", int8 or e4m3. scales: tensor, channel or block.
        x_quantised: x comes quantised.
        biases: both biases, of dtype `bias_dtype` ("" for that of x).
        routing: random (distinct ids), one (every token on expert 0), few (two experts only), repeats (ids drawn with
            repetition), garbage (every third id is none), nobody (no id is any), foreign (with a placement: all ids foreign),
            balanced (expert s % E of slot s).
        placement: "", range, map (not contiguous), nothing (a range of no expert).
        valid: num_valid_tokens. storage: of the weights: compact, transposed, padded or transposed_padded.
        x_storage: compact or padded. out: new, given or strided.
    """

    id: str
    tokens: int = 7
    experts: int = 6
    top_k: int = 2
    hidden: int = 32
    inter: int = 24
    dtype: str = "fp32"
    quantised: str = ""
    scales: str = "channel"
    x_quantised: bool = False
    activation: str = "silu"
    gate_up: str = "concat"
    biases: bool = False
    bias_dtype: str = ""
    alpha: float | None = None
    limit: float | None = None
    routing: str = "random"
    placement: str = ""
    weight_on_input: bool = False
    valid: int | None = None
    storage: str = "compact"
    x_storage: str = "compact"
    out: str = "given"


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _ids(case: Moe, total: int, generator: torch.Generator) -> Tensor:
    """(T, k) int32 ids among `total` experts."""
    tokens, top_k = case.tokens, case.top_k
    if case.routing == "one" or not total:
        return torch.zeros(tokens, top_k, dtype=torch.int32)
    if case.routing == "balanced":
        return (torch.arange(tokens * top_k).view(tokens, top_k) % total).int()
    if case.routing == "nobody":
        return torch.tensor(GARBAGE, dtype=torch.int32)[torch.arange(tokens * top_k).view(tokens, top_k) % len(GARBAGE)]
    if case.routing in ("repeats", "few", "garbage") or top_k > total:
        some = min(total, 2) if case.routing == "few" else total
        ids = torch.randint(some, (tokens, top_k), generator=generator, dtype=torch.int32)
        ids = total - 1 - ids if case.routing == "few" else ids
    else:
        ids = torch.rand(tokens, total, generator=generator).argsort(1)[:, :top_k].int()
    if case.routing == "garbage":
        wrong = torch.tensor((*GARBAGE, total), dtype=torch.int32)
        flat = ids.view(-1)
        flat[::3] = wrong[torch.arange(flat[::3].numel()) % len(wrong)]
    return ids


def _placement(case: Moe, generator: torch.Generator) -> tuple[dict[str, Any], int]:
    """Arguments that say where experts are, and how many there are on all ranks."""
    if case.placement == "range":
        return {"expert_range": (3, 3 + case.experts), "num_experts": case.experts + 5}, case.experts + 5
    if case.placement == "nothing":
        return {"expert_range": (2, 2), "num_experts": 6}, 6
    if case.placement == "map":
        total = 2 * case.experts + 1
        places = torch.full((total,), -1, dtype=torch.int32)
        places[torch.randperm(total, generator=generator)[: case.experts]] = torch.randperm(case.experts, generator=generator).int()
        return {"expert_map": places}, total
    return {}, case.experts


def expert_weight(data: Tensor, storage: str, poison: float) -> Tensor:
    """The weights (E, N, K) lying in memory as `storage` says, with poison in the gaps."""
    if storage == "compact":
        return data
    turned = storage.startswith("transposed")
    shape = (data.shape[0], data.shape[2], data.shape[1]) if turned else tuple(data.shape)
    gap = (1, 3, 8) if storage.endswith("padded") else (0, 0, 0)
    buffer = filled(tuple(n + g for n, g in zip(shape, gap, strict=True)), poison, data.dtype, data.device)
    view = buffer[: shape[0], : shape[1], : shape[2]]
    view = view.transpose(1, 2) if turned else view
    raw = torch.uint8 if data.dtype.itemsize == 1 else data.dtype
    view.view(raw).copy_(data.view(raw))
    return view


def _quantise(case: Moe, data: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales of weights (E, N, K)."""
    dtype = DTYPES[case.quantised]
    experts, outputs, inputs = data.shape
    if case.scales == "block":
        scales = torch.zeros(experts, -(-outputs // BLOCK), -(-inputs // BLOCK))
        for i in range(scales.shape[1]):
            for j in range(scales.shape[2]):
                part = data[:, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                scales[:, i, j] = part.abs().amax((1, 2)) / QMAX[dtype]
    else:
        scales = data.abs().amax(2) / QMAX[dtype] if case.scales == "channel" else data.abs().amax((1, 2)) / QMAX[dtype]
    unit = oracle.dequantised(torch.ones_like(data), scales)
    codes = nearest_codes(data.double() / unit, dtype).reshape(data.shape).view(dtype)
    return codes, scales.float()


def rows_of(case: Moe, data: Tensor, dtype: torch.dtype, poisoned: Tensor, device: torch.device) -> Tensor:
    """Rows in their dtype and storage; those where `poisoned` is true are NaN."""
    data = data.to(dtype)
    data[poisoned] = math.nan
    data = data.to(device)
    if case.x_storage == "compact":
        return data
    view, _ = strided_slice(tuple(data.shape), dtype, device)
    return view.copy_(data)


def _x(case: Moe, data: Tensor, idle: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """x, and its scales if it is quantised; rows where `idle` is true are poisoned."""
    if not case.x_quantised:
        return rows_of(case, data, DTYPES[case.dtype], idle, device), None
    dtype = DTYPES[case.quantised]
    width = BLOCK if case.scales == "block" else max(data.shape[1], 1)
    scales = torch.stack([part.abs().amax(1) / QMAX[dtype] for part in data.split(width, 1)], 1)
    divided = data / scales.repeat_interleave(width, 1)[:, : data.shape[1]]
    codes = nearest_codes(divided, dtype).reshape(data.shape).view(dtype)
    codes.view(torch.uint8)[idle] = filled((1,), poison_value(dtype), dtype, codes.device).view(torch.uint8)
    scales[idle] = math.nan
    return codes.to(device), (scales if case.scales == "block" else scales[:, 0]).float().to(device)


def build_moe(case: Moe, generator: torch.Generator, device: torch.device) -> Built:
    """Return the arguments of `fused_moe`. NaN: weights of experts that nobody chose, x of tokens without an expert, weights of skipped slots."""
    held = 0 if case.placement == "nothing" else case.experts
    where, total = _placement(case, generator)
    ids = _ids(case, total, generator)
    if case.routing == "foreign":
        ids = torch.full_like(ids, 0 if case.placement == "range" else int((where["expert_map"] < 0).nonzero()[0]))
    args: dict[str, Any] = {"ids": ids, **where}
    if case.valid is not None:
        args["num_valid_tokens"] = torch.tensor(case.valid, dtype=torch.int32)
    local = torch.tensor(oracle.slots(args, total, held), dtype=torch.int64).view(case.tokens, case.top_k)
    weights = torch.rand(case.tokens, case.top_k, generator=generator) + 0.1
    weights[local < 0] = math.nan
    args["weights"] = weights
    args["x"], args["x_scales"] = _x(case, _normal(generator, case.tokens, case.hidden), (local < 0).all(1), device)
    idle = torch.tensor([e not in set(local.flatten().tolist()) for e in range(held)], dtype=torch.bool)
    scales = []
    for name, outputs, inputs in (("w_gate_up", 2 * case.inter, case.hidden), ("w_down", case.hidden, case.inter)):
        data = _normal(generator, held, outputs, inputs) / math.sqrt(inputs)
        dtype = DTYPES[case.quantised or case.dtype]
        if case.quantised:
            data, scale = _quantise(case, data)
            scale[idle] = math.nan
            scales.append(scale.to(device))
        data = data.to(dtype)
        raw = torch.uint8 if dtype.itemsize == 1 else dtype
        data.view(raw)[idle] = filled((1,), poison_value(dtype), dtype, data.device).view(raw)
        args[name] = expert_weight(data.to(device), case.storage, poison_value(dtype))
        if case.biases:
            bias = _normal(generator, held, outputs).to(DTYPES[case.bias_dtype or case.dtype])
            bias[idle] = math.nan
            args["b" + name[1:]] = bias
    args = mapped(args, lambda t: t if t.device == device else t.to(device))
    if scales:
        args["w_scales"] = (scales[0], scales[1])
    args |= {"activation": case.activation, "gate_up": case.gate_up, "alpha": case.alpha, "limit": case.limit}
    args["weight_on_input"] = case.weight_on_input
    return _with_out(case, args, (case.tokens, case.hidden), torch.bfloat16 if case.x_quantised else DTYPES[case.dtype], device)


def _with_out(case: Moe, args: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Built:
    buffers: dict[str, Tensor] = {}
    if case.out == "strided":
        args["out"], buffers["out"] = strided_slice(shape, dtype, device)
    elif case.out == "given":
        args["out"] = filled(shape, math.nan, dtype, device)
    return Built(args, buffers)


def index_of(ids: Tensor, experts: int) -> MoeIndex:
    """The index of ids among `experts` experts, with garbage behind the used rows of `dst_to_src`."""
    index = oracle.moe_index({"ids": ids, "num_experts": experts, "expert_range": None, "num_local_experts": None})
    rest = torch.full((ids.numel() - index.dst_to_src.shape[0],), 2**31 - 1, dtype=torch.int32)
    return MoeIndex(*(part.to(ids.device) for part in (torch.cat([index.dst_to_src, rest]), index.src_to_dst, index.expert_sizes)))


def gemm_args(case: Moe, sizes: list[int], generator: torch.Generator, device: torch.device, spare: int = 0) -> Built:
    """Arguments of `group_gemm` (M, H) -> (M, 2I) with `spare` rows behind the used ones; they, and weights without rows, are NaN."""
    rows = sum(sizes)
    tail = torch.arange(rows + spare) >= rows
    x, x_scales = _x(case, _normal(generator, rows + spare, case.hidden), tail, device)
    data = _normal(generator, len(sizes), 2 * case.inter, case.hidden) / math.sqrt(max(case.hidden, 1))
    dtype, scales, idle = DTYPES[case.quantised or case.dtype], None, torch.tensor([n == 0 for n in sizes], dtype=torch.bool)
    if case.quantised:
        data, scales = _quantise(case, data)
        scales[idle] = math.nan
    data = data.to(dtype)
    raw = torch.uint8 if dtype.itemsize == 1 else dtype
    data.view(raw)[idle] = filled((1,), poison_value(dtype), dtype, data.device).view(raw)
    weight = expert_weight(data.to(device), case.storage, poison_value(dtype))
    args: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "expert_sizes": torch.tensor(sizes, dtype=torch.int32),
        "w_scales": scales,
        "x_scales": x_scales,
    }
    if case.biases:
        args["bias"] = _normal(generator, len(sizes), 2 * case.inter).to(DTYPES[case.bias_dtype or case.dtype])
        args["bias"][idle] = math.nan
    args = mapped(args, lambda t: t if t.device == device else t.to(device))
    return _with_out(case, args, (rows + spare, 2 * case.inter), torch.bfloat16 if case.x_quantised else DTYPES[case.dtype], device)
