"""`flash_decode` on the inputs of public bug reports, as the reports state them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hal.conformance.caches import filled, make_caches, put
from hal.conformance.cases import Attention
from hal.conformance.compare import assert_same_bits
from hal.conformance.inputs import build_decode
from hal.conformance.reported import GRID, PAIRS, REPORTED
from hal.conformance.subject import Subject

pytestmark = pytest.mark.hal_op("flash_decode")


def ids(case: Attention) -> str:
    return case.id


@pytest.mark.parametrize("case", REPORTED, ids=ids)
def test_input(hal_subject: Subject, case: Attention) -> None:
    hal_subject.verify("flash_decode", build_decode(case, hal_subject.generator(), hal_subject.device))


@pytest.mark.parametrize("case", GRID, ids=ids)
def test_sizes(hal_subject: Subject, case: Attention) -> None:
    """B34, B35, B37, B39, L14: head dims, groups and pages, in 16 bits and with fp8 caches; the last slots of pages poisoned."""
    hal_subject.verify("flash_decode", build_decode(case, hal_subject.generator(), hal_subject.device))


@pytest.mark.parametrize("case", PAIRS, ids=ids)
def test_pairs_of_features(hal_subject: Subject, case: Attention) -> None:
    hal_subject.verify("flash_decode", build_decode(case, hal_subject.generator(), hal_subject.device))


def one_sequence(subject: Subject, pages: tuple[int, ...], length: int, size: int) -> dict[str, Tensor]:
    """A call but for its table: one sequence in chosen pages of a cache of 13, whose other slots hold NaN, and an empty one."""
    g, device = subject.generator(), subject.device
    pair = make_caches("NHD", 13, size, 8, (128, 128), torch.bfloat16, device, "compact", torch.nan)
    slots = torch.tensor([pages[j // size] * size + j % size for j in range(length)], device=device)
    for which, cache in (("k", pair.k), ("v", pair.v)):
        put(cache, "NHD", which, slots, torch.randn(length, 8, 128, generator=g).to(device, torch.bfloat16))
    q = torch.randn(2, 32, 128, generator=g).to(device, torch.bfloat16)
    return {"q": q, "k_cache": pair.k, "v_cache": pair.v, "seq_lens": torch.tensor([length, 0], dtype=torch.int32, device=device)}


def table(subject: Subject, *rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=subject.device)


def test_stale_table_entries(hal_subject: Subject) -> None:
    """B12: ids behind the last page, and the whole row of an empty sequence, may be anything."""
    args = one_sequence(hal_subject, (7, 2, 9), 40, 16) | {"return_lse": True}
    out, lse = hal_subject.verify("flash_decode", args | {"block_tables": table(hal_subject, [7, 2, 9, -1, 2**30], [5, 2**30, -1, 5, -(2**31)])})
    zeros, zeros_lse = hal_subject.verify("flash_decode", args | {"block_tables": table(hal_subject, [7, 2, 9, 0, 0], [0] * 5)})
    assert_same_bits("out, against zeros in the table", out, zeros)
    assert_same_bits("lse, against zeros in the table", lse, zeros_lse)


@pytest.mark.parametrize("last", [False, True], ids=["first-row", "last-row"])
def test_ids_behind_a_tight_table(hal_subject: Subject, last: bool) -> None:
    """B13: five entries for 257 keys in pages of 64; what follows in memory are ids of pages full of NaN."""
    args = one_sequence(hal_subject, (7, 2, 9, 0, 12), 257, 64)
    used, stale = [7, 2, 9, 0, 12], [5, 6, 8, 10, 11]
    rows = (stale, used) if last else (used, stale)
    if last:
        args["seq_lens"] = args["seq_lens"].flip(0)
    memory = torch.cat([table(hal_subject, *rows).flatten(), filled((5,), 5, torch.int32, hal_subject.device)])
    hal_subject.verify("flash_decode", args | {"block_tables": memory[:10].view(2, 5)})
