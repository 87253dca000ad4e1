"""Random calls inside the contract, drawn by hypothesis with the seed of the suite, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hal.conformance.caches import STORAGES
from hal.conformance.cases import Attention
from hal.conformance.inputs import Built, build_decode, build_prefill
from hal.conformance.outcomes import Refused
from hal.conformance.subject import Subject
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


def explore(subject: Subject, op: str, build: Callable[..., Built], cases: st.SearchStrategy[Attention]) -> None:
    """Verify drawn calls. A refused one is fine by itself; if all are refused, so is the whole case."""
    ran: list[Attention] = []
    refusals: list[Refused] = []

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @seed(subject.case_seed())
    @given(cases)
    def each(case: Attention) -> None:
        try:
            subject.verify(op, build(case, subject.generator(), subject.device))
        except Refused as refusal:
            refusals.append(refusal)
            return
        ran.append(case)

    each()
    if not ran:
        raise refusals[0]


@pytest.mark.hal_op("flash_decode")
def test_decode(hal_subject: Subject) -> None:
    explore(hal_subject, "flash_decode", build_decode, attention(prefill=False))


@pytest.mark.hal_op("flash_decode")
def test_decode_plain(hal_subject: Subject) -> None:
    """Without quantised caches and odd layouts: what most backends serve."""
    plain = attention(prefill=False).filter(lambda c: not c.kv and c.layout == "NHD" and not c.tree)
    explore(hal_subject, "flash_decode", build_decode, plain)


@pytest.mark.hal_op("flash_prefill")
def test_prefill(hal_subject: Subject) -> None:
    explore(hal_subject, "flash_prefill", build_prefill, attention(prefill=True))
