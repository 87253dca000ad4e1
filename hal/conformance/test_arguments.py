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
from hal.conformance.moe_inputs import Moe, build_moe, gemm_args, index_of
from hal.conformance.subject import WRITTEN, Subject
from hal.conformance.tensors import mapped, tensors
from hal.conformance.test_decode import plan_facts
from hal.conformance.test_merge import states
from hal.conformance.test_write import make as make_write
from hal.errors import ArgumentError
from hal.ops.moe_checks import MoeIndex

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


def _topk(subject: Subject) -> dict[str, Any]:
    device = subject.device
    outputs = {"weights": torch.full((5, 2), torch.nan, device=device), "ids": torch.full((5, 2), -77, dtype=torch.int32, device=device)}
    return {"logits": torch.randn(5, 8, generator=subject.generator()).to(device), "top_k": 2, **outputs}


def _route(subject: Subject) -> dict[str, Any]:
    bias = torch.zeros(8, device=subject.device)
    return _topk(subject) | {"num_groups": 4, "top_groups": 2, "correction_bias": bias}


_IDS = [[0, 2], [1, 1], [-1, 2], [5, 0]]


def _index(subject: Subject) -> dict[str, Any]:
    out = MoeIndex(*(torch.full((n,), -77, dtype=torch.int32, device=subject.device) for n in (8, 8, 3)))
    return {"ids": torch.tensor(_IDS, dtype=torch.int32, device=subject.device), "num_experts": 3, "out": out}


def _expand(subject: Subject) -> dict[str, Any]:
    x = torch.randn(4, 16, generator=subject.generator()).to(subject.device)
    index = index_of(_index(subject)["ids"], 3)
    return {"x": x, "index": index, "out": torch.full((8, 16), torch.nan, device=subject.device)}


def _combine(subject: Subject) -> dict[str, Any]:
    y = torch.randn(8, 16, generator=subject.generator()).to(subject.device)
    out = torch.full((4, 16), torch.nan, device=subject.device)
    return {"y": y, "weights": torch.ones(4, 2, device=subject.device), "index": _expand(subject)["index"], "residual": y[:4] * 2, "out": out}


def _gemm(subject: Subject) -> dict[str, Any]:
    return gemm_args(Moe("call", biases=True), [3, 0, 4], subject.generator(), subject.device).args


def _activation(subject: Subject) -> dict[str, Any]:
    x = torch.randn(4, 16, generator=subject.generator()).to(subject.device)
    return {"x": x, "out": torch.full((4, 8), torch.nan, device=subject.device)}


def _fused(subject: Subject) -> dict[str, Any]:
    return build_moe(Moe("call", biases=True), subject.generator(), subject.device).args


_ACTIVATIONS = ("silu_and_mul", "gelu_and_mul", "swiglu_oai_and_mul")
_CALLS: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "flash_decode": _decode,
    "flash_prefill": _prefill,
    "merge_states": states,
    "write_kv": _write,
    "plan_decode": _plan,
    "topk_softmax": _topk,
    "route": _route,
    "moe_index": _index,
    "moe_expand": _expand,
    "group_gemm": _gemm,
    **dict.fromkeys(_ACTIVATIONS, _activation),
    "moe_combine": _combine,
    "fused_moe": _fused,
}


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
_ROUTED: tuple[tuple[str, str, Change], ...] = (
    ("logits", "3d", _double_dims),
    ("logits", "int", _to(torch.int32)),
    ("logits", "float64", _to(torch.float64)),
    ("logits", "strides", _spread),
    ("logits", "grad", _needs_grad),
    ("logits", "no-experts", lambda old: old[:, :0]),
    ("logits", "not-a-tensor", _const([[1.0]])),
    ("top_k", "zero", _const(0)),
    ("top_k", "above-experts", _const(9)),
    ("top_k", "float", _const(2.0)),
    ("top_k", "flag", _const(True)),
    ("renormalize", "number", _const(1)),
    ("weights", "shape", _cut),
    ("weights", "dtype", _to(torch.bfloat16)),
    ("weights", "device", _elsewhere),
    ("weights", "overlap", _overlapping),
    ("weights", "strides", _spread),
    ("ids", "shape", lambda old: old[:, :1]),
    ("ids", "int64", _to(torch.int64)),
    ("ids", "strides", _spread),
)
_ACTIVATED: tuple[tuple[str, str, Change], ...] = (
    ("x", "3d", _double_dims),
    ("x", "int", _to(torch.int32)),
    ("x", "strides", _spread),
    ("x", "grad", _needs_grad),
    ("x", "odd", lambda old: old[:, :15]),
    ("x", "empty", lambda old: old[:, :0]),
    ("gate_up", "unknown", _const("gate_first")),
    ("out", "shape", _cut),
    ("out", "dtype", _to(torch.bfloat16)),
    ("out", "overlap", _overlapping),
)


