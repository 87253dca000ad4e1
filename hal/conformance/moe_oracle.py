"""Routing and the expert pipeline in naive float64, independent of every backend. Each function takes its op's arguments by name.

Routing is a stable sort of each row in Python. A skipped slot is never looked at, so poison cannot leak in.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from hal.conformance.quantised import QMAX, decode_codes, nearest_codes
from hal.ops.moe_checks import BLOCK, MoeIndex

__all__ = ["activate", "dequantised", "fused_moe", "group_gemm", "least_gap", "moe_combine", "moe_index", "route", "slots"]

_TINY = torch.finfo(torch.float32).tiny


def _scores(row: list[float], scoring: str) -> list[float]:
    """Scores of one row, in which NaN was replaced by -inf."""
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]
    top = max(row)
    if math.isinf(top):
        shared = [float(x == top) if top > 0 else 0.0 for x in row]
        return [x / max(sum(shared), 1.0) for x in shared]
    raised = [math.exp(x - top) for x in row]
    total = math.fsum(raised)
    return [x / total for x in raised]


def _usable(a: dict[str, Any]) -> list[list[float]]:
    """Logits as Python floats; whatever acts like NaN becomes -inf."""
    rows = a["logits"].double().tolist()
    bias = a.get("correction_bias")
    bad = [False] * a["logits"].shape[1] if bias is None else bias.isnan().tolist()
    return [[-math.inf if math.isnan(x) or no else x for x, no in zip(row, bad, strict=True)] for row in rows]


def _ranks(row: list[float], a: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Of one row: scores, what experts are ordered by, and what groups are scored by."""
    bias, scores = a.get("correction_bias"), _scores(row, a.get("scoring", "softmax"))
    unusable = [x == -math.inf for x in row]
    if bias is None:
        plain = [-math.inf if no else s for s, no in zip(scores, unusable, strict=True)]
        return scores, row, row if a.get("group_score", "max") == "max" else plain
    biased = [-math.inf if no else s + b for s, b, no in zip(scores, bias.double().tolist(), unusable, strict=True)]
    return scores, biased, biased


def _group_scores(rank: list[float], a: dict[str, Any]) -> list[float]:
    size = len(rank) // a["num_groups"]
    best = 1 if a["group_score"] == "max" else 2
    return [sum(sorted(rank[g * size : (g + 1) * size], reverse=True)[:best]) for g in range(a["num_groups"])]


def _order(rank: list[float]) -> list[int]:
    """Indices by rank descending; `sorted` is stable, also in reverse."""
    return sorted(range(len(rank)), key=lambda i: rank[i], reverse=True)


