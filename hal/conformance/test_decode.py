"""`flash_decode`: the table of cases, and what must hold between calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance import oracle
from hal.conformance.cases import DECODE, DECODE_TOGGLES, Attention, Toggle
from hal.conformance.compare import LSE, OUTPUT, assert_same_bits, close
from hal.conformance.inputs import Built, build_decode
from hal.conformance.subject import Subject
from hal.ops import OPS

pytestmark = pytest.mark.hal_op("flash_decode")


def ids(case: Any) -> str:
    return case.id


def build(subject: Subject, case: Attention) -> Built:
    return build_decode(case, subject.generator(), subject.device)


def attend(subject: Subject, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that returns both, without a comparison."""
    out, lse = subject.call("flash_decode", args)
    return out, lse


def rows(args: dict[str, Any], sequences: list[int], q_len: int) -> dict[str, Any]:
    """The same call for some of its sequences."""
    at = torch.tensor(sequences, device=args["q"].device)
    q = args["q"].unflatten(0, (-1, q_len))[at].flatten(0, 1)
    kept = {k: v for k, v in args.items() if k not in ("out", "lse")}
    return kept | {"q": q, "seq_lens": args["seq_lens"][at], "block_tables": args["block_tables"][at]}


@pytest.mark.parametrize("case", DECODE, ids=ids)
def test_case(hal_subject: Subject, case: Attention) -> None:
    hal_subject.verify("flash_decode", build(hal_subject, case))


@pytest.mark.parametrize("toggle", DECODE_TOGGLES, ids=ids)
def test_argument_has_an_effect(hal_subject: Subject, toggle: Toggle) -> None:
    built = build(hal_subject, toggle.case)
    if toggle.argument == "cu_seqlens_q":
        built.args["q_len"] = 3
    bound = vars(OPS["flash_decode"].bind((), built.args))
    with pytest.raises(AssertionError):
        close("oracle", oracle.flash_decode(bound | {toggle.argument: toggle.without})[0], oracle.flash_decode(bound)[0], OUTPUT[torch.bfloat16])
    hal_subject.verify("flash_decode", built)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lse_is_written_without_return_lse(hal_subject: Subject, dtype: str) -> None:
    built = build(hal_subject, Attention("lse", (9, 0, 20), dtype=dtype))
    hal_subject.verify("flash_decode", Built(built.args | {"return_lse": False}))


def test_without_lse(hal_subject: Subject) -> None:
    args = build(hal_subject, Attention("no-lse", (9, 0, 20), out="new")).args
    out, lse = hal_subject.verify("flash_decode", args | {"return_lse": False})
    assert lse is None
    assert isinstance(out, Tensor)


_POISONED = (
    Attention("rows", (13, 0, 33, 1)),
    Attention("block", (13, 2, 33), q_len=4, table="huge"),
    Attention("window", (60, 9), window=11, q_len=2),
    Attention("sinks-bf16", (13, 0, 33), sinks=True, dtype="bf16"),
    Attention("split-layout", (13, 20), layout="SPLIT_V0", dims=(40, 24)),
    Attention("int8-token", (13, 0, 20), kv="int8", k_scale="token_padded", v_scale="token_padded"),
    Attention("e4m3", (13, 20), kv="e4m3", k_scale="float", v_scale="float"),
    Attention("e5m2", (13, 20), kv="e5m2"),
    Attention("tree", (34,), q_len=5, tree="branches", page=16),
)


@pytest.mark.parametrize("case", _POISONED, ids=ids)
def test_poison_changes_no_bit(hal_subject: Subject, case: Attention) -> None:
    clean = build(hal_subject, replace(case, poison="zero", table="clean"))
    clean.args["out"].zero_()
    clean.args["lse"].zero_()
    for name in ("k_scale", "v_scale"):
        if isinstance(clean.args[name], Tensor):
            clean.args[name].nan_to_num_(nan=1.0)
    expected_out, expected_lse = attend(hal_subject, clean.args)
    out, lse = hal_subject.verify("flash_decode", build(hal_subject, case))
    assert_same_bits("out, poisoned against clean", out, expected_out)
    assert_same_bits("lse, poisoned against clean", lse, expected_lse)


def test_stale_results_of_an_earlier_call(hal_subject: Subject) -> None:
    """B10: a call that overflowed leaves nothing behind."""
    case = Attention("small", (5, 700, 0), page=16)
    small = build(hal_subject, case)
    expected_out, expected_lse = (t.clone() for t in attend(hal_subject, small.args))
    large = build(hal_subject, Attention("large", (64, 900, 64, 64, 300), page=16))
    large.args["v_cache"].fill_(torch.inf)
    large.args["k_cache"].fill_(torch.inf)
    hal_subject.call("flash_decode", large.args)
    out, lse = attend(hal_subject, build(hal_subject, case).args)
    assert_same_bits("out after a call that overflowed", out, expected_out)
    assert_same_bits("lse after a call that overflowed", lse, expected_lse)


