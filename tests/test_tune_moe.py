"""`hal tune moe`, its files, and the way of a file to the kernels."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal.errors import ConfigError, HalError, PluginError
from hal.tune_moe import TuneOptions, tune_moe
from hal.tuning import ExpertsEntry, Tuner, Tuning
from hal.tuning_file import read_tuning, write_tuning

pytest.importorskip("triton")
SMALL: dict[str, Any] = {"experts": 6, "hidden": 32, "inner": 48, "top_k": 2, "dtype": "float32", "k_inner": True, "device": "cpu"}
ENTRY = {
    "experts": 6, "hidden": 32, "inner": 48, "top_k": 2, "tokens": 16, "dtype": "float32", "path": "sorted", "block_m": 32, "microseconds": 7.5,
    "up": {"block_n": 32, "block_k": 32, "warps": 4, "stages": 2}, "down": {"block_n": 32, "block_k": 64, "warps": 4, "stages": 2},
}  # fmt: skip
SLOTS = {"rows": 4, "block_k": 64, "warps": 4}
HEAD = "version: 1\ndevice: cpu\nfused_moe:\n"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    from hal.kernels import moe_tuning

    moe_tuning._USED.clear()
    moe_tuning.expert_config.cache_clear()


def serving(tokens: int) -> Any:
    """The config that fused_moe would take for SMALL."""
    from hal.kernels.moe_configs import Experts
    from hal.kernels.moe_tuning import expert_config

    return expert_config(torch.device("cpu"), Experts(6, 32, 48, 2, 4), tokens)


def tuning_of(entry: dict[str, Any]) -> Tuning:
    return Tuning("cpu", (ExpertsEntry(**({"k_inner": True} | entry)),))


def fake(prefer: Callable[[Any], float], tokens: int) -> Callable[[Sequence[Callable[[], Any]]], tuple[float, Tensor | None]]:
    """A timer that runs nothing: what serves at the moment decides."""

    def timer(calls: Sequence[Callable[[], Any]]) -> tuple[float, Tensor | None]:
        assert calls
        return prefer(serving(tokens)), None

    return timer


def test_the_best_candidate_is_written_and_read(tmp_path: Path) -> None:
    def prefer(config: Any) -> float:
        return 10.0 - config.up.stages + (config.down.block_n == 64) if hasattr(config, "block_m") else 20.0

    lines: list[str] = []
    options = TuneOptions(**SMALL, tokens=(40,), output=tmp_path / "t.yaml")
    found = tune_moe(options, timer=fake(prefer, 40), say=lines.append)
    (entry,) = found.fused_moe
    assert (entry.tokens, entry.path, entry.up["stages"], entry.microseconds) == (40, "sorted", 4, 6.0)
    assert entry.down["block_n"] != 64
    assert "as it is" in lines[0]
    assert read_tuning(options.output) == replace(found, source=str(options.output))
    assert serving(40).up.stages != 4, "measuring must leave nothing behind"


def test_measuring_leaves_what_a_config_named() -> None:
    from hal.backends import triton_tuning

    before = serving(16)
    triton_tuning.apply(tuning_of(ENTRY))
    named = serving(16)
    assert named != before
    experts, device = triton_tuning.experts_of(tuning_of(ENTRY).fused_moe[0]), torch.device("cpu")
    assert triton_tuning.served(device, experts, 16) == named
    with triton_tuning.fixed(device, experts, 16, before):
        assert serving(16) == before
    assert serving(16) == named

    with pytest.raises(RuntimeError, match="too large"), triton_tuning.fixed(device, experts, 16, before):
        raise RuntimeError("too large a tile")
    assert serving(16) == named


def test_few_tokens_may_take_the_other_path(tmp_path: Path) -> None:
    options = TuneOptions(**SMALL, tokens=(1,), output=tmp_path / "t.yaml")
    found = tune_moe(options, timer=fake(lambda c: 9.0 if hasattr(c, "block_m") else float(c.up.rows + c.down.rows), 1), say=lambda line: None)
    (entry,) = found.fused_moe
    assert (entry.path, entry.block_m, entry.up["rows"], entry.down["rows"]) == ("slots", None, 4, 2)


def test_entries_of_other_shapes_are_kept(tmp_path: Path) -> None:
    output = tmp_path / "t.yaml"
    output.write_text(HEAD + f"- {json.dumps(ENTRY)}\n- {json.dumps(ENTRY | {'tokens': 40})}\n")
    tune_moe(TuneOptions(**SMALL, tokens=(40,), output=output), timer=fake(lambda c: 3.0, 40), say=lambda line: None)
    assert {e.tokens: e.microseconds for e in read_tuning(output).fused_moe} == {16: 7.5, 40: 3.0}
    output.write_text(HEAD.replace("cpu", "another card") + f"- {json.dumps(ENTRY)}\n")
    with pytest.raises(HalError, match="another card"):
        tune_moe(TuneOptions(**SMALL, tokens=(40,), output=output), timer=fake(lambda c: 3.0, 40))


def test_failing_and_wrong_candidates_are_left_out(tmp_path: Path) -> None:
    lines: list[str] = []

    def timer(calls: Sequence[Callable[[], Any]]) -> tuple[float, Tensor | None]:
        config = serving(40)
        if config.up.stages == 4:
            raise RuntimeError("out of shared memory")
        return 10.0 - config.up.stages, torch.full((2,), 1.0 if config.up.stages < 3 or len(lines) == 0 else 2.0)

    found = tune_moe(TuneOptions(**SMALL, tokens=(40,), output=tmp_path / "t.yaml"), timer=timer, say=lines.append)
    assert found.fused_moe[0].up["stages"] < 4
    assert any("out of shared memory" in line for line in lines)
    assert any("another result" in line for line in lines)


def test_time_limit_and_no_gpu(tmp_path: Path) -> None:
    options = TuneOptions(**SMALL, tokens=(40,), output=tmp_path / "t.yaml", limit_seconds=0.0)
    assert tune_moe(options, timer=fake(lambda c: 1.0, 40), say=lambda line: None).fused_moe == ()
    assert not options.output.exists()
    with pytest.raises(HalError, match="on a GPU"):
        tune_moe(options)
    with pytest.raises(HalError, match="cannot be written"):
        tune_moe(TuneOptions(**SMALL, tokens=(40,), output=tmp_path / "no" / "t.yaml"), timer=fake(lambda c: 1.0, 40), say=lambda line: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_m": 48}, r"t.yaml:4:\d+: `fused_moe.0.block_m`.*power of two.*48"),
        ({"block_m": None}, "block_m"),
        ({"path": "slot"}, "'sorted' or 'slots'"),
        ({"tokens": 0}, "greater than or equal to 1"),
        ({"tokens": "many"}, "valid integer"),
        ({"dtype": "fp8"}, "dtype"),
        ({"experts": None}, "experts"),
        ({"up": {"block_n": 32, "block_k": 32, "warps": 3, "stages": 2}}, "warps.*power of two"),
        ({"up": {"block_n": 32, "block_k": 32, "warps": 4, "stages": 2, "w_tmaa": True}}, "w_tmaa.*did you mean 'w_tma'"),
        ({"up": {"rows": 4, "block_k": 32, "warps": 4}}, "block_n.*missing"),
        ({"up": "fast"}, "up"),
        ({"up": {"block_n": 32, "block_k": 32, "warps": 4, "stages": 2, "ahead": 48}}, "ahead.*power of two"),
        ({"up": {"block_n": 32, "block_k": 32, "warps": 4, "stages": 2, "ahead": 4}}, "ahead.*0 or at least 16"),
        ({"up": {"block_n": 32, "block_k": 32, "warps": 4, "stages": 2, "group_m": 1 << 29}}, "group_m.*4096"),
        ({"path": "slots", "block_m": None, "up": {"rows": 4096, "block_k": 4096, "warps": 4}, "down": SLOTS}, "rows . block_k"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_files_are_refused_with_their_place(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(HEAD + f"- {json.dumps({k: v for k, v in (ENTRY | change).items() if v is not None})}\n")
    with pytest.raises(ConfigError, match=said) as caught:
        read_tuning(file)
    assert "t.yaml:4" in str(caught.value)


@pytest.mark.parametrize(("text", "said"), [("", "empty"), ("- 1\n", "mapping"), ("version: 2\ndevice: x\n", "version"), ("version: 1\n", "device")])
def test_bad_heads_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_tuning(file)


def test_a_config_names_a_file_and_the_kernels_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.resolve import Resolver
    from hal.spec import BackendSpec

    (tmp_path / "t.yaml").write_text(HEAD + f"- {json.dumps(ENTRY)}\n")
    config = tmp_path / "mine.yaml"
    config.write_text("name: mine\nbackends: reference\ntuning: t.yaml\n")
    backend = hal.get_backend(config=config)
    assert backend.config.tuning is not None
    before = serving(16)
    resolver = Resolver(backend.config, backend._resolver.registry)
    resolver._tune(BackendSpec("none", 1, {}))
    assert serving(16) == before
    resolver._tune(BackendSpec("triton", 1, {}, tuning="hal.backends.triton_tuning:apply"))
    assert (serving(16).block_m, serving(16).down.block_k) == (32, 64)
    config.write_text("name: mine\nbackends: reference\ntuning: other.yaml\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:3: `tuning`.*other.yaml.*cannot be read"):
        hal.backend.build_backend(None, config=config)


def test_a_refused_tuning_is_an_error_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends import triton_tuning
    from hal.resolve import Resolver
    from hal.spec import BackendSpec

    (tmp_path / "t.yaml").write_text(HEAD + f"- {json.dumps(ENTRY)}\n")
    (tmp_path / "mine.yaml").write_text("name: mine\nbackends: reference\ntuning: t.yaml\n")
    backend = hal.get_backend(config=tmp_path / "mine.yaml")
    resolver = Resolver(backend.config, backend._resolver.registry)
    spec = BackendSpec("triton", 1, {}, tuning="hal.backends.triton_tuning:apply")
    asked: list[Tuning] = []

    def refuse(tuning: Tuning) -> None:
        asked.append(tuning)
        raise ValueError("not on this card")

    with monkeypatch.context() as patch:
        patch.setattr(triton_tuning, "apply", refuse)
        for _ in range(2):
            with pytest.raises(PluginError, match=r"'triton' refused the tuning of .*mine.yaml.*not on this card"):
                resolver._tune(spec)
    assert len(asked) == 2
    monkeypatch.setattr(triton_tuning, "apply", asked.append)
    for _ in range(2):
        resolver._tune(spec)
    assert len(asked) == 3, "what a backend has taken is not handed to it again"


@pytest.mark.parametrize(("model", "config"), [("ProductModel", "GemmConfig"), ("SlotModel", "SlotConfig")])
def test_files_have_the_options_of_the_kernels(model: str, config: str) -> None:
    from hal import tuning_file
    from hal.kernels import moe_configs

    in_files = {name: "required" if f.is_required() else f.default for name, f in getattr(tuning_file, model).model_fields.items()}
    of_kernels = {f.name: "required" if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(getattr(moe_configs, config))}
    assert in_files == of_kernels


def test_the_tuner_is_what_the_command_expects() -> None:
    from hal.backends import triton_tuning

    tuner: Tuner = triton_tuning  # for mypy
    wanted = {name: member for name, member in vars(Tuner).items() if inspect.isfunction(member) and not name.startswith("_")}
    assert set(wanted) == {"served", "candidates", "fixed", "entry_of", "layer"}
    for name, member in wanted.items():
        assert list(inspect.signature(getattr(tuner, name)).parameters) == list(inspect.signature(member).parameters)[1:], name
    assert tuner.Experts(6, 32, 48, 2, 4, True) == triton_tuning.experts_of(tuning_of(ENTRY).fused_moe[0])


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    write_tuning(Tuning("card: 1", ()), file)
    assert read_tuning(file) == Tuning("card: 1", (), str(file))


def test_many_entries_can_be_read_back(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    entries = tuple(tuning_of(ENTRY | {"tokens": tokens, "experts": 8 + tokens}).fused_moe[0] for tokens in range(1, 400))
    write_tuning(Tuning("cpu", entries), file)
    assert {(e.experts, e.tokens) for e in read_tuning(file).fused_moe} == {(e.experts, e.tokens) for e in entries}


def test_no_measuring_for_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    def timer(calls: Any) -> Any:
        raise AssertionError("measured")

    with pytest.raises(HalError, match="no folder"):
        tune_moe(TuneOptions(**SMALL, tokens=(1,), output=tmp_path / "none" / "t.yaml"), timer=timer)
    with pytest.raises(HalError, match="is no device"):
        tune_moe(TuneOptions(**(SMALL | {"device": "foo"}), tokens=(1,), output=tmp_path / "t.yaml"), timer=timer)


def test_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hal.cli import app

    shape = ["tune", "moe", "-E", "6", "-H", "32", "-I", "48", "-k", "2", "-o", str(tmp_path / "t.yaml")]
    for tokens in ("1,x", "²", "٣", ""):
        assert "1,16,256" in CliRunner().invoke(app, [*shape, "--tokens", tokens]).output
    assert "--dtype" in CliRunner().invoke(app, [*shape, "--dtype", "fp8"]).output
    result = CliRunner().invoke(app, [*shape, "--device", "cpu"])
    assert isinstance(result.exception, HalError)
