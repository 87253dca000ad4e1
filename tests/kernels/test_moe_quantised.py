"""Quantised experts of the Triton kernels against float64: rows quantised inside or given, scales of tensors, channels and blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.moe_naive import act, padded, poison, split_gate_up
from tests.kernels.moe_naive_quantised import E4M3, INT8, ROUNDED, Quantised, error_of, exact, make, moved, product, rounded
from tests.kernels.naive import NAN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KINDS = ["tensor", "channel", "block"]


@pytest.fixture
def needs_rounding(device: torch.device, dtype: torch.dtype) -> None:
    if dtype == E4M3 and device.type == "cpu":
        pytest.skip("the interpreter converts fp32 to e4m3 wrongly: rows quantised inside prove nothing there")


# ---- the rounding of rows


def run_quantise(device: torch.device, x: Tensor, dtype: torch.dtype, block: bool, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from hal.kernels.moe_quantise import empty_rows, quantise

    rows = empty_rows("test", x.shape[0], x.shape[1], dtype, block, device)
    poison()
    quantise(x.to(device) if x.is_contiguous() else moved(x, device), rows, None if valid is None else valid.to(device))
    return rows.codes.cpu(), rows.scales.cpu()


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("block", [False, True], ids=["rows", "groups"])
@pytest.mark.parametrize("columns", [1, 40, 128, 200, 768, 5000])
@pytest.mark.usefixtures("needs_rounding")
def test_rows_are_rounded_as_the_contract_says(device: torch.device, dtype: torch.dtype, block: bool, columns: int) -> None:
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
    x[2] = 0
    x[3, : columns // 2] = 0
    x[4] *= 1e-30
    x[5] *= 1e30
    for given in (x, x.to(BF16), x[:1], padded(x.to(F16).clamp(-6e4, 6e4))):
        codes, scales = run_quantise(device, given, dtype, block)
        wanted, wanted_scales = rounded(given, dtype, block)
        assert torch.equal(scales, wanted_scales)
        assert torch.equal(codes.float(), wanted.float())


@pytest.mark.parametrize("block", [False, True], ids=["rows", "groups"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_rows_that_are_not_finite_have_scale_nan(device: torch.device, block: bool, bad: float) -> None:
    x = torch.randn(3, 300)
    x[1, 130] = bad
    codes, scales = run_quantise(device, x, INT8, block)
    clean = x.clone()
    clean[1, 130] = 0
    _, wanted = rounded(clean, INT8, block)
    touched = torch.zeros(wanted.shape, dtype=torch.bool)
    touched[(1, 1) if block else (1,)] = True
    assert torch.isnan(scales[touched]).all()
    assert torch.equal(scales[~touched], wanted[~touched])
    assert not codes[1, 128:256].any()


@pytest.mark.parametrize("block", [False, True], ids=["rows", "groups"])
@pytest.mark.parametrize("valid", [-1, 0, 4, 99])
def test_padding_rows_are_left_out(device: torch.device, block: bool, valid: int) -> None:
    x = torch.randn(9, 200)
    codes, scales = run_quantise(device, x, INT8, block, torch.tensor(valid, dtype=torch.int32))
    wanted, wanted_scales = rounded(x, INT8, block)
    used = max(0, min(valid, 9))
    assert torch.equal(codes[:used], wanted[:used])
    assert torch.equal(scales[:used], wanted_scales[:used])
    assert torch.isnan(scales[used:]).all(), "the scale of a padding row was written"


# ---- the grouped product


def multiply(call: dict[str, Any], n: int, dtype: torch.dtype = F32) -> Tensor:
    from hal.kernels.moe_experts import group_gemm

    out = torch.full((call["x"].shape[0], n + 3), NAN, dtype=dtype, device=call["x"].device)
    poison()
    group_gemm(call["x"], call["weight"], call["expert_sizes"], out[:, :n], **{name: call[name] for name in ("bias", "w_scales", "x_scales")})
    assert torch.isnan(out[:, n:]).all(), "columns beyond a row were written"
    return out[:, :n]


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["", "n-inner", "padded"])
@pytest.mark.parametrize("biased", [False, True])
def test_group_gemm_of_given_codes(device: torch.device, dtype: torch.dtype, kind: str, layout: str, biased: bool) -> None:
    call, wanted = product(device, dtype, kind, layout=layout, biased=biased)
    assert error_of(multiply(call, 200)[: len(wanted)], wanted) <= exact(device, dtype)


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_dtype", [F32, F16, BF16], ids=str)
@pytest.mark.usefixtures("needs_rounding")
def test_group_gemm_quantises_inside(device: torch.device, dtype: torch.dtype, kind: str, x_dtype: torch.dtype) -> None:
    call, wanted = product(device, dtype, kind, given=False, x_dtype=x_dtype)
    assert error_of(multiply(call, 200, x_dtype)[: len(wanted)], wanted) <= ROUNDED[dtype]
    if x_dtype == F32:
        assert error_of(multiply(call, 200)[: len(wanted)], wanted) <= exact(device, dtype)


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 0), (129, 127), (300, 129), (40, 1030)])
def test_sizes_that_no_block_divides(device: torch.device, dtype: torch.dtype, kind: str, n: int, k: int) -> None:
    call, wanted = product(device, dtype, kind, n=n, k=k, biased=True)
    assert error_of(multiply(call, n)[: len(wanted)], wanted) <= exact(device, dtype)


def test_int8_sums_do_not_round(device: torch.device) -> None:
    """The largest codes all along K: the sum is odd and beyond 2^24, where fp32 steps over it."""
    k = 1100
    x, weight = torch.full((2, k), 127, dtype=INT8), torch.full((1, 16, k), 127, dtype=INT8)
    x[0, 0] = 126
    weight[0, 0, 1] = -127
    exact = x.long() @ weight[0].long().T
    assert int(exact.max()) > 2**24
    call = {"x": x.to(device), "weight": weight.to(device), "expert_sizes": torch.tensor([2], dtype=torch.int32, device=device), "bias": None}
    call |= {"w_scales": torch.ones(1, device=device), "x_scales": torch.ones(2, device=device)}
    assert torch.equal(multiply(call, 16).cpu(), exact.float())


def configs() -> list:
    """Every way of the kernel: wide weights, descriptors, a fixed number of programs, half steps of a block."""
    from hal.kernels.moe_configs import GemmConfig

    ways: list[dict[str, Any]] = [
        {},
        {"swap": True},
        {"w_tma": True},
        {"w_tma": True, "x_tma": True},
        {"swap": True, "w_tma": True},
        {"programs": 1},
        {"block_k": 64},
        {"block_n": 256},
        {"block_n": 256, "swap": True},
    ]
    return [GemmConfig(**({"block_n": 128, "block_k": 128, "warps": 4, "stages": 2} | way)) for way in ways]


@pytest.mark.parametrize("way", range(len(configs())))
@pytest.mark.parametrize(("dtype", "kind"), [(INT8, "channel"), (INT8, "block"), (E4M3, "block")])
@pytest.mark.parametrize("gate_up", ["", "concat", "interleaved"])
def test_every_way_gives_the_same(device: torch.device, way: int, dtype: torch.dtype, kind: str, gate_up: str) -> None:
    sizes = [(256, 256), (328, 200)]
    for n, k in sizes if dtype == INT8 else sizes[1:]:
        try_way(device, way, dtype, kind, gate_up, n, k)


def try_way(device: torch.device, way: int, dtype: torch.dtype, kind: str, gate_up: str, n: int, k: int) -> None:
    from hal.kernels.moe_experts import Activation, Scales, grouped_product
    from hal.kernels.moe_tiles import list_tiles, most_tiles

    sizes, block_m = [18, 0, 3], 16
    call, wanted = product(device, dtype, kind, n=n, k=k, biased=True, sizes=sizes)
    activation = None
    if gate_up:
        activation = Activation("silu", gate_up == "interleaved", 1.0, None)
        wanted = act("silu", *split_gate_up(wanted, gate_up))
    rows = call["x"].shape[0]
    tiles = list_tiles(call["expert_sizes"], rows, block_m)
    out = torch.full((rows, wanted.shape[1]), NAN, dtype=F32, device=device)
    scales = Scales(call["x_scales"], call["w_scales"])
    grouped_product(
        call["x"], call["weight"], out, tiles, most_tiles(rows, 3, block_m), block_m, configs()[way], bias=call["bias"], activation=activation,
        scales=scales,
    )  # fmt: skip
    assert error_of(out[:21], wanted) <= exact(device, dtype)
    assert torch.isnan(out[21:]).all()


@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("inner", [128, 200])
def test_a_tile_leaves_quantised(device: torch.device, gate_up: str, swap: bool, inner: int) -> None:
    """Groups of 128 columns come out as if the activated rows had been quantised afterwards; rows of zeros too."""
    from hal.kernels.moe_configs import GemmConfig
    from hal.kernels.moe_experts import Activation, Scales, grouped_product
    from hal.kernels.moe_quantise import empty_rows
    from hal.kernels.moe_tiles import list_tiles, most_tiles

    sizes, block_m = [18, 0, 3], 16
    call, wanted = product(device, INT8, "block", n=2 * inner, k=200, sizes=sizes)
    call["x"][4] = 0
    wanted[4] = 0
    wanted = act("silu", *split_gate_up(wanted, gate_up))
    rows = call["x"].shape[0]
    result = empty_rows("test", rows, inner, INT8, True, device)
    poison()
    tiles = list_tiles(call["expert_sizes"], rows, block_m)
    grouped_product(
        call["x"], call["weight"], result.codes, tiles, most_tiles(rows, 3, block_m), block_m, GemmConfig(256, 128, 4, 2, swap=swap),
        activation=Activation("silu", gate_up == "interleaved", 1.0, None), scales=Scales(call["x_scales"], call["w_scales"], result.scales),
    )  # fmt: skip
    codes, scales = rounded(wanted.float(), INT8, True)
    got, got_scales = result.codes[:21].cpu(), result.scales[:21].cpu()
    assert torch.allclose(got_scales, scales, rtol=1e-5, atol=0)
    assert int((got.int() - codes.int()).abs().max()) <= 1
    assert float((got != codes).float().mean()) < 0.01
    assert not got[4].any()
    assert not got_scales[4].any()


# ---- the whole


#: (tokens, experts): the path for few tokens, and the sorted one.
PATHS = {"few": {"tokens": 1, "experts": 5}, "sorted": {"tokens": 7, "experts": 5}}


@pytest.fixture(params=list(PATHS.values()), ids=list(PATHS))
def path(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(autouse=True)
def few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter a program costs 10 ms: tall tiles for few tokens."""
    if device.type == "cpu":
        from hal.kernels import moe_quantised_tuning as tuning
        from hal.kernels.moe_configs import SlotConfig, SlotPath

        config = SlotConfig(32, 512, 4)
        monkeypatch.setattr(tuning, "QUANTISED_SLOT_CONFIGS", SlotPath(config, config))


