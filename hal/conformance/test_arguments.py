"""Mistakes of the caller: a typed error that names the argument, before anything is launched or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance.cases import Attention
from hal.conformance.compare import assert_same_bits
from hal.conformance.inputs import build_decode, build_prefill
from hal.conformance.subject import WRITTEN, Subject
from hal.conformance.test_decode import plan_facts
from hal.conformance.test_merge import states
from hal.conformance.test_write import make as make_write
from hal.errors import ArgumentError

pytestmark = pytest.mark.hal_no_entry

Change = Callable[[Any], Any]


def _decode(subject: Subject) -> dict[str, Any]:
    return build_decode(Attention("call", (9, 20)), subject.generator(), subject.device).args


def _prefill(subject: Subject) -> dict[str, Any]:
    return build_prefill(Attention("call", (9, 20), q_len=(4, 7)), subject.generator(), subject.device).args


def _write(subject: Subject) -> dict[str, Any]:
    return make_write(subject, [3, 9, 11]).args


def _plan(subject: Subject) -> dict[str, Any]:
    return plan_facts(_decode(subject))


_CALLS = {"flash_decode": _decode, "flash_prefill": _prefill, "merge_states": states, "write_kv": _write, "plan_decode": _plan}


def _const(value: Any) -> Change:
    return lambda old: value


def _needs_grad(old: Tensor) -> Tensor:
    return old.clone().requires_grad_()


def _spread(old: Tensor) -> Tensor:
    """The same values with a last dimension that is not contiguous."""
    return old.repeat_interleave(2, dim=-1)[..., ::2]


def _overlapping(old: Tensor) -> Tensor:
    return old[:1].expand(old.shape)


def _elsewhere(old: Tensor) -> Tensor:
    return old.to("meta")


def _to(dtype: torch.dtype) -> Change:
    return lambda old: old.to(dtype)


def _cut(old: Tensor) -> Tensor:
    return old[:-1]


def _narrow(old: Tensor) -> Tensor:
    return old[..., :-8]


def _double_dims(old: Tensor) -> Tensor:
    return old[None]


def _like_query(*shape: int, dtype: torch.dtype = torch.float32) -> Change:
    return lambda old: torch.zeros(*shape, dtype=dtype)


_ATTENTION: tuple[tuple[str, str, Change], ...] = (
    ("q", "4d", _double_dims),
    ("q", "int", _to(torch.int32)),
    ("q", "float64", _to(torch.float64)),
    ("q", "strides", _spread),
    ("q", "grad", _needs_grad),
    ("q", "3-heads-over-2", lambda old: old[:, :3]),
    ("q", "33-heads-over-2", lambda old: old[:, :1].repeat(1, 33, 1)),
    ("q", "not-a-tensor", _const([1.0])),
    ("kv_layout", "unknown", _const("NDH")),
    ("scale", "nan", _const(float("nan"))),
    ("scale", "text", _const("1")),
    ("softcap", "negative", _const(-1.0)),
    ("window", "zero", _const(0)),
    ("window", "float", _const(4.0)),
    ("window", "flag", _const(True)),
    ("alibi_slopes", "shape", _like_query(3)),
    ("alibi_slopes", "dtype", _like_query(4, dtype=torch.float16)),
    ("sinks", "shape", _like_query(5)),
    ("tree_mask", "dtype", _like_query(2, 8)),
    ("k_scale", "unquantised", _const(0.5)),
    ("v_scale", "unquantised", _const(0.5)),
    ("out", "shape", _cut),
    ("out", "dtype", _to(torch.float64)),
    ("out", "overlap", _overlapping),
    ("out", "strides", _spread),
    ("lse", "dtype", _to(torch.float16)),
    ("lse", "device", _elsewhere),
    ("return_lse", "number", _const(1)),
    ("batch_invariant", "text", _const("yes")),
)
_TABLE: dict[str, tuple[tuple[str, str, Change], ...]] = {
    "flash_decode": (
        *_ATTENTION,
        ("q", "rows", _cut),
        ("q", "head-dim", _narrow),
        ("k_cache", "dtype", _to(torch.float16)),
        ("k_cache", "dims", _double_dims),
        ("k_cache", "device", _elsewhere),
        ("k_cache", "grad", _needs_grad),
        ("v_cache", "pages", _cut),
        ("v_cache", "dtype", _to(torch.float8_e4m3fn)),
        ("v_cache", "strides", _spread),
        ("v_cache", "head-dim", lambda old: old[..., :20]),
        ("seq_lens", "int64", _to(torch.int64)),
        ("seq_lens", "2d", _double_dims),
        ("seq_lens", "device", _elsewhere),
        ("block_tables", "rows", _cut),
        ("block_tables", "int64", _to(torch.int64)),
        ("q_len", "zero", _const(0)),
        ("q_len", "flag", _const(True)),
        ("cu_seqlens_q", "shape", _like_query(2, dtype=torch.int32)),
        ("plan", "not-a-plan", _const(3)),
    ),
    "flash_prefill": (
        *_ATTENTION,
        ("k", "head-dim", _narrow),
        ("v", "pages", _cut),
        ("seq_lens", "missing", _const(None)),
        ("seq_lens", "shape", _cut),
        ("block_tables", "missing", _const(None)),
        ("cu_seqlens_q", "int64", _to(torch.int64)),
        ("cu_seqlens_q", "empty", lambda old: old[:0]),
        ("max_q_len", "negative", _const(-1)),
        ("causal", "number", _const(0)),
    ),
    "merge_states": (
        ("out_a", "2d", lambda old: old[0]),
        ("out_a", "int", _to(torch.int32)),
        ("out_b", "dtype", _to(torch.bfloat16)),
        ("out_b", "rows", _cut),
        ("out_b", "strides", _spread),
        ("out_a", "grad", _needs_grad),
        ("lse_a", "dtype", _to(torch.float16)),
        ("lse_b", "rows", _cut),
        ("lse_b", "device", _elsewhere),
        ("sinks", "shape", _like_query(7)),
        ("out", "shape", _like_query(6, 3, 16)),
        ("lse", "dtype", _like_query(6, 3, dtype=torch.float16)),
    ),
    "write_kv": (
        ("key", "2d", lambda old: old[0]),
        ("key", "int", _to(torch.int32)),
        ("key", "strides", _spread),
        ("key", "grad", _needs_grad),
        ("value", "rows", _cut),
        ("value", "dtype", _to(torch.float16)),
        ("k_cache", "head-dim", _narrow),
        ("k_cache", "dtype", _to(torch.bfloat16)),
        ("v_cache", "head-dim", _narrow),
        ("v_cache", "device", _elsewhere),
        ("slot_mapping", "dtype", _to(torch.int16)),
        ("slot_mapping", "2d", _double_dims),
        ("slot_mapping", "longer-than-key", lambda old: old.repeat(2)),
        ("kv_layout", "unknown", _const("nhd")),
        ("k_scale", "unquantised", _const(0.5)),
    ),
    "plan_decode": (
        ("seq_lens", "int64", _to(torch.int64)),
        ("num_heads", "zero", _const(0)),
        ("num_heads", "not-multiple", _const(3)),
        ("head_dim", "odd", _const(33)),
        ("page_size", "zero", _const(0)),
        ("max_seq_len", "negative", _const(-1)),
        ("window", "zero", _const(0)),
        ("kv_dtype", "unknown", _const(torch.int32)),
    ),
}
_CASES = [
    pytest.param(op, argument, change, id=f"{op}-{argument}-{label}", marks=pytest.mark.hal_op(op))
    for op, table in _TABLE.items()
    for argument, label, change in table
]


def expect_error(subject: Subject, op: str, args: dict[str, Any], argument: str) -> None:
    """Check that a call raises ArgumentError for `argument`, enters nothing and writes nothing, and that explain agrees."""
    kept = {name: args[name].clone() for name in WRITTEN.get(op, ()) if isinstance(args.get(name), Tensor)}
    entered = subject.entries
    with pytest.raises(ArgumentError) as caught:
        getattr(subject.backend(), op)(**args)
    error = caught.value
    assert error.op == op
    # A fault between two arguments may be laid at the door of either.
    assert argument in str(error), f"the error does not name `{argument}`: {error}"
    assert error.accepted, f"the error does not say what is accepted: {error}"
    assert subject.entries == entered, "an implementation was entered"
    for name, before in kept.items():
        if before.device.type != "meta":
            assert_same_bits(f"`{name}` after an error", args[name].detach(), before.detach())


@pytest.mark.parametrize(("op", "argument", "change"), _CASES)
def test_structure(hal_subject: Subject, op: str, argument: str, change: Change) -> None:
    hal_subject.require(op)
    args = _CALLS[op](hal_subject)
    changed = change(args.get(argument))
    if isinstance(changed, Tensor) and args.get(argument) is None:
        changed = changed.to(hal_subject.device)
    args[argument] = changed
    expect_error(hal_subject, op, args, argument)
    with pytest.raises(ArgumentError):
        hal_subject.backend().explain(op, **args)


@pytest.mark.hal_op("flash_decode")
@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_int8_needs_scales(hal_subject: Subject, argument: str) -> None:
    hal_subject.require("flash_decode")
    case = Attention("int8", (9,), kv="int8", k_scale="float", v_scale="float")
    args = build_decode(case, hal_subject.generator(), hal_subject.device).args
    expect_error(hal_subject, "flash_decode", args | {argument: None}, argument)
    expect_error(hal_subject, "flash_decode", args | {argument: torch.ones(7, device=hal_subject.device)}, argument)
    expect_error(hal_subject, "flash_decode", args | {argument: torch.ones(2, dtype=torch.float16, device=hal_subject.device)}, argument)


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _set(index: tuple[int, ...], value: int) -> Change:
    def change(old: Tensor) -> Tensor:
        new = old.clone()
        new[index] = value
        return new

    return change


_VALUES = (
    ("flash_decode", "seq_lens", "negative", _set((0,), -1)),
    ("flash_decode", "seq_lens", "beyond-table", _set((1,), 10_000)),
    ("flash_decode", "block_tables", "negative", _set((1, 0), -1)),
    ("flash_decode", "block_tables", "beyond-cache", _set((1, 2), 2**30)),
    ("flash_decode", "cu_seqlens_q", "start", _const(_ints([1, 1, 2]))),
    ("flash_decode", "cu_seqlens_q", "decreasing", _const(_ints([0, 2, 1]))),
    ("flash_decode", "cu_seqlens_q", "beyond-rows", _const(_ints([0, 1, 7]))),
    ("flash_prefill", "cu_seqlens_q", "decreasing", _const(_ints([0, 7, 4]))),
    ("flash_prefill", "max_q_len", "too-small", _const(3)),
    ("flash_prefill", "seq_lens", "negative", _set((0,), -5)),
    ("plan_decode", "seq_lens", "beyond-maximum", _set((0,), 10_000)),
)


@pytest.mark.parametrize(
    ("op", "argument", "change"), [pytest.param(op, a, c, id=f"{op}-{a}-{label}", marks=pytest.mark.hal_op(op)) for op, a, label, c in _VALUES]
)
def test_values(hal_subject: Subject, op: str, argument: str, change: Change) -> None:
    """Values inside tensors are read on the CPU, and elsewhere under `validate: always`."""
    hal_subject.require(op)
    args = _CALLS[op](hal_subject)
    changed = change(args.get(argument))
    args[argument] = changed.to(hal_subject.device) if isinstance(changed, Tensor) else changed
    hal_subject.require_call(op, args)
    backend = hal_subject.backend("always")
    entered = hal_subject.entries
    with pytest.raises(ArgumentError) as caught:
        getattr(backend, op)(**args)
    named = "cu_seqlens_q" if argument == "max_q_len" else argument
    assert caught.value.argument.startswith(named)
    assert hal_subject.entries == entered
    if "out" in args and isinstance(args["out"], Tensor):
        assert bool(args["out"].isnan().all())


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.hal_op(op)) for op in _CALLS])
def test_unknown_keyword(hal_subject: Subject, op: str) -> None:
    hal_subject.require(op)
    with pytest.raises(TypeError):
        getattr(hal_subject.backend(), op)(**_CALLS[op](hal_subject), sliding_window=3)