def _part(name: str, change: Change) -> Change:
    """Change one tensor of an index."""
    return lambda old: old._replace(**{name: change(getattr(old, name))})


_TABLE: dict[str, tuple[tuple[str, str, Change], ...]] = {
    "topk_softmax": _ROUTED,
    "route": (
        *_ROUTED,
        ("top_k", "above-groups", _const(5)),
        ("scoring", "unknown", _const("tanh")),
        ("correction_bias", "shape", _cut),
        ("correction_bias", "dtype", _to(torch.bfloat16)),
        ("correction_bias", "device", _elsewhere),
        ("correction_bias", "grad", _needs_grad),
        ("num_groups", "zero", _const(0)),
        ("num_groups", "no-divisor", _const(3)),
        ("top_groups", "zero", _const(0)),
        ("top_groups", "above-groups", _const(5)),
        ("top_groups", "flag", _const(True)),
        ("group_score", "unknown", _const("sum")),
        ("scale", "nan", _const(float("nan"))),
        ("scale", "text", _const("1")),
    ),
    "moe_index": (
        ("ids", "int64", _to(torch.int64)),
        ("ids", "1d", lambda old: old[0]),
        ("ids", "no-slots", lambda old: old[:, :0]),
        ("ids", "strides", _spread),
        ("num_experts", "negative", _const(-1)),
        ("num_experts", "float", _const(3.0)),
        ("expert_range", "list", _const([0, 3])),
        ("expert_range", "backwards", _const((2, 1))),
        ("expert_range", "beyond", _const((0, 4))),
        ("expert_range", "negative", _const((-1, 2))),
        ("expert_range", "three", _const((0, 1, 2))),
        ("expert_map", "shape", _like_query(4, dtype=torch.int32)),
        ("expert_map", "int64", _like_query(3, dtype=torch.int64)),
        ("num_local_experts", "other", _const(2)),
        ("out", "tuple", lambda old: tuple(old)),
        ("out", "short", _part("dst_to_src", _cut)),
        ("out", "int64", _part("expert_sizes", _to(torch.int64))),
        ("out", "overlap", _part("src_to_dst", _overlapping)),
    ),
    "moe_expand": (
        ("x", "1d", lambda old: old[0]),
        ("x", "16-bytes", _to(torch.complex128)),
        ("x", "other-than-out", _to(torch.int32)),
        ("x", "strides", _spread),
        ("x", "grad", _needs_grad),
        ("index", "tuple", lambda old: tuple(old)),
        ("index", "none", _const(None)),
        ("index", "slots", lambda old: MoeIndex(old.dst_to_src[:7], old.src_to_dst[:7], old.expert_sizes)),
        ("index", "unequal", _part("src_to_dst", _cut)),
        ("index", "int64", _part("dst_to_src", _to(torch.int64))),
        ("index", "device", _part("expert_sizes", _elsewhere)),
        ("out", "shape", _cut),
        ("out", "dtype", _to(torch.float16)),
        ("out", "overlap", _overlapping),
    ),
    "group_gemm": (
        ("x", "1d", lambda old: old[0]),
        ("x", "dtype", _to(torch.bfloat16)),
        ("x", "int8", _to(torch.int8)),
        ("x", "strides", _spread),
        ("x", "grad", _needs_grad),
        ("weight", "2d", lambda old: old[0]),
        ("weight", "inputs", _narrow),
        ("weight", "int32", _to(torch.int32)),
        ("weight", "strides", lambda old: old.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, ::2, ::2]),
        ("weight", "grad", _needs_grad),
        ("expert_sizes", "int64", _to(torch.int64)),
        ("expert_sizes", "shape", _cut),
        ("expert_sizes", "device", _elsewhere),
        ("bias", "shape", _cut),
        ("bias", "int", _to(torch.int32)),
        ("w_scales", "unquantised", _like_query(3)),
        ("x_scales", "unquantised", _like_query(7)),
        ("out", "shape", _cut),
        ("out", "dtype", _to(torch.bfloat16)),
        ("out", "overlap", _overlapping),
    ),
    **dict.fromkeys(_ACTIVATIONS, _ACTIVATED),
    "silu_and_mul": (*_ACTIVATED, ("limit", "zero", _const(0.0)), ("limit", "flag", _const(True)), ("limit", "text", _const("7"))),
    "gelu_and_mul": (*_ACTIVATED, ("approximate", "unknown", _const("erf"))),
    "swiglu_oai_and_mul": (*_ACTIVATED, ("alpha", "nan", _const(float("nan"))), ("limit", "zero", _const(0.0)), ("limit", "none", _const(None))),
    "moe_combine": (
        ("y", "rows", _cut),
        ("y", "int", _to(torch.int32)),
        ("y", "strides", _spread),
        ("y", "grad", _needs_grad),
        ("weights", "dtype", _to(torch.bfloat16)),
        ("weights", "1d", lambda old: old[0]),
        ("weights", "device", _elsewhere),
        ("index", "slots", _part("src_to_dst", _cut)),
        ("index", "list", lambda old: list(old)),
        ("residual", "shape", _cut),
        ("residual", "dtype", _to(torch.float16)),
        ("scale", "nan", _const(float("nan"))),
        ("scale", "huge", _const(2**64)),
        ("out", "shape", _cut),
        ("out", "dtype", _to(torch.float16)),
        ("out", "overlap", _overlapping),
    ),
    "fused_moe": (
        ("x", "3d", _double_dims),
        ("x", "dtype", _to(torch.bfloat16)),
        ("x", "int8", _to(torch.int8)),
        ("x", "strides", _spread),
        ("x", "grad", _needs_grad),
        ("w_gate_up", "hidden", _narrow),
        ("w_gate_up", "2d", lambda old: old[0]),
        ("w_gate_up", "odd", lambda old: old[:, :-1]),
        ("w_gate_up", "int32", _to(torch.int32)),
        ("w_gate_up", "strides", lambda old: old.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, ::2, ::2]),
        ("w_gate_up", "grad", _needs_grad),
        ("w_down", "experts", _cut),
        ("w_down", "turned", lambda old: old.transpose(1, 2)),
        ("w_down", "dtype", _to(torch.float16)),
        ("w_down", "device", _elsewhere),
        ("weights", "shape", _cut),
        ("weights", "dtype", _to(torch.bfloat16)),
        ("weights", "strides", _spread),
        ("ids", "int64", _to(torch.int64)),
        ("ids", "rows", _cut),
        ("ids", "1d", lambda old: old[0]),
        ("activation", "unknown", _const("relu")),
        ("gate_up", "unknown", _const("up_first")),
        ("b_gate_up", "shape", _narrow),
        ("b_down", "int", _to(torch.int32)),
        ("w_scales", "unquantised", _const((torch.ones(6), torch.ones(6)))),
        ("w_scales", "one", _like_query(6)),
        ("w_scales", "nones", _const((None, None))),
        ("x_scales", "unquantised", _like_query(7)),
        ("alpha", "with-silu", _const(1.702)),
        ("limit", "zero", _const(0.0)),
        ("limit", "text", _const("7")),
        ("num_experts", "other", _const(7)),
        ("num_experts", "huge", _const(2**63)),
        ("num_experts", "flag", _const(True)),
        ("expert_range", "size", _const((0, 5))),
        ("expert_range", "list", _const([0, 6])),
        ("expert_range", "negative", _const((-6, 0))),
        ("expert_map", "int64", _like_query(6, dtype=torch.int64)),
        ("expert_map", "2d", _like_query(6, 1, dtype=torch.int32)),
        ("weight_on_input", "number", _const(1)),
        ("num_valid_tokens", "int", _const(3)),
        ("num_valid_tokens", "shape", _like_query(2, dtype=torch.int32)),
        ("num_valid_tokens", "int64", _like_query(1, dtype=torch.int64)),
        ("out", "shape", _cut),
        ("out", "dtype", _to(torch.bfloat16)),
        ("out", "overlap", _overlapping),
        ("out", "strides", _spread),
    ),
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
    given = tensors(args)
    kept = {name: given[name].clone() for name in WRITTEN.get(op, ("out",)) if name in given}
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
            assert_same_bits(f"`{name}` after an error", given[name].detach(), before.detach())


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


