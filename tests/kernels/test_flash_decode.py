"""`flash_decode` of the Triton kernels against float64 loops, with everything unreferenced poisoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.naive import NAN, assert_matches, expected, make_problem

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8


def run(device: torch.device, dtype: torch.dtype = F32, factor: float = 1.0, **options: Any) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, dtype=dtype, **options)
    args = dict(problem.args)
    wanted = expected(problem)
    tokens, heads = wanted[1].shape
    # Strided outputs inside NaN: only the result may be written.
    room = torch.full((tokens, heads + 1, wanted[0].shape[2] + 8), NAN, dtype=dtype, device=device)
    lse_room = torch.full((tokens, heads + 3), NAN, device=device)
    args["out"], args["lse"] = room[:, :heads, : wanted[0].shape[2]], lse_room[:, :heads]
    actual = flash_decode(**args)
    assert_matches(actual, wanted, dtype, factor)
    assert torch.isnan(room[:, heads:]).all()
    assert torch.isnan(room[:, :, wanted[0].shape[2] :]).all()
    assert torch.isnan(lse_room[:, heads:]).all()


@pytest.mark.parametrize("layout", ["NHD", "HND", "HND_SPLIT", "SPLIT_V0"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_layouts_and_dtypes(device: torch.device, layout: str, dtype: torch.dtype) -> None:
    run(device, dtype, lengths=[19, 0, 300], layout=layout, q_len=2)


@pytest.mark.parametrize("dims", [(16, 16), (40, 72), (64, 128), (80, 80), (96, 64), (112, 120), (128, 24), (192, 128), (256, 256)], ids=str)
def test_head_dims(device: torch.device, dims: tuple[int, int]) -> None:
    run(device, lengths=[70, 3], dims=dims, heads=(2, 1))


def test_mla_with_values_inside_the_keys(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[40, 0, 150], dims=(576, 512), heads=(16, 1), dtype=F16)
    problem.args["v_cache"] = problem.args["k_cache"][..., :512]
    problem.values = [k[..., :512] for k in problem.keys]
    assert_matches(flash_decode(**problem.args), expected(problem), F16)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 1), (24, 1), (48, 2), (71, 1)], ids=str)
def test_groups(device: torch.device, heads: tuple[int, int]) -> None:
    run(device, lengths=[33, 5], heads=heads, dims=(16, 16))


def test_group_of_24_in_tiles_of_16(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.kernels import decode_partition
    from hal.kernels import flash_decode as launcher

    monkeypatch.setattr(decode_partition, "packed_rows", lambda *facts: 16)
    launcher._partition.cache_clear()
    run(device, lengths=[33, 300], heads=(48, 2), dims=(16, 16), q_len=2)
    launcher._partition.cache_clear()


@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 544])
def test_page_sizes(device: torch.device, page_size: int) -> None:
    run(device, lengths=[page_size, 97, 2 * page_size + 1], page_size=page_size, spare_columns=0)


@pytest.mark.parametrize("q_len", [1, 3, 5, 9])
def test_blocks_longer_than_their_keys(device: torch.device, q_len: int) -> None:
    run(device, lengths=[2, 0, 5, 260], q_len=q_len)


@pytest.mark.parametrize("lengths", [[0, 0], [1], [15, 16, 17], [63, 64, 65], [700, 3, 0, 200]], ids=str)
def test_lengths_around_tiles_and_splits(device: torch.device, lengths: list[int]) -> None:
    run(device, lengths=lengths)


@pytest.mark.parametrize("padding", [0, 3])
def test_variable_blocks_with_empty_ones_and_padding(device: torch.device, padding: int) -> None:
    run(device, lengths=[300, 3, 0, 50, 9], blocks=[1, 5, 2, 0, 12], padding=padding)


def test_only_padding_rows(device: torch.device) -> None:
    run(device, lengths=[], blocks=[], padding=5)


@pytest.mark.parametrize("window", [1, 4, 100, 10_000])
@pytest.mark.parametrize("q_len", [1, 3])
def test_window(device: torch.device, window: int, q_len: int) -> None:
    run(device, lengths=[10, 333, 0, 600], window=window, q_len=q_len)


FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "softcap-large": {"softcap": 1e4},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.01])},
    "sinks": {"sinks": torch.tensor([-2.0, 0.0, 1.0, 4.0])},
    "scale": {"scale": 0.3},
}
ALL_FEATURES = {k: v for name in ("softcap", "alibi", "sinks", "scale") for k, v in FEATURES[name].items()}


@pytest.mark.parametrize("name", FEATURES)
def test_features(device: torch.device, name: str) -> None:
    run(device, lengths=[10, 333, 0], q_len=2, **FEATURES[name])


def test_features_together(device: torch.device) -> None:
    run(device, lengths=[10, 333, 0, 7], blocks=[3, 1, 2, 9], padding=2, window=20, dims=(80, 96), **ALL_FEATURES)


TREE = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)
TREE_WITH_UPPER_TRIANGLE = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)


@pytest.mark.parametrize("tree", [TREE, TREE_WITH_UPPER_TRIANGLE], ids=["ancestors", "upper"])
@pytest.mark.parametrize("extra", [{}, {"window": 6}, ALL_FEATURES, {"window": 40, **ALL_FEATURES}], ids=["plain", "window", "all", "all-window"])
def test_tree(device: torch.device, tree: torch.Tensor, extra: dict[str, Any]) -> None:
    mask = torch.cat([tree, torch.ones(5, 2, dtype=torch.bool)], 1).repeat(4, 1)  # columns beyond the block are ignored
    run(device, lengths=[300, 5, 3, 0], q_len=5, tree_mask=mask, **extra)


def test_tree_with_variable_blocks(device: torch.device) -> None:
    mask = torch.rand(10, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    run(device, lengths=[40, 9, 2], blocks=[5, 0, 3], padding=2, tree_mask=mask, window=12, **ALL_FEATURES)


def test_draft_value_that_no_row_sees_may_be_nan(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    mask = TREE_WITH_UPPER_TRIANGLE.clone()
    mask[:, 2] = False
    problem = make_problem(device, lengths=[32], q_len=5, page_size=1, tree_mask=mask)
    page = int(problem.args["block_tables"][0, 32 - 5 + 2])
    problem.args["v_cache"][page] = NAN
    problem.args["k_cache"][page] = NAN
    assert_matches(flash_decode(**problem.args), expected(problem), F32)


@pytest.mark.parametrize("scales", [("scalar", "tensor"), ("tensor", "scalar"), ("head", "token"), ("token", "head"), ("token", "token")], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_int8_scales(device: torch.device, scales: tuple[str, str], dtype: torch.dtype) -> None:
    run(device, dtype, lengths=[20, 300, 0], kv_dtype=I8, scales=scales, sinks=torch.tensor([-2.0, 0.0, 1.0, 4.0]))


@pytest.mark.parametrize("layout", ["HND", "SPLIT_V0"])
def test_int8_scales_in_other_layouts(device: torch.device, layout: str) -> None:
    run(device, lengths=[20, 300], kv_dtype=I8, scales=("token", "token"), layout=layout, softcap=2.0)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8(device: torch.device, kv_dtype: torch.dtype) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[64, 128], dtype=F16, kv_dtype=kv_dtype, scales=("scalar", "head"), page_size=64)
    if device.type == "cpu":  # the interpreter reads fp8 NaN as a number
        for name in ("k_cache", "v_cache"):
            cache = problem.args[name].float()
            problem.args[name] = torch.where(torch.isnan(cache), 0.0, cache).to(kv_dtype)
    assert_matches(flash_decode(**problem.args), expected(problem), F16)


def test_tiny_value_scales_keep_their_accuracy_in_fp16(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[64], dtype=F16, kv_dtype=I8, scales=("token", "token"))
    problem.args["v_scale"] *= 1e-4
    problem.values = [v * 1e-4 for v in problem.values]
    problem.args["out"] = torch.empty(1, 4, 64, device=device)
    assert_matches(flash_decode(**problem.args), expected(problem), F16)


def test_strided_inputs(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[20, 300])
    wanted, a = expected(problem), problem.args
    packed = torch.full((2, 10 * 64), NAN, device=device)
    packed[:, : 4 * 64] = a["q"].flatten(1)
    a["q"] = packed[:, : 4 * 64].view(2, 4, 64)
    pages, size, heads, dim = a["k_cache"].shape
    both = torch.full((pages, 2, size + 1, heads, dim), NAN, device=device)  # interleaved and padded pages
    both[:, 0, :size], both[:, 1, :size] = a["k_cache"], a["v_cache"]
    a["k_cache"], a["v_cache"] = both[:, 0, :size], both[:, 1, :size].clone()
    a["block_tables"] = torch.cat([a["block_tables"], a["block_tables"]], 1)[:, : a["block_tables"].shape[1]]
    assert_matches(flash_decode(**a), wanted, F32)


def test_fp32_output_of_16_bit_inputs(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[20, 300], dtype=F16)
    problem.args["out"] = torch.empty(2, 4, 64, device=device)
    out, lse = flash_decode(**problem.args)
    assert out.dtype == F32
    assert_matches((out, lse), expected(problem), F16)


def test_softcap_of_huge_scores_stays_finite(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[3], softcap=50.0)
    for cache, dense in ((problem.args["k_cache"], problem.keys),):
        cache *= 1e4
        dense[0] *= 1e4
    assert_matches(flash_decode(**problem.args), expected(problem), F32)


def test_no_rows_launch_nothing(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[])
    out, lse = flash_decode(**problem.args)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_values_outside_their_range_are_clamped_or_skipped(device: torch.device) -> None:
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[20, 32, 0], spare_columns=0)
    problem.args["seq_lens"] = torch.tensor([20, 10**9, -7], dtype=torch.int32, device=device)
    assert_matches(flash_decode(**problem.args), expected(problem), F32)

    # A page id outside the cache makes its keys invisible: as if the sequence had only the others.
    problem = make_problem(device, lengths=[48], page_size=16)
    problem.args["block_tables"][0, 1] = problem.args["k_cache"].shape[0]
    keep = torch.cat([torch.arange(16), torch.arange(32, 48)])
    problem.keys, problem.values = [problem.keys[0][keep]], [problem.values[0][keep]]
    assert_matches(flash_decode(**problem.args), expected(problem), F32)
