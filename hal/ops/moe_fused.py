# mypy: disable-error-code="no-untyped-def"
# (the `_..._signature` function: its types are those of the Protocol above it, and a test compares the parameters)
"""The whole expert pipeline as one op: `fused_moe`.

Axes: T tokens, E experts held here, k experts per token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hal.ops import moe_checks as moe
from hal.ops.checks import FLOATS, Checker
from hal.ops.op import Arguments, Op, TensorMeta
from hal.ops.signature import facts, types

__all__ = ["ACTIVATIONS", "FUSED_MOE", "FusedMoe", "FusedMoeCall"]

#: The gated activations, and of each the optional numbers it takes.
ACTIVATIONS = {"silu": ("limit",), "gelu": (), "gelu_tanh": (), "swiglu_oai": ("alpha", "limit")}
_OPTIONAL = ("b_gate_up", "b_down", "x_scales", "alpha", "limit", "expert_range", "expert_map", "num_valid_tokens", "out")


class FusedMoe(Protocol):
    """Type of `backend.fused_moe`."""

    def __call__(
        self,
        x: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        weights: Tensor,
        ids: Tensor,
        *,
        activation: str = "silu",
        gate_up: str = "concat",
        b_gate_up: Tensor | None = None,
        b_down: Tensor | None = None,
        w_scales: tuple[Tensor, Tensor] | None = None,
        x_scales: Tensor | None = None,
        alpha: float | None = None,
        limit: float | None = None,
        num_experts: int | None = None,
        expert_range: tuple[int, int] | None = None,
        expert_map: Tensor | None = None,
        weight_on_input: bool = False,
        num_valid_tokens: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Feed every token through its experts and sum their results.

        `out[t] = sum_j weights[t, j] * (act(x[t] @ w_gate_up[e].T + b_gate_up[e]) @ w_down[e].T + b_down[e])` with e the local expert
        of `ids[t, j]`: what `moe_index`, `moe_expand`, `group_gemm`, the activation, `group_gemm` and `moe_combine` give one after
        the other. Sums are fp32, that over j runs in the order of j, and every run gives the same bits.

        Args:
            x: (T, H) fp32, fp16 or bf16, w_gate_up's dtype unless weights are quantised; then also their dtype, with
                `x_scales`. The last dimension contiguous, any row stride.
            w_gate_up: (E, 2I, H) fp32, fp16, bf16, int8 or fp8 e4m3; either of the last two dimensions contiguous, so that it may
                be a view of (E, H, 2I) storage. It is never copied or laid out anew.
            w_down: (E, H, I), the dtype of `w_gate_up`; the same about its strides.
            weights: (T, k) fp32 router weights, any row stride.
            ids: (T, k) int32 expert ids, k >= 1, any row stride. Ids below 0 or from `num_experts` on, and those of experts that
                are not held here, are skipped, whatever their values; a row that repeats an id gets the sum.
            activation: "silu": `gate * sigmoid(gate) * up`; "gelu", "gelu_tanh": see `gelu_and_mul`; "swiglu_oai": see
                `swiglu_oai_and_mul`.
            gate_up: "concat": of the 2I rows of `w_gate_up` the first I are gates; "interleaved": gates and ups in turn.
            b_gate_up: (E, 2I) fp32, fp16 or bf16, in the order of `w_gate_up`'s rows.
            b_down: (E, H) fp32, fp16 or bf16.
            w_scales: (scales of w_gate_up, scales of w_down), fp32 and of one kind, for quantised weights: see `group_gemm`. The
                intermediate result is quantised as x is.
            x_scales: fp32, for a quantised x: (T,), or beside block scales (T, ceil(H/128)).
            alpha: of "swiglu_oai" only; default 1.702.
            limit: above 0. Of "swiglu_oai", default 7.0; of "silu", where it clamps, `gate <= limit` and `-limit <= up <= limit`,
                default no limit.
            num_experts: how many experts the ids speak of, on all ranks together; default E, with a range its end, with a map its length.
            expert_range: (start, end): experts start..end-1 are held here; end - start is E.
            expert_map: (num_experts,) int32, local expert of each id; -1, or any value outside 0..E-1, for one that is not held here.
            weight_on_input: multiply x by the router weight, on the first product before its bias, instead of the result.
            num_valid_tokens: int32 () or (1,) on x's device: tokens from there on are padding. They cost nothing, their x, ids and
                weights are not looked at, and their rows of out are 0. Below 0 it acts as 0, beyond T as T.
            out: (T, H) in x's dtype, or of any floating-point dtype for a quantised x; any row stride, apart from the inputs.

        Returns:
            (T, H) in x's dtype, for a quantised x in that of `out`, else bf16. A token without an expert here gives exactly 0.
            Neither weights nor activations of experts that no token chose, nor those of skipped slots, have any effect, NaN included.
            T = 0 and E = 0 work.

        Raises:
            ArgumentError: an argument is outside this contract.
        """