@pytest.fixture
def dtype() -> torch.dtype:
    return INT8


def test_the_paths_are_what_the_tests_take_them_for() -> None:
    from hal.kernels.moe_quantised_tuning import quantised_slot_path

    assert quantised_slot_path(1, 2, 5, True) is not None
    assert quantised_slot_path(7, 2, 5, True) is None


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True], ids=["inside", "given"])
@pytest.mark.parametrize("x_dtype", [F32, F16, BF16], ids=str)
@pytest.mark.usefixtures("needs_rounding")
def test_kinds_of_scales(device: torch.device, path: dict[str, Any], dtype: torch.dtype, kind: str, given: bool, x_dtype: torch.dtype) -> None:
    make(device, dtype, kind, given=given, x_dtype=x_dtype, **path).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (256, 128), (128, 256), (264, 130), (130, 264)])
def test_sizes(device: torch.device, path: dict[str, Any], dtype: torch.dtype, kind: str, hidden: int, inner: int) -> None:
    make(device, dtype, kind, hidden=hidden, inner=inner, biased=True, **path).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["n-inner", "padded"])
@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
def test_layouts(device: torch.device, path: dict[str, Any], dtype: torch.dtype, kind: str, layout: str, gate_up: str) -> None:
    make(device, dtype, kind, layout=layout, gate_up=gate_up, **path).check()