def route(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return float64 weights and int32 ids (T, k) of a `route` or `topk_softmax` call."""
    weights, ids = [], []
    for row in _usable(a):
        scores, rank, group_rank = _ranks(row, a)
        candidates = list(range(len(row)))
        if a.get("top_groups", 1) < a.get("num_groups", 1):
            size = len(row) // a["num_groups"]
            groups = set(_order(_group_scores(group_rank, a))[: a["top_groups"]])
            candidates = [e for e in candidates if e // size in groups]
        chosen = sorted(candidates, key=lambda e: rank[e], reverse=True)[: a["top_k"]]
        chosen_scores = [scores[e] if scores[e] >= _TINY else 0.0 for e in chosen]
        total = math.fsum(chosen_scores) if a["renormalize"] else 1.0
        weights.append([a.get("scale", 1.0) * s / total if total else 0.0 for s in chosen_scores])
        ids.append(chosen)
    shape = (len(ids), a["top_k"])
    return torch.tensor(weights, dtype=torch.float64).reshape(shape), torch.tensor(ids, dtype=torch.int32).reshape(shape)


def least_gap(a: dict[str, Any]) -> float:
    """Smallest difference between two unequal values that decide who is chosen: fp32 must be able to tell them apart."""
    gaps = [math.inf]
    for row in _usable(a):
        _, rank, group_rank = _ranks(row, a)
        for values in (rank, _group_scores(group_rank, a)):
            finite = sorted(v for v in values if math.isfinite(v))
            gaps += [high - low for low, high in itertools.pairwise(finite) if high > low]
    return min(gaps)


def slots(a: dict[str, Any], num_experts: int, experts: int) -> list[int]:
    """Return the local expert of every slot, -1 for a skipped one."""
    start = 0 if a.get("expert_range") is None else a["expert_range"][0]
    places = None if a.get("expert_map") is None else a["expert_map"].tolist()
    valid = a.get("num_valid_tokens")
    tokens, top_k = a["ids"].shape
    limit = tokens if valid is None else int(valid)
    found = []
    for slot, expert in enumerate(a["ids"].flatten().tolist()):
        local = -1
        if 0 <= expert < num_experts and slot // top_k < limit:
            local = expert - start if places is None else places[expert]
        found.append(local if 0 <= local < experts else -1)
    return found


def moe_index(a: dict[str, Any]) -> MoeIndex:
    """Return the index of a `moe_index` call; `dst_to_src` is as long as there are used rows."""
    span = a["expert_range"] or (0, a["num_experts"])
    experts = span[1] - span[0] if a["num_local_experts"] is None else a["num_local_experts"]
    local = slots(a, a["num_experts"], experts)
    order = sorted((e, s) for s, e in enumerate(local) if e >= 0)
    place = {s: d for d, (_, s) in enumerate(order)}
    sizes = [0] * experts
    for expert, _ in order:
        sizes[expert] += 1
    parts = ([s for _, s in order], [place.get(s, -1) for s in range(len(local))], sizes)
    return MoeIndex(*(torch.tensor(part, dtype=torch.int32) for part in parts))


def dequantised(values: Tensor, scales: Tensor | None) -> Tensor:
    """Return float64 values of rows (R, K) or weights (E, N, K), whose scales may be for rows, experts, outputs or blocks."""
    if values.dtype in QMAX:
        values = decode_codes(values.view(torch.uint8), values.dtype)
    values = values.double()
    if scales is None:
        return values
    scales = scales.double()
    if scales.dim() > 1 and scales.dim() == values.dim():
        for axis in range(1, values.dim()):
            scales = scales.repeat_interleave(BLOCK, axis).narrow(axis, 0, values.shape[axis])
    while scales.dim() < values.dim():
        scales = scales.unsqueeze(-1)
    return values * scales


def _rounded(x: Tensor, dtype: torch.dtype, block: bool) -> Tensor:
    """Rows after quantisation and back, by the value table of the dtype."""
    result = torch.zeros_like(x, dtype=torch.float64)
    width = BLOCK if block else max(x.shape[1], 1)
    for first in range(0, x.shape[1], width):
        part = x[:, first : first + width].double()
        scale = (part.abs().amax(1, keepdim=True).float() / QMAX[dtype]).double()
        divided = part / torch.where(scale > 0, scale, torch.ones_like(scale))
        limited = divided.clamp(-QMAX[dtype], QMAX[dtype])
        codes = nearest_codes(limited, dtype).reshape(part.shape)
        result[:, first : first + width] = decode_codes(codes, dtype).to(x.device) * scale
    return result


def _product(x: Tensor, weight: Tensor, scales: Tensor | None, x_scales: Tensor | None) -> Tensor:
    """Rows of one expert times its weights (1, N, K), float64."""
    if scales is not None:
        x = dequantised(x, x_scales) if x_scales is not None else _rounded(x, weight.dtype, scales.dim() == 3)
    return x.double() @ dequantised(weight, scales)[0].T


def _of(e: int, *stacks: Tensor | None) -> list[Tensor | None]:
    return [None if stack is None else stack[e : e + 1] for stack in stacks]


def group_gemm(a: dict[str, Any]) -> Tensor:
    """Return the float64 used rows of a `group_gemm` call."""
    parts, start = [a["x"].new_zeros(0, a["weight"].shape[1], dtype=torch.float64)], 0
    for e, size in enumerate(a["expert_sizes"].tolist()):
        rows = slice(start, min(start + max(size, 0), a["x"].shape[0]))
        start = rows.stop
        if rows.stop > rows.start:
            weight, scales, bias = _of(e, a["weight"], a["w_scales"], a["bias"])
            assert weight is not None
            result = _product(a["x"][rows], weight, scales, None if a["x_scales"] is None else a["x_scales"][rows])
            parts.append(result if bias is None else result + bias.double())
    return torch.cat(parts)


def activate(x: Tensor, activation: str, gate_up: str, alpha: float | None = None, limit: float | None = None) -> Tensor:
    """Return the float64 gated activation of (M, 2I)."""
    x = x.double()
    half = x.shape[1] // 2
    gate, up = (x[:, :half], x[:, half:]) if gate_up == "concat" else (x[:, ::2], x[:, 1::2])
    if activation == "swiglu_oai":
        alpha, limit = 1.702 if alpha is None else alpha, 7.0 if limit is None else limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.special.erf(gate / math.sqrt(2))) * up
    return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def moe_combine(a: dict[str, Any]) -> Tensor:
    """Return the float64 result of a `moe_combine` call."""
    tokens, top_k = a["weights"].shape
    out = torch.zeros(tokens, a["y"].shape[1], dtype=torch.float64, device=a["y"].device)
    rows, weights = a["index"].src_to_dst.tolist(), a["weights"].double()
    for slot, row in enumerate(rows):
        if row >= 0:
            out[slot // top_k] += weights[slot // top_k, slot % top_k] * a["y"][row].double()
    out *= a["scale"]
    return out if a["residual"] is None else out + a["residual"].double()


def fused_moe(a: dict[str, Any]) -> Tensor:
    """Return the float64 result of a `fused_moe` call."""
    experts, (tokens, top_k) = a["w_gate_up"].shape[0], a["ids"].shape
    total = a["num_experts"]
    if total is None:
        total = a["expert_map"].shape[0] if a["expert_map"] is not None else (a["expert_range"] or (0, experts))[1]
    local = torch.tensor(slots(a, total, experts), dtype=torch.int64, device=a["x"].device)
    out = torch.zeros(tokens, a["x"].shape[1], dtype=torch.float64, device=a["x"].device)
    first_scales, second_scales = a["w_scales"] or (None, None)
    for e in local[local >= 0].unique().tolist():
        slot = (local == e).nonzero()[:, 0]
        token, weight = slot // top_k, a["weights"].flatten()[slot].double()[:, None]
        w1, s1, b1, w2, s2, b2 = _of(e, a["w_gate_up"], first_scales, a["b_gate_up"], a["w_down"], second_scales, a["b_down"])
        assert w1 is not None
        assert w2 is not None
        hidden = _product(_rows(a["x"], token), w1, s1, None if a["x_scales"] is None else a["x_scales"][token])
        hidden = hidden * weight if a["weight_on_input"] else hidden
        hidden = activate(hidden if b1 is None else hidden + b1.double(), a["activation"], a["gate_up"], a["alpha"], a["limit"])
        result = _product(hidden, w2, s2, None)
        result = result if b2 is None else result + b2.double()
        out.index_add_(0, token, result if a["weight_on_input"] else result * weight)
    return out


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], also of 8-bit floats, which torch indexes only as bytes."""
    return x.view(torch.uint8)[index].view(x.dtype) if x.dtype.itemsize == 1 else x[index]
