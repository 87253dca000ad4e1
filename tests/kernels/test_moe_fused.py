"""The expert layer of the Triton kernels against float64, on both of its paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.moe_naive import GARBAGE, Experts, assert_close, check, expected, make_experts
from tests.kernels.naive import NAN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: (tokens, experts): the path for few tokens, and the sorted one.
FEW, SORTED = (1, 5), (7, 5)


@pytest.fixture(params=[FEW, SORTED], ids=["few", "sorted"])
def path(request: pytest.FixtureRequest) -> dict[str, Any]:
    tokens, experts = request.param
    return {"tokens": tokens, "experts": experts}


@pytest.fixture
def many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of many slots, with few of them."""
    for name in ("TINY_SLOTS", "FEW_SLOTS"):
        monkeypatch.setattr(f"hal.kernels.moe_index.{name}", ())


def test_the_paths_are_what_the_tests_take_them_for() -> None:
    from hal.kernels.moe_tuning import slot_path

    assert slot_path(FEW[0], 2, FEW[1], 4, True, 40) is not None
    assert slot_path(SORTED[0], 2, SORTED[1], 4, True, 40) is None


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["k-inner", "n-inner"])
def test_dtypes_and_layouts(device: torch.device, path: dict[str, Any], dtype: torch.dtype, transposed: bool) -> None:
    check(make_experts(device, **path, dtype=dtype, transposed=transposed))


@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (8, 24), (24, 8), (96, 100), (136, 40)])
@pytest.mark.parametrize("transposed", [False, True], ids=["k-inner", "n-inner"])
def test_sizes_that_no_tile_divides(device: torch.device, path: dict[str, Any], hidden: int, inner: int, transposed: bool) -> None:
    problem = make_experts(device, **path, hidden=hidden, inner=inner, transposed=transposed, biased=True)
    room = torch.full((problem.x.shape[0], hidden + 5), NAN, device=device)
    from hal.kernels.moe_fused import fused_moe

    fused_moe(
        problem.x, problem.w_gate_up, problem.w_down, problem.weights, problem.ids, room[:, :hidden],
        activation="silu", gate_up="concat", alpha=1.0, limit=None, **problem.options,
    )  # fmt: skip
    assert_close(room[:, :hidden], expected(problem), F32)
    assert torch.isnan(room[:, hidden:]).all(), "columns beyond a row were written"


@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
@pytest.mark.parametrize(
    "options",
    [{"activation": "silu"}, {"activation": "silu", "limit": 0.5}, {"activation": "gelu"}, {"activation": "gelu_tanh"},
     {"activation": "swiglu_oai", "alpha": 1.702, "limit": 0.75}],
    ids=lambda o: "-".join(map(str, o.values())),
)  # fmt: skip
def test_activations(device: torch.device, path: dict[str, Any], gate_up: str, options: dict[str, Any]) -> None:
    check(make_experts(device, **path, biased=True, gate_up=gate_up, **options))


@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True], ids=["k-inner", "n-inner"])
def test_padded_strides(device: torch.device, path: dict[str, Any], gate_up: str, transposed: bool) -> None:
    check(make_experts(device, **path, dtype=BF16, strided=True, transposed=transposed, gate_up=gate_up))


def test_bad_ids_are_skipped(device: torch.device) -> None:
    good = [[0, 3], [2, 1]]
    bad = [[-1, 5], [*GARBAGE[1:]], [5, 2]]
    out = check(make_experts(device, tokens=5, experts=5, ids=good[:1] + bad + good[1:]))
    assert not out[1:3].any()
    for row in ([-1, 4], [5, 0], [GARBAGE[1], GARBAGE[2]]):
        check(make_experts(device, tokens=1, experts=5, ids=[row]))


def test_duplicates_are_summed(device: torch.device, path: dict[str, Any]) -> None:
    twice = make_experts(device, **path, ids=[[3, 3]] * path["tokens"])
    twice.weights[:] = torch.tensor([0.25, 0.75], device=device)
    once = Experts(twice.x, twice.w_gate_up, twice.w_down, torch.ones_like(twice.weights[:, :1]), twice.ids[:, :1].contiguous())
    assert_close(check(twice), check(once).double().cpu(), F32)


