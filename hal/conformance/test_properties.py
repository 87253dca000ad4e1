"""Random calls inside the contract, drawn by hypothesis with the seed of the suite, against the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.conformance.caches import STORAGES
from hal.conformance.cases import DTYPES, Attention
from hal.conformance.compare import assert_same_bits
from hal.conformance.inputs import Built, build_decode, build_prefill, strided_slice
from hal.conformance.outcomes import Refused
from hal.conformance.subject import Subject
from hal.conformance.test_merge import states
from hal.conformance.test_write import PAGES, make, run
from hal.ops.layouts import KV_LAYOUTS

EXAMPLES = 30
_DIMS = (16, 24, 32, 40, 64)


@st.composite
def attention(draw: Callable[..., Any], prefill: bool) -> Attention:
    """A call with few sequences, small sizes, and any mix of features."""
    lengths = tuple(draw(st.lists(st.integers(0, 40), min_size=0, max_size=3)))
    longest = 12 if prefill else 5
    packed_blocks = prefill or draw(st.booleans())
    if packed_blocks:
        q_len: Any = tuple(draw(st.integers(0, longest)) for _ in lengths)
    else:
        q_len = draw(st.integers(1, longest))
    kv_heads = draw(st.integers(1, 2))
    kv = draw(st.sampled_from(("", "", "", "int8", "e4m3", "e5m2")))
    kinds = ("float", "0d", "1", "head", "token", "token_padded")
    scaled = [kv == "int8" or (bool(kv) and draw(st.booleans())) for _ in "kv"]
    packed = prefill and draw(st.booleans())
    causal = not prefill or draw(st.booleans())
    return Attention(
        "drawn",
        lengths,
        q_len,
        padding=draw(st.integers(0, 2)) if packed_blocks else 0,
        heads=(kv_heads * draw(st.integers(1, 5)), kv_heads),
        dims=(draw(st.sampled_from(_DIMS)), draw(st.sampled_from(_DIMS))),
        page=draw(st.sampled_from((1, 2, 3, 5, 8, 16, 48))),
        dtype=draw(st.sampled_from(("fp32", "fp16", "bf16"))),
        kv=kv,
        layout="NHD" if packed else draw(st.sampled_from(KV_LAYOUTS)),
        storage=draw(st.sampled_from(STORAGES)),
        table=draw(st.sampled_from(("minus_one", "huge", "tight"))),
        q_storage=draw(st.sampled_from(("compact", "packed_qkv", "heads_first"))),
        out=draw(st.sampled_from(("new", "given", "strided", "fp32"))),
        scale=draw(st.sampled_from((None, 0.3))),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        window=draw(st.one_of(st.none(), st.integers(1, 45))),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        tree=draw(st.sampled_from(("", "", "random"))) if causal else "",
        batch_invariant=draw(st.booleans()),
        causal=causal,
        packed=packed,
        k_scale=draw(st.sampled_from(kinds)) if scaled[0] else None,
        v_scale=draw(st.sampled_from(kinds)) if scaled[1] else None,
    )


def stored(rows: Tensor, storage: str) -> Tensor:
    """The same rows, lying in memory as slices of packed QKV, with gaps in every dimension, or heads first."""
    if storage == "heads_first":
        return rows.transpose(0, 1).contiguous().transpose(0, 1)
    if storage == "packed_qkv":
        view = torch.full((rows.shape[0], 3, *rows.shape[1:]), math.nan, dtype=rows.dtype, device=rows.device)[:, 1]
    elif storage == "strided":
        view, _ = strided_slice(tuple(rows.shape), rows.dtype, rows.device)
    else:
        return rows
    return view.copy_(rows)


@st.composite
def writes(draw: Callable[..., Any], caches: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of `test_write.make`, and where the rows lie: slots anywhere or nowhere; any scales.

    No slot twice: `test_write.test_duplicate_slots` is about that.
    """
    kv, page = draw(st.sampled_from(caches)), draw(st.sampled_from((1, 3, 8)))
    index = draw(st.sampled_from((torch.int32, torch.int64)))
    beyond = (-1, PAGES * page, -(2**31), 2**31 - 1, *((2**40, -(2**40)) if index == torch.int64 else ()))
    slots = draw(st.lists(st.one_of(st.integers(0, PAGES * page - 1), st.sampled_from(beyond)), max_size=6, unique=True))
    heads = draw(st.integers(1, 3))
    kinds = {"float": 0.05, "0d": torch.tensor(0.05), "1": torch.tensor([0.05]), "head": torch.linspace(0.03, 0.08, heads)}
    scales: list[Any] = [None, None]
    for which in range(2 if kv else 0):
        names = (*kinds, "token", "token_padded", *(() if kv == "int8" else ("none",)))
        name = draw(st.sampled_from(names))
        scales[which] = name if name.startswith("token") else kinds.get(name)
    return {
        "slots": slots,
        "rows": draw(st.sampled_from(("compact", "packed_qkv", "heads_first"))),
        "tokens": len(slots) + draw(st.integers(0, 2)),
        "dtype": draw(st.sampled_from(("fp32", "fp16", "bf16"))),
        "kv": kv,
        "dims": (draw(st.sampled_from((16, 40, 64))), draw(st.sampled_from((16, 40, 64)))),
        "heads": heads,
        "layout": draw(st.sampled_from(KV_LAYOUTS)),
        "storage": draw(st.sampled_from(STORAGES)),
        "page": page,
        "index": index,
        "factor": draw(st.sampled_from((1e-3, 1.0, 300.0))),
        "k_scale": scales[0],
        "v_scale": scales[1],
    }


