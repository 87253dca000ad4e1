"""`flash_prefill`: the semantics of decode with long blocks, on caches and on packed keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hal.conformance import oracle
from hal.conformance.cases import PACKED_PREFILL, PAGED_PREFILL, PREFILL_TOGGLES, Attention, Toggle
from hal.conformance.compare import OUTPUT, assert_same_bits, close
from hal.conformance.inputs import Built, build_prefill
from hal.conformance.subject import Subject
from hal.ops import OPS

pytestmark = pytest.mark.hal_op("flash_prefill")


def ids(case: Any) -> str:
    return case.id


def build(subject: Subject, case: Attention) -> Built:
    return build_prefill(case, subject.generator(), subject.device)


@pytest.mark.parametrize("case", PAGED_PREFILL, ids=ids)
def test_paged(hal_subject: Subject, case: Attention) -> None:
    hal_subject.verify("flash_prefill", build(hal_subject, case))


@pytest.mark.parametrize("case", PACKED_PREFILL, ids=ids)
def test_packed(hal_subject: Subject, case: Attention) -> None:
    hal_subject.verify("flash_prefill", build(hal_subject, case))


@pytest.mark.parametrize("toggle", PREFILL_TOGGLES, ids=ids)
def test_argument_has_an_effect(hal_subject: Subject, toggle: Toggle) -> None:
    built = build(hal_subject, toggle.case)
    bound = vars(OPS["flash_prefill"].bind((), built.args))
    with pytest.raises(AssertionError):
        close("oracle", oracle.flash_prefill(bound | {toggle.argument: toggle.without})[0], oracle.flash_prefill(bound)[0], OUTPUT[torch.bfloat16])
    hal_subject.verify("flash_prefill", built)


@pytest.mark.parametrize("packed", [False, True], ids=["paged", "packed"])
@pytest.mark.parametrize("window", [None, 7], ids=["all", "window"])
def test_poison_changes_no_bit(hal_subject: Subject, packed: bool, window: int | None) -> None:
    case = Attention("poison", (40, 3, 0, 12), q_len=(9, 4, 1, 12), padding=2, window=window, packed=packed, table="huge")
    clean = build(hal_subject, replace(case, poison="zero", table="clean"))
    expected, expected_lse = hal_subject.call("flash_prefill", clean.args)
    out, lse = hal_subject.verify("flash_prefill", build(hal_subject, case))
    assert_same_bits("out, poisoned against clean", out, expected)
    assert_same_bits("lse, poisoned against clean", lse, expected_lse)


def test_longer_max_q_len(hal_subject: Subject) -> None:
    args = build(hal_subject, Attention("max", (30, 9), q_len=(11, 4))).args
    hal_subject.verify("flash_prefill", args | {"max_q_len": 64})


def test_batch_mates_change_no_bit(hal_subject: Subject) -> None:
    args = build(hal_subject, Attention("mates", (40, 12, 25), q_len=(9, 12, 5), batch_invariant=True, out="new")).args
    out, _ = hal_subject.verify("flash_prefill", args)
    start = 0
    for b, size in enumerate((9, 12, 5)):
        cu = torch.tensor([0, size], dtype=torch.int32, device=out.device)
        alone = {"q": args["q"][start : start + size], "cu_seqlens_q": cu, "max_q_len": size}
        alone |= {"seq_lens": args["seq_lens"][b : b + 1], "block_tables": args["block_tables"][b : b + 1]}
        got, _ = hal_subject.call("flash_prefill", args | alone)
        assert_same_bits(f"sequence {b} alone", got, out[start : start + size])
        start += size


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_agrees_with_decode(hal_subject: Subject, dtype: str) -> None:
    """The two ops share one meaning: a block as a prefill, and as a decode of several tokens."""
    args = build(hal_subject, Attention("both", (40, 12), q_len=(5, 3), dtype=dtype, out="new", softcap=4.0)).args
    out, _ = hal_subject.verify("flash_prefill", args)
    shared = {k: v for k, v in args.items() if k not in ("k", "v", "max_q_len", "causal")}
    decoded, _ = hal_subject.verify("flash_decode", shared | {"k_cache": args["k"], "v_cache": args["v"]})
    close("prefill against decode", out, decoded.double(), OUTPUT[args["q"].dtype])