@pytest.mark.parametrize("tokens", [2, 17, 33, 70])
@pytest.mark.usefixtures("many_slots")
def test_experts_without_tokens_and_all_on_one(device: torch.device, tokens: int) -> None:
    check(make_experts(device, tokens=tokens, experts=6, ids=[[4]] * tokens))
    check(make_experts(device, tokens=tokens, experts=6, ids=[[1, 4], [4, -1]] * (tokens // 2) + [[1, 4]] * (tokens % 2)))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 16, 17, 33])
@pytest.mark.parametrize("experts", [1, 3, 40])
def test_token_counts_around_the_thresholds(device: torch.device, tokens: int, experts: int) -> None:
    check(make_experts(device, tokens=tokens, experts=experts, top_k=3, dtype=F16))


@pytest.mark.parametrize("top_k", [1, 3, 10, 17, 22])
def test_choices(device: torch.device, path: dict[str, Any], top_k: int) -> None:
    check(make_experts(device, **path, top_k=top_k, hidden=16, inner=8))


def test_no_tokens(device: torch.device) -> None:
    assert make_experts(device, tokens=0, experts=3).run().shape == (0, 32)
    check(make_experts(device, tokens=2, experts=3))


def test_no_experts_here(device: torch.device, path: dict[str, Any]) -> None:
    problem = make_experts(device, tokens=path["tokens"], experts=1, spoken=4)
    problem.w_gate_up, problem.w_down = problem.w_gate_up[:0], problem.w_down[:0]
    problem.options["expert_map"] = torch.full((4,), -1, dtype=torch.int32, device=device)
    assert not check(problem).any()


def test_ranges_add_up_to_the_whole(device: torch.device, path: dict[str, Any]) -> None:
    whole = make_experts(device, **path)
    total = torch.zeros_like(whole.x, dtype=torch.float64)
    for start, end in ((0, 2), (2, 2), (2, 5)):
        options = {"expert_range": (start, end), "num_experts": 5}
        part = Experts(whole.x, whole.w_gate_up[start:end], whole.w_down[start:end], whole.weights, whole.ids, options)
        total += check(part).double()
    assert_close(total, expected(whole), F32)


def test_map_is_honoured_and_stale_entries_are_skipped(device: torch.device, path: dict[str, Any]) -> None:
    expert_map = torch.tensor([-1, 2, -1, 0, 1, 3, -7, 10**6], dtype=torch.int32)
    check(make_experts(device, tokens=path["tokens"], experts=3, spoken=10, top_k=4, expert_map=expert_map))


@pytest.mark.parametrize("biased", [False, True])
def test_weights_on_the_input(device: torch.device, path: dict[str, Any], biased: bool) -> None:
    check(make_experts(device, **path, biased=biased, weight_on_input=True, strided=True))


@pytest.mark.parametrize("valid", [0, 1, 3, 9])
@pytest.mark.parametrize("tokens", [1, 5])
def test_padding_tokens_change_nothing_and_are_zero(device: torch.device, tokens: int, valid: int) -> None:
    problem = make_experts(device, tokens=tokens, experts=30, num_valid_tokens=torch.tensor(valid, dtype=torch.int32))
    clean = check(problem)
    problem.x[valid:] = NAN
    problem.weights[valid:] = NAN
    problem.ids[valid:] = 2**30
    assert torch.equal(problem.run(), clean)


def test_bad_rows_leave_their_neighbours_alone(device: torch.device) -> None:
    problem = make_experts(device, tokens=9, experts=3)
    clean = problem.run()
    problem.x[4] = NAN
    out = problem.run()
    assert torch.isnan(out[4]).all()
    rest = [t for t in range(9) if t != 4]
    assert torch.equal(out[rest], clean[rest])


def test_skipped_weights_may_be_nan(device: torch.device, path: dict[str, Any]) -> None:
    problem = make_experts(device, **path)
    problem.ids[:, 1] = -1
    clean = check(problem)
    problem.weights[:, 1] = NAN
    assert torch.equal(problem.run(), clean)


@pytest.mark.usefixtures("many_slots")
def test_both_indexes_give_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_experts(device, tokens=40, experts=7, top_k=3)
    many = check(problem)
    monkeypatch.undo()
    assert torch.equal(problem.run(), many)
    assert torch.equal(problem.run(), many)


def test_scratch_is_what_the_products_need(device: torch.device) -> None:
    from hal.kernels import scratch

    tokens, top_k, hidden, inner = 64, 4, 96, 40
    problem = make_experts(device, tokens=tokens, experts=16, hidden=hidden, inner=inner, top_k=top_k, dtype=BF16)
    before = dict(scratch._CURRENT)
    scratch._CURRENT.clear()
    try:
        problem.run()
        used = sum(b.nbytes for b in scratch.buffers())
    finally:
        scratch._CURRENT.clear()
        scratch._CURRENT.update(before)
    assert used <= 1.25 * 2 * tokens * top_k * (inner + hidden)
