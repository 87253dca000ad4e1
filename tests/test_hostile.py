"""Arguments that once got through, crashed in the depths or left something half-done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal
from hal import ArgumentError, Choice, Config, ConfigError, FallbackError, Implementation, ReasonCode, ResolutionError, Source


def decode(**changes: Any) -> Any:
    """A valid call of flash_decode on the reference, with changes."""
    torch.manual_seed(0)
    call: dict[str, Any] = {
        "q": torch.randn(2, 4, 16),
        "k_cache": torch.randn(8, 4, 2, 16),
        "v_cache": torch.randn(8, 4, 2, 16),
        "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
        "block_tables": torch.tensor([[1, 2, -1], [4, 5, 6]], dtype=torch.int32),
    }
    return hal.get_backend("reference").flash_decode(**(call | changes))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "out", "lse", "q", "k_cache"])
def test_grad_is_refused_for_every_tensor(name, warm):
    shapes = {"sinks": (4,), "alibi_slopes": (4,), "out": (2, 4, 16), "lse": (2, 4), "q": (2, 4, 16), "k_cache": (8, 4, 2, 16)}
    if warm:
        decode(**{name: torch.zeros(shapes[name])})
    with pytest.raises(ArgumentError, match=f"`{name}` requires grad"):
        decode(**{name: torch.zeros(shapes[name]).requires_grad_()})
    if name in ("sinks", "q"):
        with torch.no_grad():
            assert not decode(**{name: torch.zeros(shapes[name]).requires_grad_()}).requires_grad


@pytest.mark.parametrize("window", [2**31, 2**63, 10**30])
def test_window_beyond_positions(window):
    with pytest.raises(ArgumentError, match="`window`"):
        decode(window=window)


def test_bad_page_is_seen_whatever_the_window():
    tables = torch.tensor([[1, 2, -1], [99, 5, 6]], dtype=torch.int32)
    for window in (None, 100, 2**31 - 1):
        with pytest.raises(ArgumentError, match=r"block_tables\[1, 0\]"):
            decode(block_tables=tables, window=window)


@pytest.mark.parametrize("argument", ["scale", "softcap"])
@pytest.mark.parametrize("value", [10**30 * 10**30, float("inf"), "x", [1.0]])
def test_numbers_beyond_float32(argument, value):
    with pytest.raises(ArgumentError, match=f"`{argument}`"):
        decode(**{argument: value})


@pytest.mark.parametrize("argument", ["k_cache", "v_cache", "seq_lens", "block_tables", "cu_seqlens_q", "out", "plan"])
def test_no_tensor(argument):
    with pytest.raises(ArgumentError, match=f"`{argument}` is list"):
        decode(**{argument: [1]})


def test_errors_have_no_inner_traceback():
    with pytest.raises(ArgumentError) as caught:
        decode(window=0)
    assert caught.value.__context__ is None


def test_output_may_be_the_query():
    expected = decode(q=torch.ones(4, 4, 16), q_len=2)
    q = torch.ones(4, 4, 16)
    assert torch.equal(decode(q=q, q_len=2, out=q), expected)


@pytest.mark.parametrize("strides", [(0, 16, 1), (8, 16, 1), (64, 0, 1)])
def test_overlapping_output(strides):
    with pytest.raises(ArgumentError, match="do not overlap"):
        decode(out=torch.zeros(200).as_strided((2, 4, 16), strides))


def test_nothing_is_written_when_token_scales_overlap():
    backend = hal.get_backend("reference")
    cache = torch.zeros(6, 4, 2, 16, dtype=torch.int8)
    rows, slots = torch.randn(2, 2, 16), torch.tensor([1, 2])
    with pytest.raises(ArgumentError, match="`v_scale`.*do not overlap"):
        backend.write_kv(rows, rows, cache, cache.clone(), slots, k_scale=torch.zeros(6, 4, 2), v_scale=torch.zeros(6, 4, 1).expand(6, 4, 2))
    assert not cache.any()
    with pytest.raises(ArgumentError, match="`k_scale` is 0.0"):
        backend.write_kv(rows, rows, cache, cache.clone(), slots, k_scale=0.0, v_scale=1.0)


def test_explain_tells_what_fallback_error_will_do(fake_backend, make_hal, states):
    def gate(call, device):
        return [hal.Reason(ReasonCode.FEATURE, "no")]

    backend = make_hal(fake_backend("fast", gate=gate), fake_backend("reference"), chain=("fast", "reference"), fallback="error")
    report = backend.explain("merge_states", *states)
    assert report.chosen is None
    assert report.candidates[1].reasons[0].code is ReasonCode.DISABLED_BY_CONFIG
    with pytest.raises(FallbackError, match="must not stand in"):
        backend.merge_states(*states)


def test_reference_that_cannot_serve_is_no_stand_in(fake_backend, make_hal, states):
    def gate(call, device):
        return [hal.Reason(ReasonCode.FEATURE, "no")]

    specs = fake_backend("fast", gate=gate), fake_backend("reference", gate=gate)
    with pytest.raises(ResolutionError) as caught:
        make_hal(*specs, chain=("fast", "reference"), fallback="error").merge_states(*states)
    assert not isinstance(caught.value, FallbackError)
    assert "ask for a chain" not in str(caught.value)


def test_target_that_exits_is_a_reason(fake_backend, make_hal, states, tmp_path, monkeypatch):
    (tmp_path / "exiting_target.py").write_text("raise SystemExit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    spec = fake_backend("fast", implementations={"merge_states": Implementation("exiting_target:merge_states")})
    with pytest.raises(ResolutionError, match="LOAD_ERROR: loading exiting_target:merge_states failed: SystemExit: 7"):
        make_hal(spec, chain=("fast",)).merge_states(*states)


def test_gate_that_returns_text(fake_backend, make_hal, states):
    with pytest.raises(hal.PluginError, match="not hal.Reason"):
        make_hal(fake_backend("fast", gate=lambda call, device: ["no"]), chain=("fast",)).merge_states(*states)


@pytest.mark.parametrize(("backend", "config"), [(123, None), (b"triton", None), (None, {}), (None, 5)])
def test_get_backend_of_wrong_types(backend, config):
    with pytest.raises(ArgumentError, match="get_backend: `(backend|config)` is"):
        hal.get_backend(backend, config=config)


def test_empty_choice():
    source = Source("argument", "test")
    with pytest.raises(ConfigError, match="names no backend"):
        hal.get_backend(config=Config("own", source, Choice((), False, source)))


@pytest.mark.parametrize("op", [5, None, [1]])
def test_explain_of_no_op(op):
    with pytest.raises(ArgumentError, match="`op` is"):
        hal.get_backend("reference").explain(op)


def test_shipped_config_is_one_object_wherever_one_stands(tmp_path, monkeypatch):
    first = hal.get_backend(config="cpu")
    monkeypatch.chdir(tmp_path)
    assert hal.get_backend(config="cpu") is first


def test_unknown_plugin_in_hal_plugins_is_said(monkeypatch, caplog):
    monkeypatch.setenv("HAL_PLUGINS", "acmee")
    hal.get_backend("reference")
    assert "HAL_PLUGINS names 'acmee', which is not installed" in caplog.text
