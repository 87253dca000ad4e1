"""The stages of the expert layer as ops of their own: expand, grouped product, activations, combine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.moe_naive import act, assert_close, n_inner, padded, poison, split_gate_up
from tests.kernels.naive import NAN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def product(device: torch.device, sizes: list[int], rows: int, n: int, k: int, dtype: torch.dtype, layout: str = "", bias: bool = False):
    """(x, weight, sizes, bias, expected) of a grouped product."""
    g = torch.Generator().manual_seed(rows + n)
    x, weight = torch.randn(rows, k, generator=g).to(dtype), torch.randn(len(sizes), n, k, generator=g).to(dtype)
    b = torch.randn(len(sizes), n, generator=g).to(dtype) if bias else None
    wanted = torch.zeros(sum(sizes), n, dtype=torch.float64)
    begin = 0
    for e, size in enumerate(sizes):
        wanted[begin : begin + size] = x[begin : begin + size].double() @ weight[e].double().t() + (0 if b is None else b[e].double())
        begin += size
    x[begin:] = NAN
    x, weight = x.to(device), weight.to(device)
    if "n-inner" in layout:
        weight = n_inner(weight)
    if "padded" in layout:
        x, weight = padded(x), padded(weight)
    return x, weight, torch.tensor(sizes, dtype=torch.int32, device=device), None if b is None else b.to(device), wanted


SIZES = [3, 0, 20, 16, 1]


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("layout", ["", "n-inner", "padded"])
@pytest.mark.parametrize("bias", [False, True])
def test_group_gemm(device: torch.device, dtype: torch.dtype, layout: str, bias: bool) -> None:
    from hal.kernels.moe_experts import group_gemm

    x, weight, sizes, b, wanted = product(device, SIZES, 45, 40, 72, dtype, layout, bias)
    out = torch.full((45, 43), NAN, dtype=dtype, device=device)
    poison()
    group_gemm(x, weight, sizes, out[:, :40], bias=b)
    assert_close(out[: len(wanted), :40], wanted, dtype)
    assert torch.isnan(out[:, 40:]).all()


@pytest.mark.parametrize("sizes", [[0, 0, 0], [], [33, 0, 0], [0, 0, 33], [1] * 33])
def test_group_gemm_of_few_and_of_all(device: torch.device, sizes: list[int]) -> None:
    from hal.kernels.moe_experts import group_gemm

    x, weight, on_device, _, wanted = product(device, sizes, 33, 16, 16, F32)
    out = torch.full((33, 16), NAN, device=device)
    group_gemm(x, weight, on_device, out)
    assert_close(out[: len(wanted)], wanted, F32)


def test_sizes_beyond_the_rows_are_cut(device: torch.device) -> None:
    from hal.kernels.moe_experts import group_gemm

    x, weight, _, _, wanted = product(device, [5, 7], 12, 16, 16, F32)
    guarded = torch.full((20, 16), NAN, device=device)
    group_gemm(x, weight, torch.tensor([5, 10**6], dtype=torch.int32, device=device), guarded[:12])
    assert_close(guarded[:12], wanted, F32)
    assert torch.isnan(guarded[12:]).all()


def configs() -> list:
    """Every way of the kernel: wide weights, descriptors, a fixed number of programs."""
    from hal.kernels.moe_configs import GemmConfig

    ways: list[dict[str, Any]] = [
        {},
        {"swap": True},
        {"w_tma": True},
        {"w_tma": True, "x_tma": True},
        {"swap": True, "w_tma": True},
        {"programs": 1},
        {"group_m": 2},
    ]
    return [GemmConfig(32, 32, 4, 2, **way) for way in ways]


@pytest.mark.parametrize("way", range(len(configs())))
@pytest.mark.parametrize("layout", ["", "n-inner"])
@pytest.mark.parametrize("gate_up", ["", "concat", "interleaved"])
def test_every_way_gives_the_same(device: torch.device, way: int, layout: str, gate_up: str) -> None:
    from hal.kernels.moe_experts import Activation, grouped_product
    from hal.kernels.moe_tiles import list_tiles, most_tiles

    sizes, n, block_m = [50, 0, 3], 80, 16
    for k in (64, 40):  # a multiple of the step, and not
        x, weight, on_device, bias, wanted = product(device, sizes, 60, n, k, F16, layout, bias=True)
        activation = None
        if gate_up:
            activation = Activation("silu", gate_up == "interleaved", 1.0, None)
            wanted = act("silu", *split_gate_up(wanted, gate_up))
        tiles = list_tiles(on_device, 60, block_m)
        out = torch.full((60, wanted.shape[1]), NAN, dtype=F16, device=device)
        grouped_product(x, weight, out, tiles, most_tiles(60, 3, block_m), block_m, configs()[way], bias=bias, activation=activation)
        assert_close(out[:53], wanted, F16)
        assert torch.isnan(out[53:]).all()


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("columns", [1, 40, 1100])
def test_activations(device: torch.device, activation: str, gate_up: str, dtype: torch.dtype, columns: int) -> None:
    from hal.kernels.moe_activation import gated

    x = padded((torch.randn(3, 2 * columns, generator=torch.Generator().manual_seed(columns)) * 4).to(dtype)).to(device)
    for limit in (None, 2.0):
        out = torch.full((3, columns + 3), NAN, dtype=dtype, device=device)
        gated(x, out[:, :columns], activation=activation, gate_up=gate_up, alpha=1.702, limit=limit)
        wanted = act(activation, *split_gate_up(x.double().cpu(), gate_up), 1.702, limit)
        assert_close(out[:, :columns], wanted, dtype)
        assert torch.isnan(out[:, columns:]).all()


def test_activations_of_extremes(device: torch.device) -> None:
    from hal.kernels.moe_activation import gated

    gate = torch.tensor([-1e4, -100.0, -1e-30, 0.0, 1e-30, 100.0, 1e4])
    x = torch.cat([gate, torch.ones(7)])[None].to(device)
    for activation in ("silu", "gelu", "gelu_tanh", "swiglu_oai"):
        out = torch.full((1, 7), NAN, device=device)
        gated(x, out, activation=activation, gate_up="concat", alpha=1.702, limit=None)
        assert_close(out, act(activation, gate.double()[None], torch.ones(1, 7, dtype=torch.float64)), F32)
    x[0, 3] = NAN
    gated(x, out, activation="silu", gate_up="concat", alpha=1.0, limit=7.0)
    assert torch.isnan(out).cpu().tolist() == [[False] * 3 + [True] + [False] * 3], "a clamp must not hide NaN"
    gated(x[:0], out[:0], activation="silu", gate_up="concat", alpha=1.0, limit=None)


def places_of(tokens: int, top_k: int, rows: int) -> Tensor:
    """A place for most slots, -1 and rubbish for the others."""
    g = torch.Generator().manual_seed(tokens)
    places = torch.randperm(rows, generator=g)[: tokens * top_k].to(torch.int32)
    places[::5] = -1
    places[3::11] = rows
    return places


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 16, 17])
@pytest.mark.parametrize("residual", [False, True])
def test_combine(device: torch.device, dtype: torch.dtype, top_k: int, residual: bool) -> None:
    from hal.kernels.moe_combine import moe_combine

    tokens, hidden, rows = 5, 300, 5 * top_k + 2
    g = torch.Generator().manual_seed(top_k)
    y, weights = torch.randn(rows, hidden, generator=g).to(dtype), torch.rand(tokens, top_k, generator=g)
    extra = torch.randn(tokens, hidden, generator=g).to(dtype)
    places = places_of(tokens, top_k, rows)
    known = (places >= 0) & (places < rows)
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    for slot in range(tokens * top_k):
        if known[slot]:
            wanted[slot // top_k] += weights[slot // top_k, slot % top_k].double() * y[places[slot]].double()
    wanted = wanted * 0.5 + (extra.double() if residual else 0)
    y[[r for r in range(rows) if r not in places.tolist()]] = NAN
    weights[~known.view(tokens, top_k)] = NAN
    out = torch.full((tokens, hidden + 4), NAN, dtype=dtype, device=device)
    moe_combine(
        padded(y).to(device), padded(weights, 3).to(device), places.to(device), out[:, :hidden],
        top_k=top_k, residual=padded(extra).to(device) if residual else None, scale=0.5,
    )  # fmt: skip
    assert_close(out[:, :hidden], wanted, dtype)
    assert torch.isnan(out[:, hidden:]).all()


def test_combine_adds_in_the_order_of_choices(device: torch.device) -> None:
    from hal.kernels.moe_combine import moe_combine

    y = torch.tensor([[2.0**24], [1.0], [-(2.0**24)], [1.0]], device=device)
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 0, 2]):
        total = torch.zeros(1, dtype=torch.float32)
        for row in order:
            total = total + y[row].cpu()
        out = torch.full((1, 1), NAN, device=device)
        moe_combine(y, torch.ones(1, 4, device=device), torch.tensor(order, dtype=torch.int32, device=device), out, top_k=4)
        assert out.item() == total.item()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64], ids=str)
def test_expand_copies_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Every code of 8 bits, NaN among them, and elements of 8 bytes."""
    from hal.kernels.moe_combine import moe_expand

    codes = torch.arange(256 * dtype.itemsize, dtype=torch.int32).to(torch.uint8).view(2, -1)
    x = (codes > 99 if dtype is torch.bool else codes.view(dtype)).to(device)
    out = torch.zeros(4, x.shape[1], dtype=dtype, device=device)
    moe_expand(x, torch.tensor([3, 1, 0, 2], dtype=torch.int32, device=device), out, top_k=2)
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8)[[1, 0, 1, 0]])


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 17])
def test_expand(device: torch.device, dtype: torch.dtype, top_k: int) -> None:
    from hal.kernels.moe_combine import moe_expand

    tokens, hidden = 5, 300
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    places = places_of(tokens, top_k, tokens * top_k)
    out = torch.full((tokens * top_k, hidden), NAN, dtype=dtype, device=device)
    moe_expand(padded(x), places.to(device), out, top_k=top_k)
    written = {int(p): s for s, p in enumerate(places.tolist()) if 0 <= p < tokens * top_k}
    for row in range(tokens * top_k):
        if row in written:
            assert torch.equal(out[row], x[written[row] // top_k])
        else:
            assert torch.isnan(out[row]).all()