def _fused_moe_signature(
    x,
    w_gate_up,
    w_down,
    weights,
    ids,
    *,
    activation="silu",
    gate_up="concat",
    b_gate_up=None,
    b_down=None,
    w_scales=None,
    x_scales=None,
    alpha=None,
    limit=None,
    num_experts=None,
    expert_range=None,
    expert_map=None,
    weight_on_input=False,
    num_valid_tokens=None,
    out=None,
):
    # Runs on every call: most pass few optional arguments.
    extras: Hashable = None
    if not (b_gate_up is b_down is w_scales is x_scales is alpha is limit is num_experts is expert_range is expert_map is num_valid_tokens is None):
        extras = (
            facts(b_gate_up), facts(b_down), moe.pair_facts(w_scales), facts(x_scales), alpha, limit, num_experts, moe.range_facts(expert_range),
            facts(expert_map), facts(num_valid_tokens), types(alpha, limit, num_experts),
        )  # fmt: skip
    device = x.device
    return (
        x.shape, x.stride(), x.dtype, device,
        w_gate_up.shape, w_gate_up.stride(), w_gate_up.dtype, w_gate_up.device == device,
        w_down.shape, w_down.stride(), w_down.dtype, w_down.device == device,
        weights.shape, weights.stride(), weights.dtype, weights.device == device,
        ids.shape, ids.stride(), ids.dtype, ids.device == device,
        activation, gate_up, weight_on_input, weight_on_input.__class__, facts(out), extras,
        torch.is_grad_enabled() and (x.requires_grad or w_gate_up.requires_grad or w_down.requires_grad or weights.requires_grad),
    )  # fmt: skip


