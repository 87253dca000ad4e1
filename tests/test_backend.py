"""`get_backend`: precedence, identity, context, cache specs."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

import hal
from hal import ArgumentError, Choice, Config, Source, UnknownBackendError

FILE = "name: mine\nbackends: [reference]\n"


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    return path


def test_default_is_one_object(monkeypatch):
    assert hal.get_backend() is hal.get_backend()
    assert hal.get_backend("reference") is hal.get_backend("reference")
    assert hal.get_backend().config.source.kind == "detection"


def test_precedence(monkeypatch, config_file, caplog):
    assert hal.get_backend(config=config_file).config.source.kind == "argument"
    hal.backend.reset()
    monkeypatch.setenv("HAL_CONFIG", str(config_file))
    assert hal.get_backend().config.name == "mine"
    assert hal.get_backend().config.source.kind == "environment"
    hal.backend.reset()
    monkeypatch.setenv("HAL_BACKEND", "triton")
    choice = hal.get_backend().config.choice("write_kv")
    assert (choice.backends, choice.explicit, choice.source.where) == (("triton",), True, "HAL_BACKEND=triton")
    choice = hal.get_backend("reference").config.choice("write_kv")
    assert (choice.backends, choice.source.kind) == (("reference",), "argument")
    with caplog.at_level(logging.WARNING, logger="hal"):  # an argument precedes the environment, and that is said
        assert hal.get_backend(config=config_file).config.choice("write_kv").backends == ("reference",)
    assert "HAL_BACKEND=triton is ignored here" in caplog.text


def test_wrong_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("HAL_BACKEND", "tritn")
    with pytest.raises(UnknownBackendError, match=r"HAL_BACKEND=tritn.*did you mean 'triton'"):
        hal.get_backend()


def test_path_as_first_argument_is_a_config(config_file):
    assert hal.get_backend(config_file) is hal.get_backend(config=config_file)
    assert hal.get_backend(str(config_file)).name == "mine"


def test_config_object(states):
    source = Source("argument", "test")
    config = Config("own", source, Choice(("reference",), False, source))
    assert hal.get_backend(config=config) is hal.get_backend(config=config)
    assert hal.get_backend(config=config).merge_states(*states)[0].shape == states[0].shape
    bad = Config("own", source, Choice(("refrence",), False, source))
    with pytest.raises(UnknownBackendError, match="did you mean 'reference'"):
        hal.get_backend(config=bad)


def test_each_config_object_has_its_own_backend():
    import gc

    source = Source("argument", "test")
    for index in range(50):  # a freed config's id must not lead to its backend
        config = Config(f"n{index}", source, Choice(("reference",), False, source), validate="off" if index % 2 else "first")
        assert hal.get_backend("reference", config=config).config.validate == config.validate
        assert hal.get_backend(config=config).config.name == f"n{index}"
        del config
        gc.collect()


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 3.5])
def test_unknown_device_is_a_typed_error(device):
    backend = hal.get_backend("reference")
    for ask in (lambda: backend.explain("write_kv", device=device), lambda: backend.kv_cache_spec(1, 64, torch.float32, device=device)):
        with pytest.raises(ArgumentError, match="`device` is .*cpu"):
            ask()


def test_use_backend_nests_and_restores(config_file):
    outer = hal.get_backend()
    with hal.use_backend("reference") as inner:
        assert hal.get_backend() is inner
        with hal.use_backend(config_file) as innermost:
            assert hal.get_backend() is innermost
        assert hal.get_backend() is inner
    assert hal.get_backend() is outer


def test_use_backend_belongs_to_one_task():
    async def inside() -> bool:
        with hal.use_backend("reference") as backend:
            await asyncio.sleep(0.01)
            return hal.get_backend() is backend

    async def outside() -> bool:
        await asyncio.sleep(0.005)
        return hal.get_backend() is default

    async def both():
        return await asyncio.gather(inside(), outside())

    default = hal.get_backend()
    assert asyncio.run(both()) == [True, True]


def test_kv_cache_spec_allocates_what_the_ops_take():
    backend = hal.get_backend("reference")
    spec = backend.kv_cache_spec(2, 64, torch.int8, head_dim_v=32)
    k, v = spec.allocate(4, "cpu")
    scale_shape = spec.scale_shape(4)
    assert scale_shape == (4, 16, 2)
    scales = torch.zeros(scale_shape)
    new = torch.randn(3, 2, 64)
    backend.write_kv(new, new[..., :32], k, v, torch.tensor([0, 5, 9]), kv_layout=spec.layout, k_scale=scales, v_scale=scales.clone())
    assert int((scales != 0).sum()) == 6
    assert backend.kv_cache_spec(2, 64, torch.float32).scale_shape(4) is None
    with pytest.raises(ArgumentError, match="`num_kv_heads` is 0"):
        backend.kv_cache_spec(0, 64, torch.float32)
    with pytest.raises(ArgumentError, match="`dtype`"):
        backend.kv_cache_spec(1, 64, torch.float64)


def test_explain_with_a_call_checks_it(states):
    backend = hal.get_backend("reference")
    report = backend.explain("merge_states", *states)
    assert report.chosen == "reference"
    assert report.to_dict()["call"]["num_heads"] == 4
    with pytest.raises(ArgumentError, match="lse_b"):
        backend.explain("merge_states", *states[:3], torch.zeros(1))
