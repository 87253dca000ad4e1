"""Attention and experts of transformers models, served by `hal`.

    import hal.integrations.transformers as hal_transformers

    served = hal_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=served, experts_implementation=served)
    model.generate(**inputs, **hal_transformers.PagedCache.for_model(model).as_kwargs())

Either works without the other; `experts_implementation` matters to mixtures of experts only, and `hal.integrations.experts` serves it.
Their routing stays the model's own unless `serve_routers(model)` is called.

Prompts are written by `write_kv` and attended by `flash_prefill`, each further token by `write_kv` and `flash_decode`.
A forward pass without a cache is one `flash_prefill` per layer over packed keys. What these ops cannot express raises a
`hal.ArgumentError`: nothing is computed by another path. Works with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

import hal
from hal.errors import ArgumentError
from hal.integrations.experts import NAME, experts
from hal.integrations.mask_patterns import PADDED, WINDOW, padding_mask
from hal.integrations.paged_cache import HANDED_OVER, PagedCache
from hal.integrations.routers import serve_routers
from hal.integrations.steps import pack

__all__ = ["PagedCache", "attention", "experts", "register", "serve_routers"]

_PACKING = "hal_packing"
#: Keywords of attention functions that change the result in ways that the ops here do not know.
_REFUSED = frozenset({"position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions", "indices"})


def register() -> str:
    """Register attention, mask and experts with transformers; return their name for `attn_implementation` and `experts_implementation`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    ExpertsInterface.register(NAME, experts)
    return NAME


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values into the `PagedCache` that `update` handed over, and attend.

    Args:
        module: the attention module.
        query: (B, H, n, D).
        key: (B, Hkv, n, D), the new keys.
        value: (B, Hkv, n, Dv).
        attention_mask: (B, tokens so far) bool, True for real tokens, from `padding_mask`; None if all are.
        scaling: factor of the scores; default `D ** -0.5`.
        dropout: must be 0.
        sliding_window: keys that a row sees, itself included.
        softcap: bound of the scores.
        s_aux: (H,) attention sinks.
        is_causal: must not be False; default that of the module.
        **kwargs: what other implementations need; those that would change the result are refused.

    Returns:
        (B, n, H, Dv) and None for the attention weights. Rows of pads are 0 in a prompt.

    Raises:
        ArgumentError: something here is not supported.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or not causal or not _REFUSED.isdisjoint(kwargs):
        _refuse(dropout, causal, kwargs)
    window, padded = _pattern(attention_mask, sliding_window)
    options: dict[str, Any] = {"scale": scaling, "window": window}
    if softcap:
        options["softcap"] = float(softcap)
    if s_aux is not None:
        options["sinks"] = s_aux.detach().float()
    handed = getattr(key, HANDED_OVER, None)
    if handed is None:
        return _without_cache(query, key, value, attention_mask if padded else None, options), None
    cache, layer_idx = handed
    return _with_cache(cache, layer_idx, query, key, value, attention_mask, padded, options), None


def _with_cache(
    cache: PagedCache, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, padded: bool, options: dict[str, Any]
) -> Tensor:
    batch, heads, tokens, _ = query.shape
    layer, step = cache.begin(layer_idx, key, value, mask, padded)
    if options["window"] is not None and not step.left_padded:
        raise ArgumentError("attention", "attention_mask", "has pads behind real tokens", "left padding, for layers with a sliding window")
    backend, counts = cache.backend, cache.counts
    k_cache, v_cache = layer.tensors["k_cache"], layer.tensors["v_cache"]
    layout = layer.spec.layout
    if step.packing is None:
        q, k, v = query.squeeze(2), key.squeeze(2), value.squeeze(2)
    else:
        q, k, v = (t.transpose(1, 2).reshape(batch * tokens, t.shape[1], t.shape[3]) for t in (query, key, value))
    backend.write_kv(k, v, k_cache, v_cache, step.slots, kv_layout=layout, **layer.scales)
    if step.packing is None:
        plan = cache.plan(layer, step, heads, options["window"])
        out = backend.flash_decode(q, k_cache, v_cache, step.seq_lens, step.block_tables, kv_layout=layout, plan=plan, **options, **layer.scales)
        counts["flash_decode"] += 1
    else:
        packing = step.packing
        out = backend.flash_prefill(
            packing.gather(q), k_cache, v_cache, cu_seqlens_q=packing.cu_seqlens, max_q_len=tokens, seq_lens=step.seq_lens,
            block_tables=step.block_tables, kv_layout=layout, **options, **layer.scales,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        out = packing.scatter(out)
        counts["flash_prefill"] += 1
    counts["write_kv"] += 1
    counts["attention"] += 1
    assert isinstance(out, Tensor)
    return out.view(batch, tokens, heads, out.shape[2])


def _without_cache(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    batch, heads, tokens, _ = query.shape
    if key.shape[2] != tokens:
        raise ArgumentError(
            "attention", "past_key_values", f"brings {key.shape[2]} keys for {tokens} new tokens, so it is a cache of another kind", "a PagedCache",
            "Pass **PagedCache.for_model(model).as_kwargs() to generate.",
        )  # fmt: skip
    packing = getattr(mask, _PACKING, None)
    if packing is None:
        packing = pack(batch, tokens, query.device, mask)
        if mask is not None:
            setattr(mask, _PACKING, packing)
    if options["window"] is not None and not packing.left_padded:
        raise ArgumentError("attention", "attention_mask", "has pads behind real tokens", "left padding, for layers with a sliding window")
    q, k, v = (packing.gather(t.transpose(1, 2).reshape(batch * tokens, t.shape[1], t.shape[3])) for t in (query, key, value))
    out = hal.get_backend().flash_prefill(q, k, v, cu_seqlens_q=packing.cu_seqlens, max_q_len=tokens, cu_seqlens_k=packing.cu_seqlens, **options)
    assert isinstance(out, Tensor)
    return packing.scatter(out).view(batch, tokens, heads, out.shape[2])


def _pattern(mask: Tensor | None, sliding_window: int | None) -> tuple[int | None, bool]:
    """Return the window in force and whether there is padding; the mask's pattern and the module must agree."""
    if mask is None:
        return sliding_window, False
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        found = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is {type(mask).__name__}"
        raise ArgumentError("attention", "attention_mask", found, "(B, tokens), True for real tokens; masks per query token are not supported")
    window = getattr(mask, WINDOW, sliding_window)
    if window != sliding_window:
        raise ArgumentError("attention", "sliding_window", f"is {sliding_window}", f"the window of the model's mask, {window}")
    return window, getattr(mask, PADDED, True)


def _refuse(dropout: float, causal: bool, kwargs: dict[str, Any]) -> None:
    """Raise for the first argument that is not supported; an explicit False, as of `output_attentions`, is fine."""
    if dropout:
        raise ArgumentError("attention", "dropout", f"is {dropout}", "0: these ops have no backward", "Call model.eval().")
    for name in sorted(_REFUSED):
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ArgumentError("attention", name, "is given", "None", "Load the model with attn_implementation='eager' or 'sdpa'.")
    if not causal:
        raise ArgumentError("attention", "is_causal", "is False", "causal self-attention; encoders and cross-attention are not supported")
