"""Token equality with transformers' own attention, bookkeeping of the paged cache, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
import hal.integrations.transformers as hal_transformers
from hal.errors import ArgumentError
from hal.integrations.transformers import PagedCache
from tests.integrations.tiny_models import ARCHITECTURES

NEW_TOKENS = 48
Batch = tuple[Tensor, Tensor]
Tiny = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    assert hal_transformers.register() == "hal"


def own(model: Any, name: str, ids: Tensor, mask: Tensor, new_tokens: int = NEW_TOKENS) -> Tensor:
    model.set_attn_implementation(ARCHITECTURES[name][2])
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)


def through_hal(model: Any, ids: Tensor, mask: Tensor, new_tokens: int = NEW_TOKENS, cache: PagedCache | None = None, **options: Any) -> Tensor:
    model.set_attn_implementation("hal")
    cache = PagedCache.for_model(model, **options) if cache is None else cache
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **cache.as_kwargs())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_alone_and_padded(name: str, tiny: Tiny, batch: Batch) -> None:
    model = tiny(name)
    ids, mask = batch
    expected = own(model, name, ids, mask)
    assert expected[:, ids.shape[1] :].unique().numel() > 2, "a constant answer proves nothing"
    assert torch.equal(through_hal(model, ids, mask), expected)
    for row in range(ids.shape[0]):
        prompt = ids[row, mask[row].bool()][None]
        ones = torch.ones_like(prompt)
        assert torch.equal(through_hal(model, prompt, ones), own(model, name, prompt, ones)), f"prompt of {prompt.shape[1]} tokens"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_sixteen_bit_logits_teacher_forced(name: str, dtype: torch.dtype, tiny: Tiny, batch: Batch) -> None:
    """Feed the same tokens one by one; logits of both paths must be as close to fp32's as transformers' own are."""
    ids, mask = batch
    exact = own_logits(tiny(name), name, ids, mask)
    model = tiny(name, dtype)
    theirs = own_logits(model, name, ids, mask)
    model.set_attn_implementation("hal")
    ours = stepwise_logits(model, ids, mask, PagedCache.for_model(model))
    real = mask.bool()
    error, allowed = (ours - exact)[real].abs().max(), (theirs - exact)[real].abs().max()
    assert error <= 2 * allowed + 1e-3, f"error {error:.4f}, transformers' own {allowed:.4f}"


def own_logits(model: Any, name: str, ids: Tensor, mask: Tensor) -> Tensor:
    model.set_attn_implementation(ARCHITECTURES[name][2])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits.float()


def stepwise_logits(model: Any, ids: Tensor, mask: Tensor, cache: PagedCache, first: int = 20) -> Tensor:
    """Prefill the first tokens, then feed the others one at a time."""
    found = []
    with torch.no_grad():
        for start, end in [(0, first), *((i, i + 1) for i in range(first, ids.shape[1]))]:
            inputs = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], "position_ids": positions(mask)[:, start:end]}
            found.append(model(**inputs, **cache.as_kwargs()).logits.float())
    return torch.cat(found, 1)


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_a_cache(name: str, tiny: Tiny, batch: Batch) -> None:
    model = tiny(name)
    ids, mask = batch
    expected = own_logits(model, name, ids, mask)
    model.set_attn_implementation("hal")
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt-oss-sinks"])
def test_chunks_of_a_prompt(name: str, tiny: Tiny, batch: Batch) -> None:
    """A prompt that comes in several pieces, of several tokens each, sees what came before."""
    model = tiny(name)
    ids = batch[0][-1:].expand(2, -1)
    mask = torch.ones_like(ids)
    expected = own_logits(model, name, ids, mask)
    model.set_attn_implementation("hal")
    cache = PagedCache.for_model(model)
    found = []
    with torch.no_grad():
        for start, end in ((0, 7), (7, 8), (8, 30), (30, 40)):
            found.append(model(input_ids=ids[:, start:end], position_ids=positions(mask)[:, start:end], **cache.as_kwargs()).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=2e-4 * float(expected.abs().max()))
    assert cache.get_seq_length() == 40
    assert cache.counts["flash_decode"] == 3
    assert cache.counts["flash_prefill"] == 9


def test_pads_behind_and_between_are_never_seen(tiny: Tiny, batch: Batch) -> None:
    model = tiny("llama-gqa")
    ids = batch[0][-2:]
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    mask[1, 10:20] = 0
    expected = own_logits(model, "llama-gqa", ids, mask)
    model.set_attn_implementation("hal")
    found = stepwise_logits(model, ids, mask, PagedCache.for_model(model), first=40)
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-4 * float(expected.abs().max()))


def test_growth_keeps_what_was_stored(tiny: Tiny, batch: Batch) -> None:
    model = tiny("llama-gqa")
    ids, mask = batch
    roomy, tight = PagedCache.for_model(set_hal(model), max_length=512), PagedCache.for_model(model, max_length=1)
    assert torch.equal(through_hal(model, ids, mask, 120, cache=roomy), through_hal(model, ids, mask, 120, cache=tight))


def set_hal(model: Any) -> Any:
    model.set_attn_implementation("hal")
    return model


def test_quantised_cache_stays_close(tiny: Tiny, batch: Batch) -> None:
    model = tiny("llama-gqa")
    ids, mask = batch
    expected = own_logits(model, "llama-gqa", ids, mask)
    found = stepwise_logits(set_hal(model), ids, mask, PagedCache.for_model(model, kv_dtype=torch.int8, max_length=8))
    real = mask.bool()
    error = float((found - expected)[real].abs().max() / expected.abs().max())
    assert 0 < error < 0.1


def test_conversation_continues_and_reset_starts_anew(tiny: Tiny, batch: Batch) -> None:
    model = tiny("llama-gqa")
    ids = batch[0][-1:, :20]
    first = own(model, "llama-gqa", ids, torch.ones_like(ids), 10)
    longer = torch.cat([first, batch[0][-1:, 20:]], 1)
    second = own(model, "llama-gqa", longer, torch.ones_like(longer), 10)
    cache = PagedCache.for_model(set_hal(model))
    for prompt, expected in ((ids, first), (longer, second)):
        assert torch.equal(through_hal(model, prompt, torch.ones_like(prompt), 10, cache=cache), expected)
    cache.reset()
    assert (len(cache), cache.get_seq_length(), cache.batch_size) == (0, 0, -1)
    assert torch.equal(through_hal(model, ids.repeat(3, 1), torch.ones_like(ids.repeat(3, 1)), 10, cache=cache), first.repeat(3, 1))


def test_every_call_is_served_by_the_dispatcher(tiny: Tiny, batch: Batch) -> None:
    seen: list[str] = []
    backend = hal.backend.build_backend(None, observe=lambda op, name, target: seen.append(op))
    model = set_hal(tiny("llama-gqa"))
    cache = PagedCache.for_model(model, backend)
    through_hal(model, *batch, 6, cache=cache)
    # The reference's plans hold nothing, so it is asked once.
    assert {op: seen.count(op) for op in set(seen)} == {"flash_prefill": 3, "flash_decode": 15, "write_kv": 18, "plan_decode": 1}
    assert cache.counts == {"steps": 6, "attention": 18, "flash_prefill": 3, "flash_decode": 15, "write_kv": 18, "plan_decode": 1}


def test_sampling_and_use_backend(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    with hal.use_backend("reference") as backend:
        cache = PagedCache.for_model(model)
    assert cache.backend is backend
    found = model.generate(input_ids=batch[0], attention_mask=batch[1], max_new_tokens=4, do_sample=True, **cache.as_kwargs())
    assert found.shape == (8, 44)


def test_refuses_beams(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    with pytest.raises(ArgumentError, match="reorder_cache, which beam search"):
        model.generate(
            input_ids=batch[0], attention_mask=batch[1], max_new_tokens=4, num_beams=2, do_sample=False, **PagedCache.for_model(model).as_kwargs()
        )


def test_refuses_other_caches(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    with pytest.raises(ArgumentError, match=r"cache of another kind.*PagedCache"):
        model.generate(input_ids=batch[0], attention_mask=batch[1], max_new_tokens=4, do_sample=False)


def test_refuses_other_attention(tiny: Tiny, batch: Batch) -> None:
    model = tiny("llama-gqa")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match=r"'sdpa'.*register"):
        PagedCache.for_model(model)
    with torch.no_grad(), pytest.raises(ArgumentError, match="left the keys of layer 0 unread"):
        model(input_ids=batch[0][-1:], **PagedCache(hal.get_backend()).as_kwargs())


def test_refuses_masks_per_query(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    ids = batch[0]
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"attention_mask.*\(8, 1, 40, 40\)"):
        model(input_ids=ids, attention_mask=torch.ones(8, 1, 40, 40, dtype=torch.bool, device=ids.device), **PagedCache.for_model(model).as_kwargs())


def test_refuses_gradients(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    with pytest.raises(ArgumentError, match="requires grad"):
        model(input_ids=batch[0], attention_mask=batch[1], use_cache=False)


def test_refuses_attention_weights(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    with torch.no_grad(), pytest.raises(ArgumentError, match="output_attentions"):
        model(input_ids=batch[0], output_attentions=True, use_cache=False)


def test_refuses_another_batch_size(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(input_ids=batch[0][:3], **cache.as_kwargs())
        with pytest.raises(ArgumentError, match="holds 3 sequences, the batch has 2"):
            model(input_ids=batch[0][:2, :1], **cache.as_kwargs())


def test_refuses_a_mask_that_goes_missing_or_changes(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("llama-gqa"))
    ids, mask = batch
    for later, complaint in ((None, "is missing"), (torch.ones(8, 42, dtype=torch.long, device=ids.device), "differs from earlier steps")):
        cache = PagedCache.for_model(model)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), **cache.as_kwargs())
            with pytest.raises(ArgumentError, match=complaint):
                model(input_ids=ids[:, :2], attention_mask=later, **cache.as_kwargs())


def test_refuses_windows_with_pads_behind(tiny: Tiny, batch: Batch) -> None:
    model = set_hal(tiny("mistral-window"))
    ids = batch[0][-2:]
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    with torch.no_grad(), pytest.raises(ArgumentError, match="pads behind real tokens"):
        model(input_ids=ids, attention_mask=mask, **PagedCache.for_model(model).as_kwargs())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dropout": 0.1}, r"`dropout` is 0.1"),
        ({"is_causal": False}, r"`is_causal` is False"),
        ({"position_bias": torch.zeros(1)}, r"`position_bias` is given"),
        ({"attention_mask": object()}, r"`attention_mask` is object"),
    ],
    ids=["dropout", "encoder", "bias", "foreign-mask"],
)
def test_refuses_what_ops_cannot_express(arguments: dict[str, Any], complaint: str) -> None:
    x = torch.randn(1, 2, 3, 16)
    with pytest.raises(ArgumentError, match=complaint):
        hal_transformers.attention(torch.nn.Identity(), x, x, x, **{"attention_mask": None, **arguments})


def test_mask_patterns() -> None:
    from transformers import masking_utils

    from hal.integrations.mask_patterns import PADDED, WINDOW, padding_mask

    given = torch.ones(2, 9, dtype=torch.bool)
    plain = padding_mask(2, 1, 9, mask_function=masking_utils.causal_mask_function, attention_mask=given)
    window = padding_mask(2, 1, 9, mask_function=masking_utils.sliding_window_causal_mask_function(5), device="cpu")
    notes = [(getattr(mask, WINDOW), getattr(mask, PADDED)) for mask in (plain, window)]
    assert notes == [(None, True), (5, False)]
    assert window.shape == (2, 9)
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    for pattern, found in ((chunked, "chunked_overlay"), (masking_utils.bidirectional_mask_function, "bidirectional")):
        with pytest.raises(ArgumentError, match=found):
            padding_mask(2, 9, 9, mask_function=pattern, attention_mask=given)
