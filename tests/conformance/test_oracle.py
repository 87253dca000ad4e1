"""The judge itself, against numbers on paper and against another implementation."""

from __future__ import annotations

import ast
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.conformance import cases, long_contexts, oracle, outcomes, plugin
from hal.conformance.caches import STORAGES, make_caches, put
from hal.conformance.cases import DECODE, PACKED_PREFILL, PAGED_PREFILL, Attention
from hal.conformance.compare import LSE, OUTPUT, assert_same_bits, close
from hal.conformance.inputs import build_decode, build_prefill
from hal.conformance.long_contexts import build_long
from hal.conformance.quantised import QMAX, decode_codes, nearest_codes, rounding_error
from hal.conformance.reported import GRID, PAIRS, REPORTED
from hal.ops import OPS
from hal.ops.layouts import KV_LAYOUTS

CPU = torch.device("cpu")


def expected(case: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    built = build_decode(case, torch.Generator().manual_seed(1), CPU)
    return oracle.flash_decode(vars(OPS["flash_decode"].bind((), built.args)))


def test_causal_corner() -> None:
    out, _ = expected(Attention("corner", (10,), q_len=3, probe="position"))
    assert out[:, 0, 0].tolist() == pytest.approx([3.5, 4.0, 4.5])


def test_window_counts_the_row_itself() -> None:
    out, _ = expected(Attention("window", (10,), window=4, probe="position"))
    assert out[0, 0, 0].item() == pytest.approx(7.5)


def test_head_probe_names_the_kv_head() -> None:
    out, _ = expected(Attention("heads", (9,), heads=(48, 2), dims=(16, 16), probe="head"))
    assert out[0, :, 0].tolist() == pytest.approx([0.0] * 24 + [1.0] * 24)


def test_empty_rows() -> None:
    out, lse = expected(Attention("empty", (2,), q_len=4, sinks=True))
    assert bool((out[:2] == 0).all())
    assert bool((lse[:2] == -math.inf).all())
    assert bool(lse[2:].isfinite().all())


def test_tree_sees_prefix_and_ancestors() -> None:
    case = Attention("tree", (12,), q_len=5, tree="branches", probe="position")
    out, lse = expected(case)
    ancestors = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])
    for row, drafts in enumerate(ancestors):
        keys = [*range(7), *(7 + d for d in drafts)]
        assert out[row, 0, 0].item() == pytest.approx(sum(keys) / len(keys))
        assert lse[row, 0].item() == pytest.approx(math.log(len(keys)))


@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_gather_undoes_put(layout: str, storage: str) -> None:
    pair = make_caches(layout, 4, 3, 2, (16, 24), torch.float32, CPU, storage, math.nan)
    slots = torch.tensor([7, 0, 11])
    for which, cache, dim in (("k", pair.k, 16), ("v", pair.v, 24)):
        rows = torch.randn(3, 2, dim)
        put(cache, layout, which, slots, rows)
        got = oracle.gather(cache, layout, which, [0, 1, 2, 3])[slots]
        assert torch.equal(got, rows.double())
        assert int((~cache.isnan()).sum()) == rows.numel()


def test_agrees_with_torch() -> None:
    case = Attention("sdpa", (12,), q_len=12, heads=(4, 2), page=4)
    args = build_decode(case, torch.Generator().manual_seed(2), CPU).args
    out, _ = expected_of(args)
    pages = args["block_tables"][0].tolist()
    keys, values = (oracle.gather(args[n], "NHD", n[0], pages[:3]).transpose(0, 1).repeat_interleave(2, 0) for n in ("k_cache", "v_cache"))
    ours = torch.nn.functional.scaled_dot_product_attention(args["q"].double().transpose(0, 1), keys, values, is_causal=True)
    assert torch.allclose(out, ours.transpose(0, 1))


