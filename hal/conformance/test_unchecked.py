"""`validate: off`: lengths below 0 act as 0, those beyond the table clamp, ids outside the cache are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.conformance.cases import Attention
from hal.conformance.inputs import Built, build_decode, build_prefill
from hal.conformance.subject import Subject

DECODE = pytest.mark.hal_op("flash_decode")
PREFILL = pytest.mark.hal_op("flash_prefill")


def _ints(subject: Subject, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=subject.device)


def _decode(subject: Subject, **changes: Any) -> Built:
    return build_decode(Attention("call", (33, 24, 16), table="tight", **changes), subject.generator(), subject.device)


@DECODE
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("lengths", [[-1, 24, 16], [-(2**31), 0, 16]], ids=["minus-one", "lowest"])
def test_negative_length_is_empty(hal_subject: Subject, lengths: list[int], q_len: int) -> None:
    built = _decode(hal_subject, q_len=q_len)
    built.args["seq_lens"] = _ints(hal_subject, lengths)
    hal_subject.verify("flash_decode", built, validate="off")


@DECODE
@pytest.mark.parametrize("window", [None, 9], ids=["all", "window"])
@pytest.mark.parametrize("excess", [1, 1000, 2**31 - 41], ids=["one", "thousand", "highest"])
def test_length_beyond_the_table_is_clamped(hal_subject: Subject, excess: int, window: int | None) -> None:
    built = build_decode(Attention("call", (40, 16), table="tight", window=window), hal_subject.generator(), hal_subject.device)
    built.args["seq_lens"] = _ints(hal_subject, [40 + excess, 16])
    hal_subject.verify("flash_decode", built, validate="off")


@DECODE
@pytest.mark.parametrize("page", [-1, 2**30, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("layout", ["NHD", "HND", "SPLIT_V0"])
def test_page_outside_the_cache_is_skipped(hal_subject: Subject, layout: str, page: int) -> None:
    built = _decode(hal_subject, layout=layout, q_len=2)
    built.args["block_tables"][0, 1] = page
    built.args["block_tables"][2, :] = page
    hal_subject.verify("flash_decode", built, validate="off")


@DECODE
def test_first_page_beyond_the_cache_is_skipped(hal_subject: Subject) -> None:
    built = _decode(hal_subject)
    built.args["block_tables"][0, 2] = built.args["k_cache"].shape[0]
    hal_subject.verify("flash_decode", built, validate="off")


@DECODE
def test_table_without_columns(hal_subject: Subject) -> None:
    built = _decode(hal_subject)
    built.args["block_tables"] = built.args["block_tables"][:, :0]
    hal_subject.verify("flash_decode", built, validate="off")


@DECODE
def test_sinks_over_invisible_keys(hal_subject: Subject) -> None:
    built = _decode(hal_subject, sinks=True)
    built.args["block_tables"][1, :] = -1
    hal_subject.verify("flash_decode", built, validate="off")


@PREFILL
@pytest.mark.parametrize("what", ["negative", "beyond", "page"])
def test_prefill(hal_subject: Subject, what: str) -> None:
    built = build_prefill(Attention("call", (40, 16), q_len=(9, 5), table="tight"), hal_subject.generator(), hal_subject.device)
    if what == "page":
        built.args["block_tables"][0, 1] = 2**30
    else:
        built.args["seq_lens"] = _ints(hal_subject, [-3, 16] if what == "negative" else [4000, 16])
    hal_subject.verify("flash_prefill", built, validate="off")