_QUANTISED_CALLS = (
    ("group_gemm", "w_scales", None),
    ("group_gemm", "w_scales", torch.ones(7)),
    ("group_gemm", "w_scales", torch.ones(3, 48, dtype=torch.float16)),
    ("group_gemm", "w_scales", torch.ones(3, 48, 1)),
    ("group_gemm", "x_scales", None),
    ("group_gemm", "x_scales", torch.ones(7, 1)),
    ("group_gemm", "x_scales", torch.ones(6)),
    ("group_gemm", "out", torch.ones(7, 48, dtype=torch.int8)),
    ("fused_moe", "w_scales", None),
    ("fused_moe", "w_scales", (torch.ones(6), None)),
    ("fused_moe", "w_scales", (torch.ones(6), torch.ones(6, 32))),
    ("fused_moe", "w_scales", (torch.ones(6, 47), torch.ones(6, 32))),
    ("fused_moe", "x_scales", None),
    ("fused_moe", "x_scales", torch.ones(7, 1)),
)


@pytest.mark.parametrize(
    ("op", "argument", "value"),
    [pytest.param(*call, id=f"{call[0]}-{call[1]}-{i}", marks=pytest.mark.hal_op(call[0])) for i, call in enumerate(_QUANTISED_CALLS)],
)
@pytest.mark.parametrize("dtype", ["int8", "e4m3"])
def test_quantised_experts_need_fitting_scales(hal_subject: Subject, op: str, argument: str, value: Any, dtype: str) -> None:
    hal_subject.require(op)
    case = Moe("call", quantised=dtype, x_quantised=True)
    built = gemm_args(case, [3, 0, 4], hal_subject.generator(), hal_subject.device) if op == "group_gemm" else None
    args = (built or build_moe(case, hal_subject.generator(), hal_subject.device)).args
    expect_error(hal_subject, op, args | mapped({argument: value}, lambda t: t.to(hal_subject.device)), argument)


