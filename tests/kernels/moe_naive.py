"""The expert layer as the contract defines it: loops over tokens and choices, float64, no kernel. And the data to try it on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.naive import NAN, TOLERANCE

GARBAGE = (-1, -(2**31), 2**31 - 1)
#: Keywords that the launcher has no defaults for.
PLAIN: dict[str, Any] = {"activation": "silu", "gate_up": "concat", "alpha": 1.702, "limit": None}


@dataclass
class Experts:
    """Arguments of one `fused_moe` call; `options` are its keywords."""

    x: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    weights: Tensor
    ids: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Tensor:
        """The kernels' result, from memory that holds NaN."""
        from hal.kernels.moe_fused import fused_moe

        out = torch.full_like(self.x, NAN)
        poison()
        fused_moe(self.x, self.w_gate_up, self.w_down, self.weights, self.ids, out, **(PLAIN | self.options))
        return out


def poison() -> None:
    """Overwrite all scratch memory: no result may depend on it."""
    from hal.kernels.scratch import buffers

    for buffer in buffers():
        buffer.fill_(NAN if buffer.is_floating_point() else 0x7F7F7F7F)


def padded(tensor: Tensor, extra: int = 8) -> Tensor:
    """The same values with rows further apart; NaN between them."""
    room = torch.full((*tensor.shape[:-1], tensor.shape[-1] + extra), NAN, dtype=torch.float32, device=tensor.device).to(tensor.dtype)
    room[..., : tensor.shape[-1]] = tensor
    return room[..., : tensor.shape[-1]]


def n_inner(weight: Tensor) -> Tensor:
    """(E, N, K) with N contiguous."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


def make_experts(
    device: torch.device,
    *,
    tokens: int,
    experts: int,
    hidden: int = 32,
    inner: int = 16,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    ids: list[list[int]] | None = None,
    spoken: int | None = None,
    biased: bool = False,
    transposed: bool = False,
    strided: bool = False,
    seed: int = 0,
    **options: Any,
) -> Experts:
    """Random experts; ids are drawn from `spoken` experts (duplicates occur) unless given."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g)
    w_gate_up = torch.randn(experts, 2 * inner, hidden, generator=g) / math.sqrt(hidden)
    w_down = torch.randn(experts, hidden, inner, generator=g) / math.sqrt(inner)
    if ids is None:
        drawn = torch.randint(0, spoken or experts, (tokens, top_k), generator=g, dtype=torch.int32)
    else:
        drawn = torch.tensor(ids, dtype=torch.int32).view(tokens, -1)
    weights = torch.rand(drawn.shape, generator=g)
    if biased:
        options["b_gate_up"] = torch.randn(experts, 2 * inner, generator=g).to(dtype).to(device)
        options["b_down"] = torch.randn(experts, hidden, generator=g).to(dtype).to(device)
    x, w_gate_up, w_down = (t.to(dtype).to(device) for t in (x, w_gate_up, w_down))
    if transposed:
        w_gate_up, w_down = n_inner(w_gate_up), n_inner(w_down)
    if strided:
        x = padded(x)
        w_gate_up, w_down = (padded(w.transpose(1, 2)).transpose(1, 2) if transposed else padded(w) for w in (w_gate_up, w_down))
        weights, drawn = padded(weights, 3), torch.cat([drawn, torch.full((tokens, 2), 10**6, dtype=torch.int32)], 1)[:, : drawn.shape[1]]
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return Experts(x, w_gate_up, w_down, weights.to(device), drawn.to(device), options)


def local_ids(ids: Tensor, experts: int, options: dict[str, Any]) -> Tensor:
    """Local expert of each choice on the CPU, -1 for skipped ones."""
    ids, expert_map, valid = ids.cpu().long(), options.get("expert_map"), options.get("num_valid_tokens")
    start, end = options.get("expert_range") or (0, experts)
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        local = torch.where(known, expert_map.cpu().long()[ids.clamp(0, expert_map.shape[0] - 1)], -1)
    else:
        local = torch.where((ids >= start) & (ids < end), ids - start, -1)
    local = torch.where((local >= 0) & (local < experts), local, -1)
    if valid is not None:
        local[max(0, int(valid)) :] = -1
    return local


def act(name: str, gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float | None = None) -> Tensor:
    """`act(gate) * up` in float64."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if name == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def split_gate_up(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gates, ups) of the last dimension."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if layout == "concat" else (x[..., ::2], x[..., 1::2])


def expected(problem: Experts) -> Tensor:
    """(T, H) float64."""
    o = problem.options
    x, w1, w2 = (t.double().cpu() for t in (problem.x, problem.w_gate_up, problem.w_down))
    b1, b2 = (None if o.get(n) is None else o[n].double().cpu() for n in ("b_gate_up", "b_down"))
    weights, on_input = problem.weights.double().cpu(), o.get("weight_on_input", False)
    local = local_ids(problem.ids, w2.shape[0], o)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(local.shape[1]):
            e = int(local[t, j])
            if e < 0:
                continue
            h = w1[e] @ x[t] * (weights[t, j] if on_input else 1.0)
            if b1 is not None:
                h = h + b1[e]
            gate, up = split_gate_up(h, o.get("gate_up", "concat"))
            y = w2[e] @ act(o.get("activation", "silu"), gate, up, o.get("alpha", 1.702), o.get("limit"))
            if b2 is not None:
                y = y + b2[e]
            out[t] += y * (1.0 if on_input else weights[t, j])
    return out


def assert_close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of `dtype` relative to the largest magnitude; no NaN."""
    actual = actual.double().cpu()
    assert actual.shape == wanted.shape
    assert not torch.isnan(actual).any(), "the result holds NaN"
    if wanted.numel():
        error = float((actual - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        assert error <= TOLERANCE[dtype], f"error {error:.2e}"


def check(problem: Experts) -> Tensor:
    """Compare with float64; rows of tokens without an expert must be exactly 0."""
    out, wanted = problem.run(), expected(problem)
    assert_close(out, wanted, problem.x.dtype)
    none = (local_ids(problem.ids, problem.w_down.shape[0], problem.options) < 0).all(1)
    assert not out.cpu()[none].any(), "a token without an expert must get a zero row"
    return out