def expected_of(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return oracle.flash_decode(vars(OPS["flash_decode"].bind((), args)))


@pytest.mark.parametrize("dtype", QMAX, ids=str)
def test_codes_agree_with_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    assert torch.equal(decode_codes(codes, dtype).nan_to_num(nan=1e9), codes.view(dtype).double().nan_to_num(nan=1e9))
    x = torch.randn(10000, generator=torch.Generator().manual_seed(0)) * QMAX[dtype] / 3
    limited = x.clamp(-128.0 if dtype == torch.int8 else -QMAX[dtype], QMAX[dtype])
    theirs = (limited.round() if dtype == torch.int8 else limited).to(dtype)
    assert torch.equal(nearest_codes(x, dtype), theirs.view(torch.uint8))
    assert rounding_error(x.double(), theirs) <= 1.0
    assert rounding_error(x.double() * 1.3, theirs) > 1.5


@pytest.mark.parametrize(
    ("got", "wanted", "message"),
    [
        ([1.0, math.nan], [1.0, 2.0], "NaN or unwritten"),
        ([1.0, 2.1], [1.0, 2.0], "error"),
        ([1.0, 2.0], [1.0, -math.inf], "expected exactly -inf"),
        ([1.0, -math.inf], [1.0, 2.0], "expected exactly 2.0"),
    ],
)
def test_comparison_fails(got: list[float], wanted: list[float], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        close("x", torch.tensor(got), torch.tensor(wanted, dtype=torch.float64), OUTPUT[torch.float32])


def test_comparison_wants_exact_zero_rows() -> None:
    with pytest.raises(AssertionError, match="expected exactly 0"):
        close("x", torch.tensor([[1e-30, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), OUTPUT[torch.bfloat16])


def test_same_bits_tells_zeros_apart() -> None:
    assert_same_bits("nan", torch.tensor([math.nan]), torch.tensor([math.nan]))
    with pytest.raises(AssertionError):
        assert_same_bits("zero", torch.tensor([0.0]), torch.tensor([-0.0]))


def test_tolerances_have_reasons() -> None:
    assert all(t.reason for table in (OUTPUT, LSE) for t in table.values())
    assert [OUTPUT[d].limit for d in (torch.float32, torch.float16, torch.bfloat16)] == [2e-5, 3e-3, 2e-2]


_LONG = (
    Attention("plain", (300, 0, 17, 1)),
    Attention("block", (2, 40), q_len=4, table="tight", dims=(32, 48)),
    Attention("varlen", (40, 9, 0), q_len=(3, 0, 2), padding=2, dtype="bf16"),
    Attention("window", (90, 3), q_len=3, window=11, table="tight", softcap=2.0, sinks=True),
    Attention("alibi", (40, 9), q_len=2, alibi=True, scale=0.3),
    Attention("e4m3", (40, 9), kv="e4m3", table="huge", dtype="fp16"),
    Attention("int8", (40, 9), kv="int8", k_scale="float", v_scale="float"),
    Attention("mla", (40, 9), dims=(576, 512), mla=True, page=4),
)


@pytest.mark.parametrize("case", _LONG, ids=lambda c: c.id)
def test_both_judges_agree(case: Attention) -> None:
    for built in (build_long(case, torch.Generator().manual_seed(3), CPU), build_decode(case, torch.Generator().manual_seed(3), CPU)):
        bound = vars(OPS["flash_decode"].bind((), built.args))
        for ours, naive in zip(long_contexts.attention(bound), oracle.flash_decode(bound), strict=True):
            assert torch.equal(ours.isfinite(), naive.isfinite())
            assert torch.allclose(ours, naive, rtol=1e-12, atol=1e-13)


def test_long_contexts_are_poisoned_and_shuffled() -> None:
    args = build_long(Attention("long", (40, 3), page=8, spare_pages=5), torch.Generator().manual_seed(3), CPU).args
    assert int((~args["k_cache"].isnan()).any(-1).any(-1).sum()) == 43
    assert args["block_tables"][0, :5].tolist() != sorted(args["block_tables"][0, :5].tolist())


@pytest.mark.parametrize("table", [DECODE, PAGED_PREFILL, PACKED_PREFILL, (*REPORTED, *GRID, *PAIRS)], ids=["decode", "paged", "packed", "reported"])
def test_case_names_are_unique(table: tuple[Attention, ...]) -> None:
    names = [c.id for c in table]
    assert len(set(names)) == len(names)


def test_pairs_of_features_meet() -> None:
    """Any two features are on, off, and one without the other in some case."""
    marks = [(c.window is not None, c.alibi, c.softcap > 0, c.sinks, bool(c.tree), bool(c.kv), c.batch_invariant) for c in PAIRS]
    for i in range(7):
        for j in range(i):
            assert {(m[i], m[j]) for m in marks} == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("op", ["flash_decode", "flash_prefill"])
def test_every_optional_argument_is_toggled(op: str) -> None:
    """An argument that the suite never moves away from its default could be ignored by a backend unseen."""
    toggles = cases.DECODE_TOGGLES if op == "flash_decode" else cases.PREFILL_TOGGLES
    optional = {p.name for p in OPS[op].parameters.parameters.values() if p.default is not inspect.Parameter.empty}
    without_effect_on_values = {"plan", "batch_invariant", "out", "lse", "return_lse"}
    inputs_of_other_forms = {"q_len", "seq_lens", "block_tables", "cu_seqlens_k"}
    assert optional - without_effect_on_values - inputs_of_other_forms == {t.argument for t in toggles}


@pytest.mark.parametrize("packed", [False, True], ids=["paged", "packed"])
def test_poison_is_everywhere_else(packed: bool) -> None:
    """Rows that no query row may look at are NaN in what the cases build."""
    args = build_prefill(Attention("poison", (40, 3), q_len=(9, 2), window=5, packed=packed), torch.Generator().manual_seed(0), CPU).args
    seen = (9 + 5 - 1) + 3
    assert int((~args["k"].isnan()).sum()) == seen * 2 * 32


@pytest.mark.parametrize("module", [plugin, outcomes])
def test_plugin_imports_nothing_heavy(module: object) -> None:
    """It loads in every pytest run of an environment."""
    tree = ast.parse(Path(inspect.getfile(module)).read_text())  # type: ignore[arg-type]
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names} | {
        n.module for n in top if isinstance(n, ast.ImportFrom)
    }
    assert names <= {"__future__", "collections.abc", "enum", "hal.conformance.outcomes", "pathlib", "pytest", "typing"}
