"""The reference's attention: known answers of the public bug log first, then a float64 loop over random cases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hal.backends import reference_attention, reference_products, reference_views
from hal.backends.reference_attention import flash_decode, flash_prefill
from tests.backends.host_reads import NoHostReads
from tests.backends.reference_cases import FP8, ORDER, TOLERANCE, Case, check, naive, offsets, tree_of

E4M3, E5M2 = FP8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors only: on a busy machine, threads wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def positions(lengths: list[int], **kwargs: Any) -> Case:
    """A case whose values are the place of each key, so that q = 0 answers with the mean of the visible places."""
    case = Case(lengths, **kwargs)
    for table, length in zip(case.tables, lengths, strict=True):
        for j in range(length):
            case.v_cache[table[j // case.page], j % case.page] = j
    return case.poison()


@pytest.mark.parametrize("in_order", [True, False], ids=["views", "gather"])
@pytest.mark.parametrize(
    ("length", "q_len", "window", "means"),
    [
        pytest.param(10, 3, None, [3.5, 4.0, 4.5], id="frontier"),
        pytest.param(10, 1, 4, [7.5], id="window"),
        pytest.param(10, 1, 1, [9.0], id="window-1"),
        pytest.param(10, 3, 4, [5.5, 6.5, 7.5], id="window-rows"),
        pytest.param(2, 4, None, [0.0, 0.0, 0.0, 0.5], id="q_len-beyond-S"),
        pytest.param(0, 2, 3, [0.0, 0.0], id="empty"),
    ],
)
def test_visible_keys(length: int, q_len: int, window: int | None, means: list[float], in_order: bool) -> None:
    case = positions([length], in_order=in_order)
    out, lse = case.decode(torch.zeros(q_len, 4, 16), q_len=q_len, window=window, return_lse=True)
    plain = case.decode(torch.zeros(q_len, 4, 16), q_len=q_len, window=window)
    expected = torch.tensor(means).view(-1, 1, 1).expand_as(out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(plain, expected)
    nothing = max(0, q_len - length)
    assert torch.equal(lse[:nothing], torch.full_like(lse[:nothing], -math.inf))
    assert lse[nothing:].isfinite().all()


def test_alibi_shows_in_lse() -> None:
    scores = torch.tensor([-2.0, -1.5, -1.0, -0.5, 0.0])
    _, lse = Case([5]).decode(torch.zeros(2, 4, 16), q_len=2, alibi_slopes=torch.full((4,), 0.5), return_lse=True)
    torch.testing.assert_close(lse, torch.stack([scores[1:].logsumexp(0), scores.logsumexp(0)])[:, None].expand(2, 4))


def test_softcap_saturates_and_spares_masked_keys() -> None:
    case = Case([3]).poison()
    case.k_cache[case.tables[0, 0], :3] = torch.tensor([5e3, 1e4, -1e4]).view(3, 1, 1)
    _, lse = case.decode(torch.full((1, 4, 16), 4.0), scale=1.0 / 64, softcap=50.0, return_lse=True)
    torch.testing.assert_close(lse, torch.full((1, 4), 50.0 + math.log(2)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (71, 1), (12, 12)])
@pytest.mark.parametrize("in_order", [True, False], ids=["views", "gather"])
def test_head_groups(heads: int, kv_heads: int, in_order: bool) -> None:
    case = Case([5, 9], heads=(heads, kv_heads), in_order=in_order)
    case.v_cache.copy_(torch.arange(kv_heads).float().view(kv_heads, 1).expand_as(case.v_cache))
    out = case.decode(torch.zeros(2, heads, 16))
    torch.testing.assert_close(out, (torch.arange(heads) // (heads // kv_heads)).float().view(1, -1, 1).expand_as(out))


def test_sinks_count_once() -> None:
    sinks = torch.linspace(-2, 4, 4)
    case = Case([900, 0], kv_dtype=E4M3, scales="scalar", page=16).poison()
    q = case.query(2)
    features: dict[str, Any] = {"sinks": sinks, "window": 32, "softcap": 30.0}
    got = case.decode(q, return_lse=True, **features)
    check(got, naive(q, case.k, case.v, [1, 1], **features), torch.float32)
    assert torch.equal(got[0][1], torch.zeros(4, 16))


@pytest.mark.parametrize("features", [{}, {"window": 3}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])}], ids=["plain", "window", "alibi"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tree(features: dict[str, Any], batch_invariant: bool) -> None:
    mask = torch.cat([tree_of([-1, 0, 0, 1, 2], 7), tree_of([-1, 0, 1], 7), tree_of([-1, -1], 7)])
    mask[0, 4] = True  # the upper triangle counts too
    case, counts = Case([102, 3, 1], page=16).poison(), [5, 3, 2]
    q = case.query(10)
    want = naive(q, case.k, case.v, counts, tree_mask=mask, **features)
    kwargs = {"tree_mask": mask, "return_lse": True, "batch_invariant": batch_invariant, **features}
    check(case.decode(q, cu_seqlens_q=offsets(counts), **kwargs), want, torch.float32)
    check(case.prefill(q, counts, **kwargs), want, torch.float32)


def test_draft_slots_that_no_row_sees_are_not_read() -> None:
    case = Case([9])
    case.v_cache[case.tables[0, 2], 0] = math.nan
    out = case.decode(case.query(2), q_len=2, tree_mask=torch.tensor([[True, False], [True, False]]))
    assert out.isfinite().all()


@pytest.mark.parametrize("in_order", [True, False], ids=["views", "gather"])
def test_page_ids_outside_the_cache_are_skipped(in_order: bool) -> None:
    case = Case([8], in_order=in_order)
    case.tables[0, 0] = 2**30
    q = case.query(1)
    torch.testing.assert_close(case.decode(q).double(), naive(q, [case.k[0][4:]], [case.v[0][4:]], [1])[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("in_order", [True, False], ids=["views", "gather"])
def test_unchecked_lengths_clamp(in_order: bool) -> None:
    case = Case([8, 8], in_order=in_order, spare=0)
    q = case.query(2)
    case.seq_lens = torch.tensor([-5, 1000], dtype=torch.int32)
    got = case.decode(q)
    torch.testing.assert_close(got.double(), naive(q, [case.k[0][:0], case.k[1]], [case.v[0][:0], case.v[1]], [1, 1])[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("last", [5, 1], ids=["beyond-q", "decreasing"])
@pytest.mark.parametrize("in_order", [True, False], ids=["views", "gather"])
def test_unchecked_offsets_do_no_harm(last: int, in_order: bool) -> None:
    case = Case([8, 8], in_order=in_order)
    q = case.query(3)
    out = case.decode(q, cu_seqlens_q=torch.tensor([0, 2, last], dtype=torch.int32))
    check(out[:2], naive(q[:2], case.k[:1], case.v[:1], [2]), torch.float32)


def test_strided_inputs_and_outputs() -> None:
    case = Case([20, 7], in_order=True)
    packed = torch.randn(2, 8 * 16, generator=case.random)
    q = packed[:, :64].view(2, 4, 16)
    exact = naive(q, case.k, case.v, [1, 1])
    both = torch.stack([case.k_cache, case.v_cache], dim=1)
    padded = torch.full((case.v_cache.shape[0], 7, 2, 24), math.nan)[:, 1:5, :, :16].copy_(case.v_cache)
    for k, v in ((both[:, 0], both[:, 1]), (case.k_cache, padded), (case.k_cache, case.v_cache)):
        frame = torch.full((2, 6, 4, 48), math.nan)
        out, lse = frame[:, 2, :, 16:32], torch.full((2, 9), math.nan)[:, 1:5]
        result = flash_decode(q, k, v, case.seq_lens, case.tables, out=out, lse=lse)
        assert result is out
        check((out, lse), exact, torch.float32)
        assert flash_decode(q, k, v, case.seq_lens, case.tables, out=out) is out
        check(out, exact, torch.float32)
        assert int(frame.isnan().sum()) == frame.numel() - out.numel()


def random_call(seed: int) -> tuple[Case, Case, list[int], int, dict[str, Any], str]:
    """A clean and a poisoned copy of a random case, its blocks, padding rows, features and the way to call it."""
    choose = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=choose))]

    mode = pick("decode", "blocks", "packed", "prefill", "non-causal")
    page, kv_heads = pick(1, 3, 4, 16, 300), pick(1, 2, 3)
    lengths = [pick(0, 1, 2, page - 1, page, page + 1, 37) % 50 for _ in range(pick(1, 2, 4))]
    kv_dtype, dims, layout = pick(None, None, torch.int8, E4M3, E5M2), pick((16, 16), (24, 24), (16, 40)), pick(*ORDER, "NHD", "NHD")
    facts = {
        "heads": (kv_heads * pick(1, 3, 5), kv_heads), "dims": dims, "page": page, "layout": layout,
        "dtype": pick(torch.float32, torch.float16, torch.bfloat16), "kv_dtype": kv_dtype,
        "scales": kv_dtype and pick("float", "scalar", "head", "token"), "in_order": pick(True, False), "spare": pick(0, 2), "seed": seed,
    }  # fmt: skip
    block = pick(2, 3, 5)
    counts = [{"decode": 1, "blocks": block}.get(mode) or pick(0, 1, 2, 9) for _ in lengths]
    padding = 0 if mode in ("decode", "blocks") else pick(0, 2)
    heads = facts["heads"][0]
    features = {
        "softcap": pick(0.0, 0.0, 1.0), "window": pick(None, None, 1, 7), "scale": pick(None, None, 0.0, -0.3),
        "alibi_slopes": pick(None, None, torch.rand(heads, generator=choose)), "sinks": pick(None, None, torch.randn(heads, generator=choose)),
    }  # fmt: skip
    if mode != "non-causal" and pick(False, False, True):
        features["tree_mask"] = torch.rand(sum(counts) + padding, max(counts) + 2, generator=choose) < 0.6
    if pick(True, False):
        features = {"window": features["window"]}
    return Case(lengths, **facts), Case(lengths, **facts).poison(), counts, padding, features, mode


def call(case: Case, q: Tensor, counts: list[int], mode: str, **kwargs: Any) -> Any:
    if mode in ("decode", "blocks"):
        return case.decode(q, q_len=counts[0], **kwargs)
    if mode == "packed":
        return case.decode(q, cu_seqlens_q=offsets(counts), **kwargs)
    return case.prefill(q, counts, causal=mode == "prefill", **kwargs)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    case, poisoned, counts, padding, features, mode = random_call(seed)
    rows = sum(counts)
    q = case.query(rows + padding)
    want = naive(q, case.k, case.v, counts, causal=mode != "non-causal", **features)
    got, plain = call(case, q, counts, mode, return_lse=True, **features), call(case, q, counts, mode, **features)
    check(got, want, case.dtype)
    check(plain, want, case.dtype)
    q[rows:] = math.nan
    again = call(poisoned, q, counts, mode, return_lse=True, **features)
    assert torch.equal(again[0], got[0])
    assert torch.equal(again[1], got[1])
    assert torch.equal(call(poisoned, q, counts, mode, **features), plain)
    assert (got[0].dtype, got[1].dtype, plain.dtype) == (case.dtype, torch.float32, case.dtype)


@pytest.mark.parametrize("seed", range(100, 120))
def test_accelerator_path_reads_no_values(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reference_attention, reference_views):
        monkeypatch.setattr(module, "on_host", lambda t: False)
    _, case, counts, padding, features, mode = random_call(seed)
    q = case.query(sum(counts) + padding)
    with NoHostReads():
        got = call(case, q, counts, mode, return_lse=True, **features)
    check(got, naive(q, case.k, case.v, counts, causal=mode != "non-causal", **features), case.dtype)


def test_packed_keys() -> None:
    case, counts = Case([0, 5, 95], in_order=True), [2, 5, 80]
    q, k, v = case.query(87), torch.cat(case.k).float(), torch.cat(case.v).float()
    want = naive(q, case.k, case.v, counts)
    options: list[dict[str, Any]] = [{}, {"return_lse": True}, {"batch_invariant": True}]
    for kwargs in options:
        got = flash_prefill(q, k, v, cu_seqlens_q=offsets(counts), max_q_len=80, cu_seqlens_k=offsets([0, 5, 95]), **kwargs)
        check(got, want, torch.float32)


@pytest.mark.parametrize("length", [600, 900, 200])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_long_prompts_agree_on_both_paths(length: int, window: int | None, causal: bool) -> None:
    case = Case([40, length], page=16, in_order=True).poison()
    q = case.query(630)
    kwargs = {"window": window, "causal": causal}
    general, _ = case.prefill(q, [30, 600], return_lse=True, **kwargs)
    torch.testing.assert_close(case.prefill(q, [30, 600], **kwargs), general, rtol=0, atol=1e-5)


@pytest.mark.parametrize("features", [{}, {"window": 100}, {"softcap": 20.0}], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize(("heads", "threads"), [((2, 1), 1), ((6, 3), 2)])
def test_batch_invariant(features: dict[str, Any], heads: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    case = Case([700, 3, 0, 900, 50, 51, 52, 53, 54, 1600], heads=heads, dims=(24, 24), page=16)
    q = case.query(10)
    kwargs = {"batch_invariant": True, "return_lse": True, **features}
    batch = case.decode(q, **kwargs)
    case.k, case.v, case.seq_lens, case.tables = case.k[:1], case.v[:1], case.seq_lens[:1], case.tables[:1, :44]
    alone = case.decode(q[:1], **kwargs)
    block = case.decode(torch.cat([q[1:4], q[:1]]), q_len=4, **kwargs)
    for one, of_batch, of_block in zip(alone, batch, block, strict=True):
        assert torch.equal(one[0], of_batch[0])
        assert torch.equal(one[0], of_block[3])


@pytest.mark.parametrize("in_order", [True, False], ids=["views", "gather"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).removeprefix("torch."))
def test_long_contexts(dtype: torch.dtype, in_order: bool) -> None:
    case = Case([4096, 32768], heads=(2, 1), dims=(64, 64), page=16, dtype=dtype, in_order=in_order)
    q = case.query(2)
    scores = [q[b].double() @ case.k[b][:, 0].T / 8 for b in range(2)]
    want = torch.stack([s.softmax(-1) @ case.v[b][:, 0] for b, s in enumerate(scores)]), torch.stack([s.logsumexp(-1) for s in scores])
    check(case.decode(q), want, dtype)
    check(case.decode(q, return_lse=True), want, dtype)


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest storage that an operator returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for r in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(r, Tensor) and r.untyped_storage().data_ptr() not in inputs:
                self.size = max(self.size, r.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "features", [{}, {"softcap": 1.0}, {"batch_invariant": True}, {"k_scale": 0.5, "v_scale": 0.5}], ids=["plain", "softcap", "invariant", "int8"]
)
@pytest.mark.parametrize("in_order", [True, False], ids=["views", "gather"])
def test_never_copies_the_cache(features: dict[str, Any], in_order: bool) -> None:
    case = Case([12000, 8000, 10], dims=(64, 64), page=16, in_order=in_order, kv_dtype=torch.int8 if "k_scale" in features else None)
    with LargestTensor() as largest:
        case.decode(case.query(3), **features)
        case.prefill(case.query(90), [90, 0, 0], **features)
    assert case.k_cache.numel() > 2**21  # values; in fp32 that is
    assert largest.size <= 2**22  # bytes: half of one cache


def test_products_keep_fp32_accuracy_with_tf32_operands() -> None:
    def tf32(a: Tensor, b: Tensor) -> Tensor:
        return reference_products.tf32_part(a) @ reference_products.tf32_part(b)

    a, b = torch.randn(3, 40, 64), torch.randn(3, 64, 50)
    b[0, 0, 0] = math.inf
    exact, got = a.double() @ b.double(), reference_products.split_product(a, b, tf32)
    finite = exact.isfinite()
    assert torch.equal(got[~finite], exact[~finite].float())
    assert (got - exact)[finite].abs().max() <= 2e-6 * exact[finite].abs().max()
    assert (tf32(a, b) - exact)[finite].abs().max() > 1e-4 * exact[finite].abs().max()