@pytest.mark.parametrize("how", ["no-plan", "plan", "unsplit", "batch-invariant"])
@pytest.mark.parametrize("q_len", range(1, 9))
def test_identical_sequences_agree(hal_subject: Subject, q_len: int, how: str) -> None:
    """B41: every sequence after the first must be as right as the first, however its keys are split; to the bit if batch-invariant."""
    case = Attention("one", (300,), q_len=q_len, out="new", page=16, heads=(2, 1), batch_invariant=how == "batch-invariant")
    args = build(hal_subject, case).args
    args |= {"q": args["q"].repeat(4, 1, 1), "seq_lens": args["seq_lens"].repeat(4), "block_tables": args["block_tables"].repeat(4, 1)}
    if how in ("plan", "unsplit"):
        lengths = args["seq_lens"] if how == "plan" else torch.zeros_like(args["seq_lens"])
        args["plan"] = hal_subject.call("plan_decode", plan_facts(args | {"seq_lens": lengths}))
    out, lse = hal_subject.verify("flash_decode", args)
    if case.batch_invariant:
        for b in range(1, 4):
            assert_same_bits(f"out of sequence {b} against 0", out.unflatten(0, (4, q_len))[b], out.unflatten(0, (4, q_len))[0])
            assert_same_bits(f"lse of sequence {b} against 0", lse.unflatten(0, (4, q_len))[b], lse.unflatten(0, (4, q_len))[0])