def attempt_write(subject: Subject, drawn: dict[str, Any]) -> None:
    slots, rows = drawn["slots"], drawn["rows"]
    write = make(subject, **{name: value for name, value in drawn.items() if name != "rows"})
    for name in ("key", "value"):
        write.args[name] = stored(write.args[name], rows)
    run(subject, write, slots)


@st.composite
def merges(draw: Callable[..., Any]) -> dict[str, Any]:
    """Sizes of two states, LSE far apart or of empty parts, and where inputs and results lie."""
    tokens, heads = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    out = draw(st.sampled_from(("new", "given", "strided", "fp32", "a", "b")))
    storages = ("compact", "strided") if out in ("a", "b") else ("compact", "strided", "heads_first")  # a result's last dimension is contiguous
    lse = st.one_of(st.floats(-50.0, 50.0, width=32), st.sampled_from((0.0, -math.inf, math.inf, 100.0, -100.0)))
    return {
        "shape": (tokens, heads, draw(st.sampled_from((16, 40, 128)))),
        "dtype": draw(st.sampled_from(("fp32", "fp16", "bf16"))),
        "lse": [draw(st.lists(lse, min_size=tokens * heads, max_size=tokens * heads)) for _ in "ab"],
        "storage": draw(st.sampled_from(storages)),
        "sinks": draw(st.booleans()),
        "out": out,
    }


def attempt_merge(subject: Subject, drawn: dict[str, Any]) -> None:
    device, (tokens, heads, dim) = subject.device, drawn["shape"]
    args = states(subject, tokens, heads, dim, drawn["dtype"])
    for part, values in zip("ab", drawn["lse"], strict=True):
        args[f"lse_{part}"] = torch.tensor(values, device=device).view(tokens, heads)
        args[f"out_{part}"][args[f"lse_{part}"].isinf()] = math.nan  # nobody may look at it
    args = {name: stored(tensor, drawn["storage"]) for name, tensor in args.items()}
    if drawn["sinks"]:
        args["sinks"] = torch.linspace(-2.0, 4.0, heads, device=device)
    before, buffers, out = {name: tensor.clone() for name, tensor in args.items()}, {}, drawn["out"]
    shapes = (("out", (tokens, heads, dim), torch.float32 if out == "fp32" else DTYPES[drawn["dtype"]]), ("lse", (tokens, heads), torch.float32))
    for name, shape, dtype in shapes:
        if out in ("given", "fp32"):
            args[name] = torch.full(shape, math.nan, dtype=dtype, device=device)
        elif out == "strided":
            args[name], buffers[name] = strided_slice(shape, dtype, device)
        elif out in ("a", "b"):
            args[name] = args[f"{name}_{out}"]
    if out not in ("a", "b"):
        subject.verify("merge_states", Built(args, buffers))
        return
    merged, lse = subject.call("merge_states", args, frozen=False)
    subject.expect("merge_states", before, merged, lse)
    for name in ("out", "lse"):
        other = f"{name}_{'b' if out == 'a' else 'a'}"
        assert_same_bits(f"`{other}`, which was not written to", args[other], before[other])


def explore(subject: Subject, attempt: Callable[[Subject, Any], None], cases: st.SearchStrategy[Any]) -> None:
    """Attempt drawn calls. A refused one is fine by itself; if all are refused, so is the whole case."""
    ran: list[Any] = []
    refusals: list[Refused] = []

    # A target that its gate keeps from these calls may well be wrong: the first wrong result says enough.
    phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain) or not subject.direct]

    @settings(max_examples=EXAMPLES, phases=phases, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @seed(subject.case_seed())
    @given(cases)
    def each(case: Any) -> None:
        try:
            attempt(subject, case)
        except Refused as refusal:
            refusals.append(refusal)
            return
        ran.append(case)

    each()
    if not ran:
        raise refusals[0]


def attempt_decode(subject: Subject, case: Attention) -> None:
    subject.verify("flash_decode", build_decode(case, subject.generator(), subject.device))


def attempt_prefill(subject: Subject, case: Attention) -> None:
    subject.verify("flash_prefill", build_prefill(case, subject.generator(), subject.device))


@pytest.mark.hal_op("flash_decode")
def test_decode(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_decode, attention(prefill=False))


@pytest.mark.hal_op("flash_decode")
def test_decode_plain(hal_subject: Subject) -> None:
    """Without quantised caches and odd layouts: what most backends serve."""
    plain = attention(prefill=False).filter(lambda c: not c.kv and c.layout == "NHD" and not c.tree)
    explore(hal_subject, attempt_decode, plain)


@pytest.mark.hal_op("flash_prefill")
def test_prefill(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_prefill, attention(prefill=True))


@pytest.mark.hal_op("write_kv")
def test_write(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_write, writes(("", "int8")))


@pytest.mark.hal_op("write_kv")
def test_write_fp8(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_write, writes(("e4m3", "e5m2")))


@pytest.mark.hal_op("merge_states")
def test_merge(hal_subject: Subject) -> None:
    explore(hal_subject, attempt_merge, merges())
