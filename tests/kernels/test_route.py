"""Routing kernels against a stable sort in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.naive_route import INF, NAN, assert_routes, bad_rows, expected

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXPERTS = [1, 2, 3, 7, 8, 13, 16, 17, 31, 32, 33, 60, 64, 72, 96, 128, 144, 160, 200, 256, 257, 384, 512, 1000, 1024, 1025, 2048, 2049]
DEEPSEEK_V3: dict[str, Any] = {"scoring": "sigmoid", "renormalize": True, "num_groups": 8, "top_groups": 4, "group_score": "top2", "scale": 2.5}
DEEPSEEK_V2: dict[str, Any] = {"num_groups": 8, "top_groups": 3, "scale": 16.0}


def random_logits(tokens: int, experts: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return (torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype).to(device)


def check(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    from hal.kernels.route import route

    got = route(logits, top_k, **options)
    assert_routes(got, logits, top_k, **options)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts", EXPERTS)
def test_any_number_of_experts(device: torch.device, dtype: torch.dtype, experts: int) -> None:
    logits = random_logits(3, experts, dtype, device)
    check(logits, min(8, experts))
    check(logits, min(3, experts), renormalize=True)


@pytest.mark.parametrize("top_k", [1, 2, 9, 10, 16, 17, 22, 32, 33, 64, 65, 100, 257])
def test_any_k(device: torch.device, top_k: int) -> None:
    for dtype in DTYPES if top_k <= 100 else DTYPES[-1:]:
        weights, ids = check(random_logits(2, max(top_k, 100), dtype, device), top_k)
        assert (weights.diff(dim=1) <= 0).all()
        assert len(set(ids[0].tolist())) == top_k


@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 32, 33, 65])
@pytest.mark.parametrize("experts", [8, 64])
def test_any_number_of_tokens(device: torch.device, tokens: int, experts: int) -> None:
    weights, ids = check(random_logits(tokens, experts, torch.bfloat16, device), 2, renormalize=True)
    assert weights.shape == ids.shape == (tokens, 2)


def test_small_examples(device: torch.device) -> None:
    from hal.kernels.route import route

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    for renormalize, wanted in ((False, [0.6439, 0.2369]), (True, [0.7311, 0.2689])):
        weights, ids = route(logits, 2, renormalize=renormalize)
        assert ids.tolist() == [[0, 1]]
        assert weights.tolist()[0] == pytest.approx(wanted, abs=1e-4)
    last = torch.zeros(1, 1025, device=device)
    last[0, 1024] = 1.0
    assert route(last, 1)[1].tolist() == [[1024]]


@pytest.mark.parametrize("experts", [8, 60, 128, 1030])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_id(device: torch.device, experts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    few_values = torch.randint(-1, 2, (4, experts), generator=generator).to(dtype)
    few_values[:2] *= -1  # zeros of both signs
    check(few_values.to(device), 6)
    check(few_values.to(device), 6, scoring="sigmoid")
    check(few_values.to(device), 4, correction_bias=torch.zeros(experts, device=device))
    assert check(torch.zeros(1, experts, dtype=dtype, device=device), 7)[1].tolist() == [list(range(7))]


def test_close_logits_keep_their_order(device: torch.device) -> None:
    logits = (1.0 + torch.arange(96).flip(0) * 2.0**-23)[None].to(device)  # neighbours in fp32
    assert check(logits, 5)[1].tolist() == [[0, 1, 2, 3, 4]]
    assert check(logits.flip(1), 5)[1].tolist() == [[95, 94, 93, 92, 91]]
    high = torch.arange(20, 52, device=device, dtype=torch.float32)[None]  # every sigmoid is 1 in fp32
    assert check(high, 3, scoring="sigmoid")[1].tolist() == [[31, 30, 29]]
    subnormal = (torch.arange(1, 41) * 2.0**-24).to(torch.float16)[None].to(device)
    assert check(subnormal, 3)[1].tolist() == [[39, 38, 37]]


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "renormalize": {"renormalize": True},
    "sigmoid": {"scoring": "sigmoid", "scale": 0.5},
    "sigmoid-renormalize": {"scoring": "sigmoid", "renormalize": True},
    "bias": {"correction_bias": True},
    "sigmoid-bias": {"scoring": "sigmoid", "correction_bias": True, "renormalize": True},
    "groups": {"num_groups": 4, "top_groups": 2},
    "groups-top2": {"num_groups": 4, "top_groups": 2, "group_score": "top2"},
    "groups-bias": {"num_groups": 4, "top_groups": 2, "correction_bias": True},
    "groups-top2-bias": {"num_groups": 4, "top_groups": 2, "group_score": "top2", "correction_bias": True, "scoring": "sigmoid"},
}


@pytest.mark.parametrize("experts", [16, 60, 128, 1028])
@pytest.mark.parametrize("name", OPTIONS)
def test_bad_rows_and_their_neighbours(device: torch.device, name: str, experts: int) -> None:
    options = dict(OPTIONS[name])
    if options.get("correction_bias"):
        options["correction_bias"] = random_logits(1, experts, torch.float32, device, 5)[0] / 8
    rows = bad_rows(experts)
    good = random_logits(len(rows) + 1, experts, torch.float32, device, 2)
    logits = torch.stack([row for pair in zip(good, rows.values(), strict=False) for row in (pair[0], pair[1].to(device))] + [good[-1]])
    k = 5
    weights, ids = check(logits, k, **options)
    alone = check(good, k, **options)
    assert torch.equal(weights[::2], alone[0])
    assert torch.equal(ids[::2], alone[1])
    for row in (1 + 2 * list(rows).index(bad) for bad in ("nan", "-inf", "nan-or--inf")):
        assert ids[row].tolist() == list(range(k))
        assert not weights[row].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bad_rows_of_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    logits = torch.stack(list(bad_rows(40).values())).clamp(-6e4, 6e4 if dtype == torch.float16 else INF).to(dtype).to(device)
    logits[1] = INF
    check(logits, 6)
    check(logits, 6, renormalize=True)


def test_a_bias_chooses_but_does_not_weigh(device: torch.device) -> None:
    logits = random_logits(4, 40, torch.bfloat16, device)
    bias = torch.zeros(40, device=device)
    bias[7], bias[9] = 100.0, NAN
    for scoring in ("softmax", "sigmoid"):
        weights, ids = check(logits, 4, scoring=scoring, correction_bias=bias)
        assert (ids[:, 0] == 7).all()
        assert weights.max() <= 1.0
    weights, ids = check(logits, 40, scoring="softmax", correction_bias=bias)
    assert (ids[:, -1] == 9).all()
    assert not weights[:, -1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups(device: torch.device, dtype: torch.dtype) -> None:
    bias = random_logits(1, 256, torch.float32, device, 9)[0] / 10
    check(random_logits(5, 256, dtype, device), 8, correction_bias=bias, **DEEPSEEK_V3)
    check(random_logits(5, 160, dtype, device), 6, **DEEPSEEK_V2)
    check(random_logits(3, 72, dtype, device), 9, num_groups=3, top_groups=2, group_score="top2")
    check(random_logits(3, 12, dtype, device), 3, num_groups=12, top_groups=5, group_score="top2")  # groups of one
    check(random_logits(3, 12, dtype, device), 6, num_groups=4, top_groups=2)  # k: all that may be chosen
    check(random_logits(3, 30, dtype, device), 20, num_groups=3, top_groups=3, group_score="top2")  # none left out


def test_equal_groups_go_to_the_lower_one(device: torch.device) -> None:
    logits = torch.zeros(1, 24, device=device)
    for score in ("max", "top2"):
        assert check(logits, 7, num_groups=6, top_groups=2, group_score=score)[1].tolist() == [list(range(7))]
    logits[0, 22] = logits[0, 10] = 1.0
    assert check(logits, 5, num_groups=6, top_groups=2)[1].tolist() == [[10, 22, 8, 9, 11]]


@pytest.mark.parametrize("name", OPTIONS)
def test_many_experts(device: torch.device, name: str) -> None:
    options = dict(OPTIONS[name])
    experts = 9000
    if options.get("correction_bias"):
        options["correction_bias"] = random_logits(1, experts, torch.float32, device, 5)[0] / 8
    check(random_logits(2, experts, torch.float32, device), 12, **options)


@pytest.fixture
def always_sort(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let `launch_route` sort rows of any size; the compiled code differs in the sizes alone."""
    from hal.kernels import route

    monkeypatch.setattr(route, "sorts_rows", lambda padded, top_k: True)
    route.route_constants.cache_clear()
    yield
    route.route_constants.cache_clear()


