"""Quantised experts as the contract defines them: float64 of what codes and scales say, no kernel. And the data to try them on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.moe_naive import PLAIN, act, local_ids, poison, split_gate_up
from tests.kernels.naive import NAN

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
#: Code of the largest magnitude.
QMAX = {INT8: 127.0, E4M3: 448.0}
#: Error, relative to the largest magnitude, where rows are rounded to codes, a few of which may differ by one.
ROUNDED = {INT8: 2e-2, E4M3: 8e-2}
#: Under the interpreter bf16 is truncated, three times over.
TRUNCATED = 3e-2


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Scales of rows (R,) or groups (R, G), of weights (E,), (E, N) or (E, Nb, Kb), for every element of float64 `shape`."""
    scales = scales.double().cpu()
    if scales.dim() == len(shape):
        for axis in range(1, len(shape)):
            scales = scales.repeat_interleave(128, axis).narrow(axis, 0, shape[axis])
    return scales.reshape(scales.shape + (1,) * (len(shape) - scales.dim())).expand(shape)


def rounded(x: Tensor, dtype: torch.dtype, block: bool) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales of the rows of x (R, K) on the CPU, as the contract says."""
    width = 128 if block else max(x.shape[1], 1)
    groups = -(-x.shape[1] // 128) if block else 1
    parts = functional.pad(x.float().cpu(), (0, groups * width - x.shape[1])).view(x.shape[0], groups, width)
    scale = parts.abs().amax(2) / QMAX[dtype]
    code = (parts / torch.where(scale > 0, scale, 1.0)[:, :, None]).clamp(-QMAX[dtype], QMAX[dtype])
    code = (code.round() if dtype == INT8 else code).to(dtype).view(torch.uint8).flatten(1)[:, : x.shape[1]].contiguous()
    return code.view(dtype), scale if block else scale[:, 0]


def quantised_weight(weight: Tensor, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    """Codes (E, N, K) and scales."""
    experts, n, k = weight.shape
    if kind == "block":
        whole = functional.pad(weight, (0, -k % 128, 0, -n % 128)).view(experts, -(-n // 128), 128, -(-k // 128), 128)
        scales = whole.abs().amax((2, 4)) / QMAX[dtype]
    else:
        scales = functional.pad(weight, (0, 1)).abs().amax((1, 2) if kind == "tensor" else 2) / QMAX[dtype]
    code = (weight.double() / spread(scales, weight.shape)).clamp(-QMAX[dtype], QMAX[dtype])
    return (code.round() if dtype == INT8 else code.float()).to(dtype), scales


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def laid_out(weight: Tensor, layout: str) -> Tensor:
    """(E, N, K) with N contiguous, or with rows further apart."""
    if "n-inner" in layout:
        return raw(weight).transpose(1, 2).contiguous().view(weight.dtype).transpose(1, 2)
    if "padded" in layout:
        room = torch.full((*weight.shape[:2], weight.shape[2] + 16), 0x7F, dtype=torch.uint8)
        room[..., : weight.shape[2]] = raw(weight)
        return room.view(weight.dtype)[..., : weight.shape[2]]
    return weight


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device with the same strides."""
    if device.type == "cpu":
        return tensor
    target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    raw(target).copy_(raw(tensor).to(device))
    return target


def exact(device: torch.device, dtype: torch.dtype) -> float:
    """Error of fp32 sums of given codes; matrix units add e4m3 products up in some 14 bits, for 128 columns at a time."""
    return 2e-3 if dtype == E4M3 and device.type == "cuda" else 2e-5


def error_of(got: Tensor, wanted: Tensor) -> float:
    got = got.double().cpu()
    assert got.shape == wanted.shape
    assert not torch.isnan(got).any(), "the result holds NaN"
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if wanted.numel() else 0.0


SIZES = [3, 0, 20, 16, 1]


def product(
    device: torch.device, dtype: torch.dtype, kind: str, *, n: int = 200, k: int = 300, given: bool = True, x_dtype: torch.dtype = F32,
    layout: str = "", biased: bool = False, sizes: list[int] = SIZES, spare: int = 5,
) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
    """Keywords of `group_gemm` without `out`, and the float64 used rows."""
    g = torch.Generator().manual_seed(n + k)
    used = sum(sizes)
    x = torch.randn(used + spare, k, generator=g).to(x_dtype)
    weight, w_scales = quantised_weight(torch.randn(len(sizes), n, k, generator=g) * torch.rand(len(sizes), n, 1, generator=g), dtype, kind)
    codes, x_scales = rounded(x, dtype, kind == "block")
    rows = codes.double() * spread(x_scales, x.shape)
    dense = weight.double() * spread(w_scales, weight.shape)
    bias = torch.randn(len(sizes), n, generator=g).to(BF16) if biased else None
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    wanted = torch.einsum("rk,rnk->rn", rows[:used], dense[owner]) + (0 if bias is None else bias[owner].double())
    x[used:] = NAN
    x_scales[used:] = NAN
    w_scales[[s == 0 for s in sizes]] = NAN
    call: dict[str, Any] = {"x": moved(codes, device) if given else x.to(device), "weight": moved(laid_out(weight, layout), device)}
    call |= {"expert_sizes": torch.tensor(sizes, dtype=torch.int32, device=device), "w_scales": w_scales.to(device)}
    call |= {"x_scales": x_scales.to(device) if given else None, "bias": None if bias is None else bias.to(device)}
    return call, wanted