@dataclass(frozen=True)
class FusedMoeCall:
    """What a gate sees of a `fused_moe` call.

    Attributes:
        dtype: dtype of x, quantised or not. weight_dtype: of the experts. out_dtype: of the result.
        tokens: T. num_experts: experts that ids speak of. num_local_experts: E. top_k: k. hidden: H. intermediate: I.
        activation, gate_up, weight_on_input: as in the contract.
        w_scales: None, "tensor", "channel" or "block".
        features: the optional arguments in use: b_gate_up, b_down, x_scales, alpha, limit, expert_range, expert_map,
            weight_on_input, num_valid_tokens, out.
        x_strides, gate_up_strides, down_strides: in elements.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype
    tokens: int
    num_experts: int
    num_local_experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str
    gate_up: str
    weight_on_input: bool
    w_scales: str | None
    features: frozenset[str]
    x_strides: tuple[int, ...]
    gate_up_strides: tuple[int, ...]
    down_strides: tuple[int, ...]


def check_fused_moe(a: Arguments) -> FusedMoeCall:
    """Check a `fused_moe` call and return what gates look at."""
    check = Checker("fused_moe", a.x.device)
    check.tensor("x", a.x, shape=(None, None), axes="(T, H)", dtypes=(*FLOATS, *moe.EXPERT_QUANTISED))
    tokens, hidden = a.x.shape
    moe.check_expert_weight(check, "w_gate_up", a.w_gate_up, (None, None, hidden), "(E, 2I, H)", (*FLOATS, *moe.EXPERT_QUANTISED))
    experts, double, _ = a.w_gate_up.shape
    if double % 2 or not double:
        raise check.fail("w_gate_up", f"has shape {tuple(a.w_gate_up.shape)}", "(E, 2I, H): an even number of rows, at least 2")
    moe.check_expert_weight(check, "w_down", a.w_down, (experts, hidden, double // 2), "(E, H, I)", (a.w_gate_up.dtype,))
    top_k = _check_slots(check, a, tokens)
    _check_activation(check, a)
    kind = _check_scales(check, a)
    moe.check_bias(check, "b_gate_up", a.b_gate_up, (experts, double), "(E, 2I)")
    moe.check_bias(check, "b_down", a.b_down, (experts, hidden), "(E, H)")
    num_experts = _check_experts(check, a, experts)
    if a.num_valid_tokens is not None:
        check.tensor("num_valid_tokens", a.num_valid_tokens, dtypes=(torch.int32,))
        if tuple(a.num_valid_tokens.shape) not in ((), (1,)):
            raise check.fail("num_valid_tokens", f"has shape {tuple(a.num_valid_tokens.shape)}", "() or (1,)")
    check.flag("weight_on_input", a.weight_on_input)
    check.no_grad(**{name: getattr(a, name) for name in ("x", "w_gate_up", "w_down", "weights", "b_gate_up", "b_down", "x_scales")})
    check.output("out", a.out, shape=(tokens, hidden), axes="(T, H)", dtypes=moe.output_dtypes(a.x))
    used = {name for name in _OPTIONAL if getattr(a, name) is not None} | ({"weight_on_input"} if a.weight_on_input else set())
    return FusedMoeCall(
        dtype=a.x.dtype,
        weight_dtype=a.w_gate_up.dtype,
        out_dtype=moe.result_dtype(a.x, a.out),
        tokens=tokens,
        num_experts=num_experts,
        num_local_experts=experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=double // 2,
        activation=a.activation,
        gate_up=a.gate_up,
        weight_on_input=a.weight_on_input,
        w_scales=kind,
        features=frozenset(used),
        x_strides=a.x.stride(),
        gate_up_strides=a.w_gate_up.stride(),
        down_strides=a.w_down.stride(),
    )


def _check_slots(check: Checker, a: Arguments, tokens: int) -> int:
    rows, top_k = moe.check_ids(check, a.ids)
    if rows != tokens:
        raise check.fail("ids", f"has shape {tuple(a.ids.shape)}", f"(T, k) with the {tokens} rows of `x`")
    check.tensor("weights", a.weights, shape=(tokens, top_k), axes="(T, k)", dtypes=(torch.float32,))
    return top_k


def _check_activation(check: Checker, a: Arguments) -> None:
    check.choice("activation", a.activation, tuple(ACTIVATIONS))
    check.choice("gate_up", a.gate_up, moe.GATE_UP)
    bounds: dict[str, float | None] = {"alpha": None, "limit": 0.0}
    for name, above in bounds.items():
        value = getattr(a, name)
        if value is not None:
            check.number(name, value, above=above)
            if name not in ACTIVATIONS[a.activation]:
                takers = " or ".join(repr(activation) for activation, numbers in ACTIVATIONS.items() if name in numbers)
                raise check.fail(name, f"is given with activation={a.activation!r}", f"None, or activation {takers}")


def _check_scales(check: Checker, a: Arguments) -> str | None:
    if a.w_scales is not None and not (isinstance(a.w_scales, tuple) and len(a.w_scales) == 2):
        raise check.fail("w_scales", f"is {type(a.w_scales).__name__}", "a tuple: scales of w_gate_up, scales of w_down")
    first, second = a.w_scales or (None, None)
    if a.w_scales is not None and (first is None or second is None):
        raise check.fail("w_scales", "holds None", "two tensors of scales", "Leave w_scales out where weights are not quantised.")
    kind = moe.check_weight_scales(check, "w_scales", first, a.w_gate_up)
    if moe.check_weight_scales(check, "w_scales", second, a.w_down) != kind:
        raise check.fail("w_scales", "are of two kinds", "both for experts, both for outputs, or both for blocks")
    check.no_grad(w_scales=first)
    check.no_grad(w_scales=second)
    moe.check_activation_scales(check, a.x, a.x_scales, a.w_gate_up.dtype, kind)
    return kind


def _check_experts(check: Checker, a: Arguments, local: int) -> int:
    """Check what says where experts are, and return how many there are on all ranks."""
    total: int | None = local
    if a.num_experts is not None:
        total = check.integer("num_experts", a.num_experts, least=0, most=moe.MOST_IDS)
    elif isinstance(a.expert_map, Tensor):
        total = a.expert_map.numel()
    elif a.expert_range is not None:
        total = None
    here = moe.check_placement(check, a, total)
    if here is not None and here != local:
        if a.expert_range is None:
            raise check.fail("num_experts", f"is {total}", f"the {local} experts of `w_gate_up`, unless a range or a map is given")
        raise check.fail("expert_range", f"is {a.expert_range}", f"as many experts as `w_gate_up` holds, {local}")
    return a.expert_range[1] if total is None else total


def _meta(a: Arguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta(tuple(a.x.shape), moe.result_dtype(a.x, a.out)),)


FUSED_MOE = Op("fused_moe", FusedMoe, _fused_moe_signature, check_fused_moe, _meta)