def sorted_check(logits: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    from hal.kernels.route import launch_route

    given: dict[str, Any] = {"scoring": "softmax", "renormalize": False, "correction_bias": None, "num_groups": 1, "top_groups": 1}
    given |= {"group_score": "max", "scale": 1.0} | options
    got = torch.full((len(logits), k), NAN, device=logits.device), torch.full((len(logits), k), -7, dtype=torch.int32, device=logits.device)
    launch_route(logits, k, weights=got[0], ids=got[1], **given)
    assert_routes(got, logits, k, **options)
    return got


@pytest.mark.usefixtures("always_sort")
@pytest.mark.parametrize("experts", [8, 20])
@pytest.mark.parametrize("name", OPTIONS)
def test_sorted_rows(device: torch.device, name: str, experts: int) -> None:
    options = dict(OPTIONS[name])
    if options.get("correction_bias"):
        options["correction_bias"] = random_logits(1, experts, torch.float32, device, 5)[0] / 8
        options["correction_bias"][experts // 2] = NAN
    logits = torch.stack([*bad_rows(experts).values(), random_logits(1, experts, torch.float32, torch.device("cpu"))[0]]).to(device)
    most = experts // 2 if "num_groups" in options else experts
    for k in {1, most // 2, most}:
        sorted_check(logits, k, **options)


@pytest.mark.usefixtures("always_sort")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sorted_ties_go_to_the_lower_id(device: torch.device, dtype: torch.dtype) -> None:
    few_values = torch.randint(-1, 2, (4, 60), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    sorted_check(few_values, 60)
    sorted_check(few_values, 33, correction_bias=torch.zeros(60, device=device))
    close = (1.0 + torch.arange(64).flip(0) * 2.0**-23)[None].to(device)
    assert sorted_check(close, 64)[1].tolist() == [list(range(64))]
    assert sorted_check(close.flip(1), 64)[1].tolist() == [list(range(63, -1, -1))]


@pytest.mark.parametrize(("experts", "top_k"), [(512, 512), (512, 256), (1030, 31), (1030, 32), (4097, 40)])
def test_both_sides_of_where_rows_are_sorted(device: torch.device, experts: int, top_k: int) -> None:
    from hal.kernels.route import sorts_rows

    padded = 1 << (experts - 1).bit_length()
    assert sorts_rows(padded, top_k) == ((experts, top_k) in {(512, 512), (1030, 32)})
    check(random_logits(1, experts, torch.float32, device), top_k)
    check(random_logits(1, experts, torch.bfloat16, device), top_k, renormalize=True)


def test_a_bias_of_infinity_still_does_not_weigh(device: torch.device) -> None:
    """A usable logit keeps its weight, also where the bias puts it last: the same in every way to choose."""
    from hal.kernels.route import route

    logits = random_logits(2, 300, torch.float32, device)
    bias = torch.zeros(300, device=device)
    bias[3] = -INF
    weights, ids = route(logits, 300, correction_bias=bias)
    assert (ids[:, -1] == 3).all()
    torch.testing.assert_close(weights[:, -1], torch.softmax(logits, 1)[:, 3], rtol=2e-5, atol=0)


@pytest.mark.parametrize("experts", [8, 100, 1040])
def test_strides_and_outputs(device: torch.device, experts: int) -> None:
    from hal.kernels.route import route

    k = 4
    wide = torch.full((5, experts + 5), NAN, device=device)
    for first in (0, 3):
        logits = wide[:, first : first + experts]
        logits.copy_(random_logits(5, experts, torch.float32, device, first))
        for steps in (1, 2):
            rows = logits[::steps]
            weights = torch.full((rows.shape[0], 7), NAN, device=device)
            ids = torch.full((rows.shape[0], 9), -7, dtype=torch.int32, device=device)
            got = route(rows, k, weights=weights[:, 2 : 2 + k], ids=ids[:, 1 : 1 + k])
            assert got[0].data_ptr() == weights[:, 2:].data_ptr()
            assert got[1].data_ptr() == ids[:, 1:].data_ptr()
            assert_routes(got, rows, k)
            assert torch.isnan(weights[:, :2]).all()
            assert torch.isnan(weights[:, 2 + k :]).all()
            assert (ids[:, :1] == -7).all()
            assert (ids[:, 1 + k :] == -7).all()


def configs() -> list[Any]:
    from hal.kernels.route_tuning import RouteConfig

    return [RouteConfig(vec, rows, packed, unroll) for vec in (1, 8) for rows in (1, 4) for packed in (0, 64) for unroll in (1, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts", [8, 60, 256])
def test_every_way_to_run_gives_the_same(device: torch.device, dtype: torch.dtype, experts: int) -> None:
    from hal.kernels.route import launch_route

    logits, k = random_logits(5, experts, dtype, device), 4
    logits[2, ::2] = logits[2, 0]
    bias = torch.zeros(experts, device=device)
    for given in (None, bias):
        bits: dict[int, list[Tensor]] = {}
        for config in configs():
            weights = torch.empty(5, k, device=device)
            ids = torch.empty(5, k, dtype=torch.int32, device=device)
            launch_route(logits, k, "softmax", False, given, 4 if experts > 8 else 1, 1, "max", 1.0, weights, ids, config)
            assert_routes((weights, ids), logits, k, num_groups=4 if experts > 8 else 1, correction_bias=given)
            bits.setdefault(config.vec, []).append(weights)
        for same in bits.values():  # rows of a program do not show
            assert all(torch.equal(w, same[0]) for w in same)


def test_vectors_are_aligned() -> None:
    from hal.kernels.route import route_constants
    from hal.kernels.route_tuning import RouteConfig

    def vec(experts: int, groups: int, stride: int, element_size: int, most: int = 8) -> int:
        return route_constants(experts, 4, groups, stride, element_size, False, RouteConfig(most, 1)).VEC

    assert vec(128, 1, 128, 2) == 4  # a 32nd of a row
    assert vec(512, 1, 512, 2) == 8
    assert vec(512, 1, 512, 4) == 4  # 16 bytes
    assert vec(512, 1, 516, 2) == 4  # the row stride
    assert vec(60, 1, 60, 2) == 2
    assert vec(8, 1, 8, 2) == 8
    assert vec(257, 1, 257, 2) == 1
    assert vec(160, 8, 160, 2) == 4  # groups of 20
    assert vec(160, 1, 160, 2, most=1) == 1


def test_configs_cover_every_call() -> None:
    from hal.kernels.route_kernel import MOST_EXPERTS
    from hal.kernels.route_tuning import route_config

    sizes = [1 << n for n in range(MOST_EXPERTS.bit_length())]
    for grouped in (False, True):
        for experts in sizes:
            found = [route_config(experts, grouped, tokens) for tokens in (1, 64, 2048, 2049, 10**7)]
            assert len({config.vec for config in found}) == 1  # else a row's bits depended on the number of rows


class TestRepeats:
    """Remembered launches, with a stand-in for the compiled kernel."""

    ROOM = torch.empty(256, dtype=torch.uint8)

    @pytest.fixture
    def repeats(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from hal.kernels import repeat

        class Kernel:
            def __init__(self, compiled: Any, arguments: Any, programs: int, *, pdl: bool) -> None:
                self.places = {name: place for place, name in enumerate(compiled.names)}
                self.slots = [0] * len(self.places)
                self.launches: list[tuple[int, list[int]]] = []
                compiled.kernels.append(self)

            def launch(self, stream: int) -> None:
                self.launches.append((stream, list(self.slots)))

        monkeypatch.setattr(repeat, "DirectKernel", Kernel)
        monkeypatch.setattr(repeat, "can_launch_directly", lambda compiled: compiled.direct)
        monkeypatch.setattr(repeat, "_current_device", lambda: None)  # that of CPU tensors
        monkeypatch.setattr(repeat, "_current_stream", lambda index: 70)
        return repeat.Repeats("a", "bias", "b")

    def at(self, offset: int) -> Tensor:
        return self.ROOM[-self.ROOM.data_ptr() % 16 + offset :]

    def test_pointers_are_exchanged(self, repeats: Any) -> None:
        compiled = SimpleNamespace(names=["a", "b", "c"], kernels=[], direct=True)  # `bias` was None
        first, then = (self.at(0), self.at(16)), (self.at(32), self.at(48))
        assert not repeats.launch("form", first)
        repeats.remember("form", compiled, (*first, 5), 3, pdl=True)
        assert repeats.launch("form", then)
        assert compiled.kernels[0].launches == [(70, [then[0].data_ptr(), then[1].data_ptr(), 0])]
        assert not repeats.launch("other", first)

    def test_other_alignments_and_devices_go_through_triton(self, repeats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from hal.kernels import repeat

        compiled = SimpleNamespace(names=["a", "b"], kernels=[], direct=True)
        repeats.remember("odd", compiled, (self.at(8), self.at(16)), 3, pdl=True)
        assert not repeats.launch("odd", (self.at(0), self.at(16)))
        repeats.remember("form", compiled, (self.at(0), self.at(16)), 3, pdl=True)
        assert not repeats.launch("form", (self.at(0), self.at(24)))
        monkeypatch.setattr(repeat, "_current_device", lambda: 1)
        assert not repeats.launch("form", (self.at(0), self.at(16)))
        assert compiled.kernels[0].launches == []
        monkeypatch.setattr(torch.version, "hip", "6.4")
        repeats.remember("amd", compiled, (self.at(0), self.at(16)), 3, pdl=True)
        monkeypatch.setattr(torch.version, "hip", None)
        compiled.direct = False
        repeats.remember("indirect", compiled, (self.at(0), self.at(16)), 3, pdl=True)
        assert len(compiled.kernels) == 1


def test_the_oracle_knows_softmax() -> None:
    weights, ids = expected(torch.tensor([[0.0, np.log(3.0)]]), 2)
    assert ids.tolist() == [[1, 0]]
    assert weights[0] == pytest.approx([0.75, 0.25])
