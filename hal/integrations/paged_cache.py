"""A paged KV cache for transformers' `generate`, written and read by the ops of a `hal` backend.

Page p of sequence b is page `b * pages_each + p` of every layer: rows of the block table are consecutive, so a backend
may read a sequence as one view. When the pages run out, each layer moves to twice as many. Padding is never stored:
a sequence holds its real tokens only, in order, wherever the pads stood.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

import hal
from hal.backend import Backend
from hal.errors import ArgumentError
from hal.integrations.steps import Step, Steps
from hal.kv_cache import KVCacheSpec

__all__ = ["HANDED_OVER", "PagedCache"]

#: Attribute of the key tensor through which `update` hands the cache to the attention function.
HANDED_OVER = "hal_paged_cache"
#: What `generate` calls the cache: newer versions of transformers renamed it.
_KEYWORD = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"


@dataclass
class _Layer:
    """One layer's caches and scales, by the names that ops give them, and how many tokens (pads included) passed."""

    spec: KVCacheSpec
    tensors: dict[str, Tensor]
    pages_each: int
    length: int = 0
    scales: dict[str, Any] = field(default_factory=dict)


class PagedCache(Cache):
    """The KV cache of one batch of sequences, for a model loaded with `attn_implementation=register()`.

    It serves one call of `generate`, or several that continue each other; `reset()` makes it new. Use it as
    `model.generate(**inputs, **PagedCache.for_model(model).as_kwargs())`.

    Args:
        backend: whose ops write and read it.
        max_length: tokens of a sequence to make room for at first; more are accepted, at the cost of a copy. None
            takes twice the prompt.
        kv_dtype: dtype of a quantised cache (fp8 or int8, with scales per token and head); None for the model's.

    Attributes:
        counts: calls so far: `attention`, `flash_prefill`, `flash_decode`, `write_kv` (one per layer and step),
            `steps`, `plan_decode`.
    """

    def __init__(self, backend: Backend, *, max_length: int | None = None, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(layers=[])
        self.backend, self.kv_dtype = backend, kv_dtype
        self.counts: Counter[str] = Counter()
        self._max_length = max_length or 0
        self._paged: dict[int, _Layer] = {}
        self._steps: dict[torch.device, Steps] = {}
        self._specs: dict[tuple[int, int, torch.dtype, int, torch.device], KVCacheSpec] = {}
        self._page_size = 0
        self._handed: int | None = None
        self._plans = backend.explain("plan_decode").chosen is not None

    @classmethod
    def for_model(
        cls, model: Any, backend: Backend | str | None = None, *, max_length: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> PagedCache:
        """Return an empty cache for a decoder model.

        Args:
            model: a transformers model loaded with `attn_implementation=register()`.
            backend: a `hal.Backend` or the name of one; default `hal.get_backend()`.
            max_length: tokens of a sequence to make room for at first (prompt and new ones).
            kv_dtype: dtype of a quantised cache.

        Raises:
            ArgumentError: the model was loaded with another attention implementation, or has layers that are not
                causal self-attention with a KV cache of their own.
        """
        config = model.config.get_text_config(decoder=True)
        _check_model(model.config, config)
        bound = backend if isinstance(backend, Backend) else hal.get_backend(backend)
        return cls(bound, max_length=max_length, kv_dtype=kv_dtype)

    def as_kwargs(self) -> dict[str, PagedCache]:
        """Return the cache under the keyword of the installed transformers (`cache`, in older versions `past_key_values`)."""
        return {_KEYWORD: self}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand this cache to the attention function, which writes and attends; nothing is stored here.

        Args:
            key_states: (B, Hkv, n, D), the new keys.
            value_states: (B, Hkv, n, Dv).
            layer_idx: which layer.
            *args: what other caches need.
            **kwargs: what other caches need.

        Returns:
            The two tensors themselves.

        Raises:
            ArgumentError: what was handed over before never reached the attention function.
        """
        if self._handed is not None:
            raise ArgumentError(
                "attention", "attn_implementation", f"left the keys of layer {self._handed} unread", "'hal'",
                "Load the model with attn_implementation=hal.integrations.transformers.register().",
            )  # fmt: skip
        self._handed = layer_idx
        setattr(key_states, HANDED_OVER, (self, layer_idx))
        return key_states, value_states

    def begin(self, layer_idx: int, key: Tensor, value: Tensor, mask: Tensor | None, padded: bool) -> tuple[_Layer, Step]:
        """Take over what `update` handed over: return the layer's storage and the step under way, making either if new.

        Args:
            layer_idx: which layer.
            key: (B, Hkv, n, D).
            value: (B, Hkv, n, Dv).
            mask: (B, tokens so far) bool, True for real tokens; looked at if `padded`.
            padded: the caller gave a padding mask.
        """
        self._handed = None
        batch, _, tokens, _ = key.shape
        layer = self._paged.get(layer_idx)
        if layer is None:
            layer = self._add_layer(layer_idx, key, value)
        steps = self._steps.get(key.device)
        if steps is None:
            steps = self._steps[key.device] = Steps(batch, key.device, self._page_size, max(self._max_length, 2 * tokens))
        if batch != steps.batch:
            found = f"holds {steps.batch} sequences, the batch has {batch}"
            raise ArgumentError("attention", "past_key_values", found, "one cache per batch", "Make a new PagedCache.")
        if layer.length == steps.length:  # this layer has seen every step so far: a new one begins
            steps.advance(tokens, mask if padded else None)
            self.counts["steps"] += 1
        layer.length += tokens
        if layer.length != steps.length:
            raise ArgumentError("attention", "query", f"brings {tokens} tokens to layer {layer_idx}", "as many as to the other layers of this step")
        if layer.pages_each != steps.pages_each:
            self._move(layer, steps, key.device)
        return layer, steps.step

    def plan(self, layer: _Layer, step: Step, num_heads: int, window: int | None) -> Any:
        """Return the plan of this step for layers of these facts, made once; None if no backend plans, or to no effect."""
        if not self._plans:
            return None
        spec = layer.spec
        facts = (num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim_v, window)
        steps = self._steps[step.seq_lens.device]
        plan, made_at = steps.plans.get(facts, (None, -1))
        if made_at != steps.length:
            plan = self.backend.plan_decode(
                step.seq_lens,
                num_heads=num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                head_dim_v=spec.head_dim_v,
                page_size=spec.page_size,
                max_seq_len=step.block_tables.shape[1] * spec.page_size,
                window=window,
                kv_dtype=spec.dtype,
                out=plan,
            )
            steps.plans[facts] = (plan, steps.length)
            self.counts["plan_decode"] += 1
            self._plans = plan.data is not None  # a backend whose plans hold nothing gains nothing from them
        return plan

    def _add_layer(self, layer_idx: int, key: Tensor, value: Tensor) -> _Layer:
        facts = (key.shape[1], key.shape[3], self.kv_dtype or key.dtype, value.shape[3], key.device)
        spec = self._specs.get(facts)
        if spec is None:
            spec = self._specs[facts] = self.backend.kv_cache_spec(*facts[:3], head_dim_v=facts[3], device=facts[4])
        self._page_size = self._page_size or spec.page_size
        if spec.page_size != self._page_size:
            found = f"of layer {layer_idx} wants pages of {spec.page_size} slots"
            raise ArgumentError("attention", "key", found, f"those of the others, {self._page_size}")
        layer = self._paged[layer_idx] = _Layer(spec, {}, 0)
        return layer

    def _move(self, layer: _Layer, steps: Steps, device: torch.device) -> None:
        """Give a layer the number of pages that the step needs, keeping what it holds."""
        pages = steps.batch * steps.pages_each
        k_cache, v_cache = layer.spec.allocate(pages, device)
        tensors = {"k_cache": k_cache, "v_cache": v_cache}
        scale_shape = layer.spec.scale_shape(pages)
        if scale_shape is not None:
            tensors |= {name: torch.ones(scale_shape, device=device) for name in ("k_scale", "v_scale")}
        for name, old in layer.tensors.items():
            by_sequence = tensors[name].view(steps.batch, steps.pages_each, *old.shape[1:])
            by_sequence[:, : layer.pages_each] = old.view(steps.batch, layer.pages_each, *old.shape[1:])
        layer.tensors, layer.pages_each = tensors, steps.pages_each
        layer.scales = {name: tensors[name] for name in ("k_scale", "v_scale") if name in tensors}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that passed through a layer, pads included."""
        layer = self._paged.get(layer_idx)
        return layer.length if layer else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the cache grows."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: the cache grows."""
        return -1

    def reset(self) -> None:
        """Forget all sequences and free their pages; counts go on."""
        self._paged.clear()
        self._steps.clear()
        self._page_size, self._handed = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, unless there is nothing to remove."""
        if tokens_to_remove:
            self._refuse("crop", "assisted generation")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: beams would share pages."""
        self._refuse("reorder_cache", "beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: sequences would share pages."""
        self._refuse("batch_repeat_interleave", "contrastive search")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused: pages would move between sequences."""
        self._refuse("batch_select_indices", "contrastive search")

    def _refuse(self, method: str, use: str) -> NoReturn:
        raise ArgumentError("attention", "past_key_values", f"cannot {method}, which {use} asks for", "greedy search and sampling, one beam")

    def __len__(self) -> int:
        return len(self._paged)

    def __repr__(self) -> str:
        return f"PagedCache(backend={self.backend.name!r}, layers={len(self)}, tokens={self.get_seq_length()})"

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer: all keep every token."""
        return [False] * max(1, len(self))

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer: all have keys and values. Never empty, or `generate` would take the cache for a linear one."""
        return [False] * max(1, len(self))

    @property
    def is_dummy(self) -> list[bool]:
        """False for each layer: all have a cache of their own."""
        return [False] * max(1, len(self))

    @property
    def is_compileable(self) -> bool:
        """False: ops are not traced by torch.compile."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether a step was made."""
        return bool(self._paged)

    @property
    def is_croppable(self) -> bool:
        """False: pads are not stored, so their number at the end is not known."""
        return False

    @property
    def batch_size(self) -> int:
        """Sequences held; -1 before the first step."""
        return next((steps.batch for steps in self._steps.values()), -1)


_LAYER_KINDS = ("full_attention", "sliding_attention")


def _check_model(whole: Any, config: Any) -> None:
    def fail(problem: str, accepted: str, fix: str = "") -> ArgumentError:
        return ArgumentError("PagedCache.for_model", "model", problem, accepted, fix)

    implementation = config._attn_implementation
    if implementation != "hal":
        raise fail(
            f"has attention implementation {implementation!r}", "'hal'", "Load it with attn_implementation=hal.integrations.transformers.register()."
        )
    if getattr(whole, "is_encoder_decoder", False):
        raise fail("is an encoder-decoder", "a decoder")
    other = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_KINDS})
    if other:
        raise fail(f"has layers of type {', '.join(other)}", " and ".join(_LAYER_KINDS))
    if getattr(config, "num_kv_shared_layers", 0):
        raise fail("shares KV caches between layers", "a cache of its own for each layer")