@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
@pytest.mark.parametrize(
    "options",
    [{"activation": "silu", "limit": 0.5}, {"activation": "gelu"}, {"activation": "gelu_tanh"}, {"activation": "swiglu_oai", "limit": 0.75}],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_activations(device: torch.device, path: dict[str, Any], dtype: torch.dtype, kind: str, gate_up: str, options: dict[str, Any]) -> None:
    make(device, dtype, kind, gate_up=gate_up, biased=True, **options, **path).check()


@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize("width", ["whole", "stepwise"])
def test_steps_of_the_kernels_for_few_tokens(
    device: torch.device, dtype: torch.dtype, kind: str, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hal.kernels import moe_quantised_tuning as tuning
    from hal.kernels.moe_configs import SlotConfig, SlotPath

    config = SlotConfig(32, 1024 if width == "whole" else 128, 4)
    monkeypatch.setattr(tuning, "QUANTISED_SLOT_CONFIGS", SlotPath(config, config))
    make(device, dtype, kind, tokens=2, experts=40, top_k=3, hidden=392, inner=330, biased=True).check()


@pytest.mark.parametrize("block_n", [64, 128, 256])
@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
def test_quantised_by_the_product_or_after_it(
    device: torch.device, dtype: torch.dtype, block_n: int, gate_up: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hal.kernels import moe_quantised
    from hal.kernels.moe_configs import GemmConfig, MoeConfig

    config = MoeConfig(16, GemmConfig(block_n, 128, 4, 2), GemmConfig(64, 128, 4, 2))
    monkeypatch.setattr(moe_quantised, "quantised_config", lambda *_: config)
    make(device, dtype, "block", tokens=9, experts=3, inner=200, gate_up=gate_up, biased=True).check()


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_weights_on_the_input(device: torch.device, path: dict[str, Any], dtype: torch.dtype, kind: str) -> None:
    make(device, dtype, kind, weight_on_input=True, biased=True, **path).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True], ids=["inside", "given"])
def test_experts_elsewhere(device: torch.device, path: dict[str, Any], dtype: torch.dtype, kind: str, given: bool) -> None:
    path = {"tokens": path["tokens"], "experts": 3, "given": given, "top_k": 4}
    make(device, dtype, kind, spoken=9, expert_range=(2, 5), num_experts=9, **path).check()
    where = torch.tensor([-1, 2, -1, 0, 1, 3, -7, 10**6], dtype=torch.int32)
    make(device, dtype, kind, spoken=10, expert_map=where, **path).check()


@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize("valid", [0, 1, 3, 9])
@pytest.mark.parametrize("tokens", [1, 5])
def test_padding_tokens_change_nothing_and_are_zero(device: torch.device, dtype: torch.dtype, kind: str, tokens: int, valid: int) -> None:
    problem = make(device, dtype, kind, tokens=tokens, experts=30, num_valid_tokens=torch.tensor(valid, dtype=torch.int32))
    clean = problem.check()
    problem.x[valid:] = NAN
    problem.weights[valid:] = NAN
    problem.ids[valid:] = 2**30
    assert torch.equal(problem.run(), clean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_rows_of_zeros(device: torch.device, dtype: torch.dtype, kind: str, tokens: int) -> None:
    problem = make(device, dtype, kind, tokens=tokens, experts=40)
    problem.x[0] = 0
    assert not problem.check()[0].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [2, 9])
def test_bad_rows_leave_their_neighbours_alone(device: torch.device, dtype: torch.dtype, kind: str, tokens: int) -> None:
    problem = make(device, dtype, kind, tokens=tokens, experts=40)
    clean = problem.run()
    problem.x[1, 3] = NAN
    out = problem.run()
    assert torch.isnan(out[1]).all()
    rest = [t for t in range(tokens) if t != 1]
    assert torch.equal(out[rest], clean[rest])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 8])