@dataclass
class Quantised:
    """Arguments of one `fused_moe` call; `options` are its keywords."""

    x: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    weights: Tensor
    ids: Tensor
    out_dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Tensor:
        from hal.kernels.moe_fused import fused_moe

        out = torch.full(self.x.shape, NAN, dtype=self.out_dtype, device=self.x.device)
        poison()
        fused_moe(self.x, self.w_gate_up, self.w_down, self.weights, self.ids, out, **(PLAIN | self.options))
        return out

    def expected(self) -> Tensor:
        """(T, H) float64; rows of no expert are not looked at."""
        o = self.options
        dtype, (first, second) = self.w_gate_up.dtype, o["w_scales"]
        block = first.dim() == 3
        codes, scales = (self.x.cpu(), o["x_scales"].cpu()) if o.get("x_scales") is not None else rounded(self.x, dtype, block)
        x = codes.double() * spread(scales, codes.shape)
        w1, w2 = (w.double().cpu() * spread(s, w.shape) for w, s in ((self.w_gate_up, first), (self.w_down, second)))
        b1, b2 = (None if o.get(name) is None else o[name].double().cpu() for name in ("b_gate_up", "b_down"))
        weights, on_input = self.weights.double().cpu(), o.get("weight_on_input", False)
        local = local_ids(self.ids, w2.shape[0], o)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for t, j in (local >= 0).nonzero().tolist():
            e = int(local[t, j])
            h = w1[e] @ x[t] * (weights[t, j] if on_input else 1.0) + (0 if b1 is None else b1[e])
            h = act(o.get("activation", "silu"), *split_gate_up(h, o.get("gate_up", "concat")), o.get("alpha", 1.702), o.get("limit"))
            inner, inner_scales = rounded(h[None], dtype, block)
            y = w2[e] @ (inner.double() * spread(inner_scales, inner.shape))[0] + (0 if b2 is None else b2[e])
            out[t] += y * (1.0 if on_input else weights[t, j])
        return out

    def check(self) -> Tensor:
        out = self.run()
        truncated = out.device.type == "cpu" and out.dtype == BF16
        assert error_of(out, self.expected()) <= max(ROUNDED[self.w_down.dtype], TRUNCATED if truncated else 0)
        none = (local_ids(self.ids, self.w_down.shape[0], self.options) < 0).all(1)
        assert not out.cpu()[none].any(), "a token without an expert must get a zero row"
        return out


def make(
    device: torch.device, dtype: torch.dtype, kind: str, *, tokens: int, experts: int = 5, hidden: int = 160, inner: int = 136, top_k: int = 2,
    given: bool = False, x_dtype: torch.dtype = F16, ids: list[list[int]] | None = None, spoken: int | None = None, biased: bool = False,
    layout: str = "", **options: Any,
) -> Quantised:  # fmt: skip
    """Random quantised experts; those that no token chose have scales NaN."""
    g = torch.Generator().manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden, generator=g).to(x_dtype)
    drawn = torch.randint(0, spoken or experts, (tokens, top_k), generator=g, dtype=torch.int32)
    drawn = drawn if ids is None else torch.tensor(ids, dtype=torch.int32).view(tokens, -1)
    chosen = set(local_ids(drawn, experts, options).flatten().tolist())
    parts = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        codes, scales = quantised_weight(torch.randn(experts, n, k, generator=g) / math.sqrt(k), dtype, kind)
        scales[[e not in chosen for e in range(experts)]] = NAN
        parts.append((moved(laid_out(codes, layout), device), scales.to(device)))
    if biased:
        options["b_gate_up"] = torch.randn(experts, 2 * inner, generator=g).to(device)
        options["b_down"] = torch.randn(experts, hidden, generator=g).to(BF16).to(device)
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    if given:
        x, options["x_scales"] = (moved(part, device) for part in rounded(x, dtype, kind == "block"))
    options["w_scales"] = (parts[0][1], parts[1][1])
    weights = torch.rand(drawn.shape, generator=g).to(device)
    return Quantised(x.to(device), parts[0][0], parts[1][0], weights, drawn.to(device), BF16 if given else x_dtype, options)