def plan_facts(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `plan_decode` for a `flash_decode` call on NHD caches."""
    k, v = args["k_cache"], args["v_cache"]
    facts = {
        "seq_lens": args["seq_lens"],
        "num_heads": args["q"].shape[1],
        "num_kv_heads": k.shape[2],
        "head_dim": k.shape[3],
        "head_dim_v": v.shape[3],
        "page_size": k.shape[1],
        "max_seq_len": args["block_tables"].shape[1] * k.shape[1],
        "kv_dtype": k.dtype,
    }
    return facts | {n: args[n] for n in ("q_len", "cu_seqlens_q", "window", "batch_invariant") if n in args}


_MATES = (
    Attention("decode", (40, 3, 64, 0, 17), batch_invariant=True, out="new"),
    Attention("block", (40, 3, 64, 17), q_len=4, batch_invariant=True, out="new"),
    Attention("bf16-window", (40, 3, 64, 17), window=20, dtype="bf16", batch_invariant=True, out="new"),
    Attention("long-mate", (33, 400), batch_invariant=True, out="new", page=16, heads=(2, 1)),
)


@pytest.mark.parametrize("case", _MATES, ids=ids)
def test_batch_mates_change_no_bit(hal_subject: Subject, case: Attention) -> None:
    """B46: a row alone, and among others in another order."""
    assert isinstance(case.q_len, int)
    args = build(hal_subject, case).args
    out, lse = hal_subject.verify("flash_decode", args)
    order = list(reversed(range(len(case.lengths))))
    others = {"reversed": order, **{f"alone {b}": [b] for b in range(len(case.lengths))}}
    for name, chosen in others.items():
        got, got_lse = attend(hal_subject, rows(args, chosen, case.q_len))
        at = torch.tensor(chosen, device=out.device)
        assert_same_bits(f"out, {name}", got, out.unflatten(0, (-1, case.q_len))[at].flatten(0, 1))
        assert_same_bits(f"lse, {name}", got_lse, lse.unflatten(0, (-1, case.q_len))[at].flatten(0, 1))


def test_block_and_padding_change_no_bit(hal_subject: Subject) -> None:
    """B46: a row alone, as the last row of a block, packed with padding, and under a wider table."""
    args = build(hal_subject, Attention("block", (40, 17), q_len=4, batch_invariant=True, out="new")).args
    out, _ = hal_subject.verify("flash_decode", args)
    last = args["q"].unflatten(0, (2, 4))[:, 3].contiguous()
    single, _ = attend(hal_subject, args | {"q": last, "q_len": 1})
    assert_same_bits("last row of a block, alone", single, out.unflatten(0, (2, 4))[:, 3])
    padded = torch.cat([args["q"], torch.full_like(args["q"][:3], torch.nan)])
    cu = torch.tensor([0, 4, 8], dtype=torch.int32, device=out.device)
    packed, _ = attend(hal_subject, {k: v for k, v in args.items() if k != "q_len"} | {"q": padded, "cu_seqlens_q": cu})
    assert_same_bits("rows of a padded batch", packed[:8], out)
    assert_same_bits("padding rows", packed[8:], torch.zeros_like(packed[8:]))
    wide = torch.cat([args["block_tables"], torch.full_like(args["block_tables"], -1)], dim=1)
    wider, _ = attend(hal_subject, args | {"block_tables": wide})
    assert_same_bits("under a wider table", wider, out)


_SPLIT = (
    (Attention("plain", (64,), heads=(4, 2), out="new"), 40),
    (Attention("sinks", (64,), heads=(4, 2), out="new", sinks=True), 40),
    (Attention("1024-and-576", (1600,), heads=(8, 2), dims=(128, 128), page=16, dtype="bf16", out="fp32"), 1024),
)


@pytest.mark.parametrize(("case", "cut"), _SPLIT, ids=[case.id for case, _ in _SPLIT])
def test_split_and_merge(hal_subject: Subject, case: Attention, cut: int) -> None:
    """B23: natural logarithms all the way; parts without sinks, the last merge with them."""
    args = {k: v for k, v in build(hal_subject, case).args.items() if k != "lse"}
    whole, whole_lse = hal_subject.verify("flash_decode", args)
    parts = []
    for first, last in ((0, cut), (cut, case.lengths[0])):
        own = {
            "block_tables": args["block_tables"][:, first // case.page : last // case.page].contiguous(),
            "seq_lens": torch.tensor([last - first], dtype=torch.int32, device=whole.device),
            "out": torch.empty_like(whole),
        }
        parts.append(attend(hal_subject, {k: v for k, v in args.items() if k != "sinks"} | own))
    merged = hal_subject.call(
        "merge_states", {"out_a": parts[0][0], "lse_a": parts[0][1], "out_b": parts[1][0], "lse_b": parts[1][1], "sinks": args.get("sinks")}
    )
    hal_subject.note_error(close("merged out", merged[0], whole.double(), OUTPUT[args["q"].dtype]))
    hal_subject.note_error(close("merged lse", merged[1], whole_lse.double(), LSE[args["q"].dtype], least=1.0))


def test_empty_part_merges_away(hal_subject: Subject) -> None:
    """B4: a rank that owns no key."""
    args = build(hal_subject, Attention("part", (0, 64))).args
    out, lse = attend(hal_subject, args)
    other, other_lse = torch.randn_like(out), torch.randn_like(lse)
    other_lse[0] = 0.0  # a state of weight 1
    merged, merged_lse = hal_subject.call("merge_states", {"out_a": out, "lse_a": lse, "out_b": other, "lse_b": other_lse})
    assert_same_bits("merged with an empty part", merged[0], other[0])
    assert_same_bits("lse merged with an empty part", merged_lse[0], other_lse[0])


def test_causal_corner_by_hand(hal_subject: Subject) -> None:
    """B6 and B55 against numbers on paper, so that the oracle is checked too."""
    args = build(hal_subject, Attention("corner", (10,), q_len=3, probe="position")).args
    out, _ = hal_subject.verify("flash_decode", args)
    close("means of 0..7, 0..8, 0..9", out[:, 0, 0], torch.tensor([3.5, 4.0, 4.5]), OUTPUT[torch.float32])
    args = build(hal_subject, Attention("window", (10,), window=4, probe="position")).args
    out, _ = hal_subject.verify("flash_decode", args)
    close("mean of 6, 7, 8, 9", out[:, 0, 0], torch.tensor([7.5]), OUTPUT[torch.float32])


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "zero-sinks"])
def test_alibi_by_hand(hal_subject: Subject, sinks: bool) -> None:
    """B56: slope 0.5, q = 0, five keys; the last row of a block sees them all, the one before it one less."""
    args = build(hal_subject, Attention("alibi", (5,), q_len=2, heads=(2, 2), probe="position")).args
    args["alibi_slopes"] = torch.tensor([0.5, 0.5], device=hal_subject.device)
    args["sinks"] = torch.zeros(2, device=hal_subject.device) if sinks else None
    _, lse = hal_subject.verify("flash_decode", args)
    for row, scores in enumerate(([-1.5, -1.0, -0.5, 0.0], [-2.0, -1.5, -1.0, -0.5, 0.0])):
        expected = torch.tensor(scores + [0.0] * sinks, dtype=torch.float64).logsumexp(0)
        close(f"lse of row {row}", lse[row], expected.expand(2), LSE[torch.float32])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "e4m3", "int8"])
def test_preferred_cache_is_served(hal_subject: Subject, dtype: str) -> None:
    """What `kv_cache_spec` says an engine should allocate must not be refused for its layout or page size."""
    from hal.conformance.cases import DTYPES

    hal_subject.require("flash_decode")
    spec = hal_subject.backend().kv_cache_spec(2, 64, DTYPES[dtype], device=hal_subject.device)
    quantised = dtype in ("e4m3", "int8")
    case = Attention(
        "spec",
        (9, 20),
        dims=(64, 64),
        page=spec.page_size,
        layout=spec.layout,
        dtype="fp16" if quantised else dtype,
        kv=dtype if quantised else "",
        k_scale="token" if quantised else None,
        v_scale="token" if quantised else None,
    )
    hal_subject.verify("flash_decode", build(hal_subject, case))