def test_every_scale_has_an_effect(device: torch.device, dtype: torch.dtype, kind: str, tokens: int) -> None:
    problem = make(device, dtype, kind, tokens=tokens, given=True)
    clean = problem.run()
    first, second = problem.options["w_scales"]
    for change in ({"w_scales": (first * 1.5, second)}, {"w_scales": (first, second * 1.5)}, {"x_scales": problem.options["x_scales"] * 1.5}):
        changed = Quantised(**(vars(problem) | {"options": problem.options | change}))
        assert not torch.equal(changed.check(), clean)


@pytest.mark.parametrize("tokens", [1, 4, 5, 17, 33])
@pytest.mark.parametrize("experts", [1, 3, 40])
def test_token_counts_around_the_thresholds(device: torch.device, dtype: torch.dtype, tokens: int, experts: int) -> None:
    problem = make(device, dtype, "block", tokens=tokens, experts=experts, top_k=3, hidden=64, inner=48)
    assert torch.equal(problem.check(), problem.run())


def test_bad_ids_and_duplicates(device: torch.device, dtype: torch.dtype) -> None:
    make(device, dtype, "block", tokens=5, ids=[[0, 3], [-1, 5], [-(2**31), 2**31 - 1], [2, 2], [4, -1]]).check()
    make(device, dtype, "channel", tokens=1, ids=[[3, 3]]).check()


@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (128, 256)])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_scratch_is_what_the_products_need(device: torch.device, dtype: torch.dtype, kind: str, hidden: int, inner: int) -> None:
    """Codes of the intermediate and 16-bit rows of the larger of the two sizes, and the codes of x."""
    from hal.kernels import scratch

    tokens, top_k = 64, 4
    problem = make(device, dtype, kind, tokens=tokens, top_k=top_k, experts=16, hidden=hidden, inner=inner, x_dtype=BF16)
    before = dict(scratch._CURRENT)
    scratch._CURRENT.clear()
    try:
        problem.run()
        used = sum(b.nbytes for b in scratch.buffers())
    finally:
        scratch._CURRENT.clear()
        scratch._CURRENT.update(before)
    assert used <= 1.25 * 2 * tokens * top_k * (inner + hidden)