@pytest.mark.hal_op("fused_moe")
def test_placements_exclude_each_other(hal_subject: Subject) -> None:
    hal_subject.require("fused_moe")
    args = _fused(hal_subject) | {"expert_range": (0, 6), "expert_map": torch.zeros(6, dtype=torch.int32, device=hal_subject.device)}
    expect_error(hal_subject, "fused_moe", args, "expert_map")


@pytest.mark.hal_op("moe_index")
def test_map_needs_a_number_of_experts(hal_subject: Subject) -> None:
    hal_subject.require("moe_index")
    args = _index(hal_subject) | {"expert_map": torch.zeros(3, dtype=torch.int32, device=hal_subject.device)}
    expect_error(hal_subject, "moe_index", args, "num_local_experts")


@pytest.mark.hal_op("fused_moe")
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_numbers_of_other_activations(hal_subject: Subject, activation: str) -> None:
    hal_subject.require("fused_moe")
    for argument in ("alpha", "limit"):
        expect_error(hal_subject, "fused_moe", _fused(hal_subject) | {"activation": activation, argument: 2.0}, argument)


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
    ("group_gemm", "expert_sizes", "negative", _set((1,), -1)),
    ("group_gemm", "expert_sizes", "beyond-rows", _set((1,), 1)),
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
