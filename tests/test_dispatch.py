"""The call path: what is judged when, what a failing kernel shows, what capture and validation do."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

import hal
from hal import ArgumentError, FallbackError, Implementation, PluginError, Reason, ReasonCode, ResolutionError
from hal.ops import OPS


def refuse(text="no"):
    return lambda call, device: [Reason(ReasonCode.FEATURE, text)]


def test_call_reaches_first_of_chain(fake_backend, make_hal, states):
    backend = make_hal(fake_backend("fast"), fake_backend("reference"), chain=("fast", "reference"))
    assert backend.merge_states(*states)[0] == "fast"
    assert [r.chosen for r in backend.decisions()] == ["fast"]


def test_explicit_request_never_degrades(fake_backend, make_hal, states):
    backend = make_hal(fake_backend("fast", gate=refuse("heads are odd")), fake_backend("reference"), chain=("fast",), explicit=True)
    with pytest.raises(ResolutionError, match="asked for explicitly.*\n.*FEATURE: heads are odd") as caught:
        backend.merge_states(*states)
    assert caught.value.report
    assert caught.value.report.candidates[0].reasons == (Reason(ReasonCode.FEATURE, "heads are odd"),)
    assert "test.yaml:3" in str(caught.value)


def test_chain_falls_back_and_says_so_once(fake_backend, make_hal, states, caplog):
    backend = make_hal(fake_backend("fast", gate=refuse("heads are odd")), fake_backend("reference"), chain=("fast", "reference"))
    with caplog.at_level(logging.WARNING, logger="hal"):
        for _ in range(3):
            assert backend.merge_states(*states)[0] == "reference"
        assert backend.merge_states(*(s[:1] for s in states))[0] == "reference"
    assert len(caplog.records) == 1
    assert "served by 'reference', not by 'fast'" in caplog.text
    assert "FEATURE: heads are odd" in caplog.text


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_fallback_allow_is_quiet_by_default(fake_backend, make_hal, states, caplog, level):
    backend = make_hal(fake_backend("fast", gate=refuse()), fake_backend("reference"), chain=("fast", "reference"), fallback="allow")
    with caplog.at_level(level, logger="hal"):
        backend.merge_states(*states)
    assert len(caplog.records) == (level == logging.DEBUG)


def test_fallback_error_stops_the_reference_only(fake_backend, make_hal, states):
    specs = fake_backend("fast", gate=refuse()), fake_backend("slow"), fake_backend("reference")
    assert make_hal(*specs, chain=("fast", "slow"), fallback="error").merge_states(*states)[0] == "slow"
    with pytest.raises(FallbackError, match="fallback: error"):
        make_hal(*specs, chain=("fast", "reference"), fallback="error").merge_states(*states)
    assert make_hal(*specs, chain=("reference",), fallback="error").merge_states(*states)[0] == "reference"


def test_gate_is_judged_once_per_signature(fake_backend, make_hal, states):
    asked = []

    def gate(call, device):
        asked.append(call)
        return []

    backend = make_hal(fake_backend("fast", gate=gate), chain=("fast",))
    for _ in range(3):
        backend.merge_states(*states)
    assert len(asked) == 1
    backend.merge_states(*(s[:1] for s in states))
    assert len(asked) == 2


def test_bug_in_a_gate_is_not_a_refusal(fake_backend, make_hal, states):
    def gate(call, device):
        raise KeyError("oops")

    backend = make_hal(fake_backend("fast", gate=gate), fake_backend("reference"), chain=("fast", "reference"))
    with pytest.raises(PluginError, match="gate of backend 'fast' for merge_states raised KeyError"):
        backend.merge_states(*states)


def test_kernel_exception_propagates_with_the_resolution(fake_backend, make_hal, states):
    calls = []

    def failing(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
        calls.append(1)
        raise RuntimeError("launch failed")

    backend = make_hal(fake_backend("fast", function=failing), fake_backend("reference"), chain=("fast", "reference"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="launch failed") as caught:
            backend.merge_states(*states)
        (note,) = vars(caught.value)["__notes__"]
        assert "merge_states on cpu" in note
        assert "fast: runs" in note
    assert len(calls) == 2  # tried again on the next call, never replaced


def test_caller_mistake_is_an_error_not_a_fallback(fake_backend, make_hal, states):
    backend = make_hal(fake_backend("fast"), fake_backend("reference"), chain=("fast", "reference"))
    with pytest.raises(ArgumentError, match=r"merge_states: `lse_b` has shape \(2, 5\); accepted: \(T, H\) = \(2, 4\)"):
        backend.merge_states(*states[:3], torch.zeros(2, 5))
    with pytest.raises(ArgumentError, match="`out_a` is list; accepted: a tensor"):
        backend.merge_states([1.0], *states[1:])
    with pytest.raises(TypeError, match=r"merge_states\(\) missing a required argument: 'lse_b'"):
        backend.merge_states(*states[:3])
    with pytest.raises(TypeError, match="merge_states"):
        backend.merge_states(*states, sink=None)
    assert backend.decisions() == []


def test_repeated_bad_call_fails_every_time(fake_backend, make_hal, states):
    backend = make_hal(fake_backend("fast"), chain=("fast",))
    backend.merge_states(*states)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="requires grad"):
            backend.merge_states(states[0].clone().requires_grad_(), *states[1:])
    with torch.no_grad():
        backend.merge_states(states[0].clone().requires_grad_(), *states[1:])


def test_observer_sees_every_entry(fake_backend, make_hal, states):
    seen = []
    backend = make_hal(fake_backend("fast"), chain=("fast",), observe=lambda *what: seen.append(what))
    backend.merge_states(*states)
    backend.merge_states(*states)
    assert seen == [("merge_states", "fast", "fake_fast:merge_states")] * 2


@pytest.mark.parametrize("gated", [False, True])
def test_validate_off_binds_directly_unless_gated(fake_backend, make_hal, states, gated):
    gates: dict[bool, Any] = {True: lambda call, device: [], False: None}
    backend = make_hal(fake_backend("fast", gate=gates[gated]), chain=("fast",), validate="off")
    assert backend.merge_states(*states)[0] == "fast"
    wrong = (*states[:3], torch.zeros(2, 5))
    if gated:
        with pytest.raises(ArgumentError):
            backend.merge_states(*wrong)
    else:
        assert backend.merge_states(*wrong)[0] == "fast"
        assert backend.merge_states(out_a=wrong[0], lse_a=wrong[1], out_b=wrong[2], lse_b=wrong[3])[0] == "fast"


def test_values_on_the_cpu_are_read_unless_off(fake_backend, make_hal):
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "max_seq_len": 64}
    for validate in ("first", "always"):
        backend = make_hal(fake_backend("fast"), chain=("fast",), validate=validate)
        assert backend.plan_decode(torch.tensor([3, 64], dtype=torch.int32), **facts) == "planned"
        with pytest.raises(ArgumentError, match=r"`seq_lens\[1\]` is 65; accepted: 0..64"):
            backend.plan_decode(torch.tensor([3, 65], dtype=torch.int32), **facts)
    backend = make_hal(fake_backend("fast"), chain=("fast",), validate="off")
    assert backend.plan_decode(torch.tensor([3, 65], dtype=torch.int32), **facts) == "planned"


def test_host_sync_is_shown(fake_backend, make_hal):
    spec = fake_backend("fast", implementations={"merge_states": Implementation("fake_fast:merge_states", host_sync=True)})
    report = make_hal(spec, chain=("fast",)).explain("merge_states")
    assert report.winner.host_sync
    assert "waits for the device" in str(report)


def test_backend_is_immutable_and_names_near_misses(fake_backend, make_hal):
    backend = make_hal(fake_backend("fast"), chain=("fast",))
    with pytest.raises(AttributeError, match="immutable"):
        backend.merge_states = None
    with pytest.raises(AttributeError, match="did you mean 'flash_decode'"):
        backend.flash_decod  # noqa: B018
    with pytest.raises(ArgumentError, match="did you mean 'write_kv'"):
        backend.explain("write_vk")


def test_bound_ops_carry_contract_and_signature(fake_backend, make_hal):
    backend = make_hal(fake_backend("fast"), chain=("fast",))
    assert "natural logarithm" in backend.merge_states.__doc__
    assert list(__import__("inspect").signature(backend.write_kv).parameters)[:3] == ["key", "value", "k_cache"]


def test_threads_share_one_object_and_agree(fake_backend, make_hal, states):
    backend = make_hal(fake_backend("fast"), chain=("fast",))
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(backend.merge_states(*states)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["fast"] * 8
    assert len(backend.decisions()) == 1


def test_warmup_makes_tensors_up_and_reports(fake_backend, make_hal):
    backend = make_hal(fake_backend("fast"), chain=("fast",))
    spec = hal.TensorSpec
    out, lse = spec((2, 4, 16), torch.float32), spec((2, 4), torch.float32, strides=(1, 2))
    (report,) = backend.warmup("merge_states", [{"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}], device="cpu")
    assert report.chosen == "fast"
    with pytest.raises(ArgumentError, match="did you mean 'out_a'"):
        backend.warmup("merge_states", [{"outa": out}], device="cpu")


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_signature_function_has_the_contracts_parameters(op):
    import inspect

    wanted = [(p.name, p.kind, p.default) for p in op.parameters.parameters.values()]
    found = [(p.name, p.kind, p.default) for p in inspect.signature(op.signature).parameters.values()]
    assert found == wanted
    assert op.doc


@pytest.mark.parametrize("validate", ["first", "off"])
def test_every_path_attaches_the_resolution(fake_backend, make_hal, states, validate):
    def sometimes(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
        if sinks is not None:
            raise RuntimeError("launch failed")

    backend = make_hal(fake_backend("fast", function=sometimes), chain=("fast",), validate=validate)
    backend.merge_states(*states)
    with pytest.raises(RuntimeError) as caught:
        backend.merge_states(*states, sinks=torch.zeros(4))
    assert "fast: runs" in vars(caught.value)["__notes__"][0]


GOOD_DECODE: dict[str, Any] = {"q_len": 1, "window": 1, "softcap": 0.0, "scale": 1.0, "return_lse": False, "batch_invariant": False}


@pytest.mark.parametrize(
    "bad",
    [{"q_len": True}, {"q_len": 1.0}, {"window": True}, {"window": 1.0}, {"softcap": False}, {"scale": True}, {"scale": float("nan")},
     {"return_lse": 0}, {"batch_invariant": 0}, {"k_scale": 1.0}, {"plan": 3}, {"tree_mask": [True]}],
    ids=lambda bad: "-".join(f"{k}={v!r}" for k, v in bad.items()),
)  # fmt: skip
def test_equal_looking_arguments_get_their_own_verdict(bad):
    """A good call first: what it leaves behind must not let a bad one through."""
    q, cache = torch.randn(2, 4, 16), torch.randn(3, 4, 2, 16)
    lens, tables = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([[0], [2]], dtype=torch.int32)
    backend = hal.get_backend("reference")
    backend.flash_decode(q, cache, cache, lens, tables, **GOOD_DECODE)
    with pytest.raises(ArgumentError, match=f"`{next(iter(bad))}`"):
        backend.flash_decode(q, cache, cache, lens, tables, **(GOOD_DECODE | bad))


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), "x", True])
def test_bad_scales_after_a_good_one(scale):
    rows, cache = torch.randn(2, 2, 16), torch.zeros(3, 4, 2, 16, dtype=torch.int8)
    backend = hal.get_backend("reference")
    backend.write_kv(rows, rows, cache, cache.clone(), torch.tensor([0, 1]), k_scale=0.5, v_scale=0.5)
    with pytest.raises(ArgumentError, match="`v_scale`"):
        backend.write_kv(rows, rows, cache, cache.clone(), torch.tensor([0, 1]), k_scale=0.5, v_scale=scale)


@pytest.mark.parametrize("validate", ["first", "always", "off"])
def test_cpu_kernel_sees_contract_defaults(fake_backend, make_hal, states, validate):
    def record(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
        return sinks, out, lse

    backend = make_hal(fake_backend("fast", function=record), chain=("fast",), validate=validate)
    assert backend.merge_states(*states) == (None, None, None)
