"""Which config serves which experts: measurements first, then the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hal.kernels import moe_tuning
from hal.kernels.moe_configs import Experts, GemmConfig, Measured, MoeConfig, SlotConfig, SlotPath
from hal.kernels.moe_measured import HOPPER

CPU = torch.device("cpu")
OURS = Experts(24, 96, 40, 3)
CONFIG = MoeConfig(32, GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    moe_tuning._USED.clear()
    moe_tuning.expert_config.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_tuning, "is_hopper", lambda device: True)
    moe_tuning.expert_config.cache_clear()


def test_rows_of_an_expert_that_has_any() -> None:
    experts = Experts(128, 2048, 768, 8)
    assert experts.rows(1) == pytest.approx(1.0)
    assert experts.rows(16) == pytest.approx(128 / 82.4, rel=0.01)  # 82.5 of 128 were touched in a measurement
    assert experts.rows(8192) == pytest.approx(512.0)
    assert Experts(2, 8, 8, 5).rows(4) == pytest.approx(10.0)  # more choices than experts held here


@pytest.mark.usefixtures("hopper")
def test_shipped_measurements_decide_near_them_only() -> None:
    entry = next(e for e in HOPPER if e.tokens == 256)
    for tokens in (256, 300, 128 * 4):
        assert moe_tuning.expert_config(CPU, entry.experts, tokens) == entry.config
    assert moe_tuning.expert_config(CPU, entry.experts, 10**6) != entry.config
    assert isinstance(moe_tuning.expert_config(CPU, replace(entry.experts, inner=760), 256), MoeConfig)
    fp32 = moe_tuning.expert_config(CPU, replace(entry.experts, element_bytes=4), 256)
    assert fp32 in [config for _, config in moe_tuning.EXPERT_CONFIGS["other", 4]]


def test_named_measurements_precede() -> None:
    before = moe_tuning.expert_config(CPU, OURS, 64)
    moe_tuning.use_measured("cpu", [Measured(OURS, 64, CONFIG, 1.0), Measured(OURS, 1, SlotPath(SlotConfig(4, 32, 1), SlotConfig(4, 32, 1)), 1.0)])
    assert moe_tuning.expert_config(CPU, OURS, 64) == CONFIG != before
    assert moe_tuning.expert_config(CPU, OURS, 7) != CONFIG, "nearer to 1 than to 64, but too far from both by a factor of 4"
    assert isinstance(moe_tuning.expert_config(CPU, OURS, 3), SlotPath)
    moe_tuning.use_measured("another card", [])
    assert moe_tuning.expert_config(CPU, OURS, 64) == CONFIG
    moe_tuning.use_measured("cpu", [])
    assert moe_tuning.expert_config(CPU, OURS, 64) == before


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 100, 1000, 10**5])
@pytest.mark.parametrize("experts", [Experts(1, 64, 1, 1), Experts(8, 2880, 2880, 4), Experts(512, 7168, 2048, 10), Experts(4, 17, 33, 4, 2, False)])
def test_the_model_serves_everything(experts: Experts, tokens: int) -> None:
    config = moe_tuning.expert_config(CPU, experts, tokens)
    assert isinstance(config, (MoeConfig, SlotPath))
    if isinstance(config, MoeConfig):
        assert config.block_m >= 16
        assert all(c.block_n >= 32 and c.block_k >= 32 for c in (config.up, config.down))


def test_tiles_are_cut_where_they_would_be_empty() -> None:
    wide = GemmConfig(256, 128, 4, 3)
    assert moe_tuning.fitted(wide, 4096, 4096) == wide
    assert moe_tuning.fitted(wide, 1408, 4096).block_n == 128  # 6 tiles of 256 hold 1536
    assert moe_tuning.fitted(wide, 4096, 128) == replace(wide, block_k=64, stages=4)
    assert moe_tuning.fitted(wide, 40, 8).block_n == 64


def test_every_candidate_runs_and_gives_the_same(device: torch.device, tmp_path: Path) -> None:
    """The measuring command on the real kernels, with a timer that only runs them."""
    from hal.tune_moe import TuneOptions, tune_moe

    if device.type != "cpu":
        pytest.skip("measures on a GPU without a stand-in")
    lines: list[str] = []
    spent = iter(range(10**6, 0, -1))
    options = TuneOptions(4, 16, 8, 2, (1, 6), "float32", True, "cpu", tmp_path / "t.yaml")
    found = tune_moe(options, timer=lambda calls: (float(next(spent)), calls[0]().clone()), say=lines.append)
    assert [entry.tokens for entry in found.fused_moe] == [1, 6]
    assert not [line for line in lines if "failed" in line or "left out" in line]
