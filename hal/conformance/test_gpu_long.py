"""Long and ragged contexts on a CUDA device, against float64 in whole tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hal.conformance.cases import Attention
from hal.conformance.compare import assert_same_bits
from hal.conformance.long_contexts import build_long, judge
from hal.conformance.subject import Subject
from hal.conformance.test_decode import plan_facts

pytestmark = [pytest.mark.hal_gpu, pytest.mark.hal_op("flash_decode")]


def ids(case: Attention) -> str:
    return case.id


def llama(name: str, lengths: tuple[int, ...], **features: Any) -> Attention:
    """A call of 32 query and 8 kv heads of 128, bf16, pages of 16."""
    return replace(Attention(name, lengths, heads=(32, 8), dims=(128, 128), page=16, dtype="bf16", spare_pages=9), **features)


_SCALED: dict[str, Any] = {"kv": "e4m3", "k_scale": "float", "v_scale": "float"}
_MLA: dict[str, Any] = {"dims": (576, 512), "heads": (16, 1), "mla": True}
_RAGGED = (
    llama("128k-and-31-of-4k", (131072, *[4096] * 31)),
    llama("64k-and-63-of-512", (*[512] * 40, 65536, *[512] * 23)),
    llama("64-to-16k", tuple(64 * 4 ** (i % 5) + i for i in range(64))),
    llama("empty-beside-4096", (0, 17, 0, 4096)),
    llama("35-of-6k-over-1-kv-head", (6000,) * 36, heads=(4, 1)),
    llama("300-under-131072", (300,) * 33, spare_columns=8192 - 19, table="huge"),
    llama("block-of-8", (131072, 9, 0, 4096), q_len=8),
    llama("blocks-of-several", (70000, 3, 0, 5000), q_len=(3, 8, 1, 0), padding=3),
    llama("window", (131072, 4096, 0, 17, 1025), window=1024, sinks=True),
    llama("e4m3", (131072, *[4096] * 15), **_SCALED),
    llama("mla", (65536, *[512] * 15), **_MLA),
)


@pytest.mark.parametrize("planned", [False, True], ids=["no-plan", "plan"])
@pytest.mark.parametrize("case", _RAGGED, ids=ids)
def test_ragged(hal_subject: Subject, case: Attention, planned: bool) -> None:
    args = build_long(case, hal_subject.generator(), hal_subject.device).args
    if planned:
        args["plan"] = hal_subject.call("plan_decode", plan_facts(args))
    judge(hal_subject, args, *hal_subject.call("flash_decode", args))


def test_stale_results_of_a_large_call(hal_subject: Subject) -> None:
    """B10: 64 sequences of 4096 keys that overflow, then three short ones."""
    small = llama("small", (5, 700, 0), out="new")
    expected = hal_subject.call("flash_decode", build_long(small, hal_subject.generator(), hal_subject.device).args)
    large = build_long(llama("large", (4096,) * 64), hal_subject.generator(), hal_subject.device).args
    for name in ("k_cache", "v_cache"):
        large[name].fill_(torch.inf)
    hal_subject.call("flash_decode", large)
    args = build_long(small, hal_subject.generator(), hal_subject.device).args
    got = hal_subject.call("flash_decode", args)
    for name, after, before in zip(("out", "lse"), got, expected, strict=True):
        assert_same_bits(f"{name} after a call that overflowed", after, before)
    judge(hal_subject, args, *got)


_INVARIANT = (
    llama("plain", ()),
    llama("e4m3", (), **_SCALED),
    llama("window-sinks", (), window=3000, sinks=True),
    llama("mla", (), **_MLA),
)
_LENGTHS = (5000, 100_000, *[40] * 31)
_ROWS = 4


@pytest.mark.parametrize("case", _INVARIANT, ids=ids)
def test_batch_invariant_rows(hal_subject: Subject, case: Attention) -> None:
    """B46: a block of four rows among 31 short mates and a long one, and in every other company."""
    case = replace(case, lengths=_LENGTHS, q_len=_ROWS, batch_invariant=True, out="new")
    args = build_long(case, hal_subject.generator(), hal_subject.device).args
    device = hal_subject.device
    q, tables = args["q"].unflatten(0, (-1, _ROWS)), args["block_tables"]
    expected = [t[:_ROWS] for t in hal_subject.call("flash_decode", args)]

    def same(what: str, changes: dict[str, Any], rows: slice, of: slice = slice(0, _ROWS)) -> None:
        got = hal_subject.call("flash_decode", args | changes)
        for name, mine, wanted in zip(("out", "lse"), got, expected, strict=True):
            assert_same_bits(f"{name}, {what}", mine[rows], wanted[of])

    def company(*sequences: int) -> dict[str, Any]:
        at = torch.tensor(sequences, device=device)
        return {"q": q[at].flatten(0, 1), "seq_lens": args["seq_lens"][at], "block_tables": tables[at]}

    short = range(2, len(_LENGTHS))
    block = slice(0, _ROWS)
    judge(hal_subject, args | company(0), *expected)
    same("alone", company(0), block)
    same("beside short mates", company(0, *short), block)
    same("beside one of 100k", company(0, 1), block)
    same("behind all others", company(*short, 1, 0), slice(-_ROWS, None))
    same("under a wider table", company(0) | {"block_tables": torch.cat([tables[:1], torch.full_like(tables[:1, :500], -1)], 1)}, block)
    same("planned", {"plan": hal_subject.call("plan_decode", plan_facts(args))}, block)
    for i in range(_ROWS):
        length = torch.tensor([_LENGTHS[0] - _ROWS + 1 + i], dtype=torch.int32, device=device)
        same(f"row {i} alone", {"q": q[0, i : i + 1], "q_len": 1, "seq_lens": length, "block_tables": tables[:1]}, slice(0, 1), slice(i, i + 1))
    padded = torch.cat([q[2], q[0], torch.full_like(q[0], torch.nan)])
    offsets = torch.tensor([0, 0, _ROWS, 2 * _ROWS], dtype=torch.int32, device=device)
    at = torch.tensor([1, 2, 0], device=device)
    packed = {"q": padded, "cu_seqlens_q": offsets, "seq_lens": args["seq_lens"][at], "block_tables": tables[at]}
    same("in a padded batch", packed, slice(_ROWS, 2 * _ROWS))
