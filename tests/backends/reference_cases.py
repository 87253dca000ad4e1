"""Cases for attention over a paged cache, and an independent float64 loop that says what is right."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.backends.reference_attention import flash_decode, flash_prefill
from hal.ops.layouts import cache_shapes

#: relative to the largest magnitude of the expected tensor: the contract's table
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: layout -> order of (pages, P, Hkv, D) that gives K and V; the split K is made from HND
ORDER = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "HND_SPLIT": (0, 2, 1, 3), "SPLIT_V0": (0, 2, 3, 1)}


@dataclass
class Case:
    """Random keys of each sequence, and the paged cache that holds them. `k`, `v` are float64 (S, Hkv, D), dequantised."""

    lengths: list[int]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    page: int = 4
    layout: str = "NHD"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    scales: str | None = None
    in_order: bool = False
    spare: int = 2
    seed: int = 0
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        counts = [-(-s // self.page) for s in self.lengths]
        pages = sum(counts) + 3
        ids = torch.arange(pages) if self.in_order else torch.randperm(pages, generator=self.random)
        self.tables = torch.full((len(counts), max(counts, default=0) + self.spare), -1, dtype=torch.int32)
        stored = [self._store(pages, dim) for dim in self.dims]
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.used = torch.zeros(pages, self.page, dtype=torch.bool)
        start = 0
        for b, (count, length) in enumerate(zip(counts, self.lengths, strict=True)):
            mine = ids[start : start + count]
            start += count
            self.tables[b, :count] = mine.int()
            self.used[mine] = (torch.arange(count * self.page) < length).view(count, self.page)
            for (values, scale), dense in zip(stored, (self.k, self.v), strict=True):
                dense.append((values.double() * scale)[mine].flatten(0, 1)[:length])
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        (k, ks), (v, vs) = stored
        self.k_cache, self.v_cache = self._lay_out(k, True), self._lay_out(v, False)
        if self.scales:
            self.args |= {"k_scale": self._lay_out_scale(ks), "v_scale": self._lay_out_scale(vs)}

    def _store(self, pages: int, dim: int) -> tuple[Tensor, Tensor]:
        shape = (pages, self.page, self.heads[1])
        values = torch.randn(*shape, dim, generator=self.random)
        kv_dtype = self.kv_dtype or self.dtype
        values = (values * 20).to(kv_dtype) if kv_dtype == torch.int8 else values.to(kv_dtype)
        size = {"scalar": (1, 1, 1), "float": (1, 1, 1), "head": (1, 1, self.heads[1]), "token": shape}.get(self.scales or "", (1, 1, 1))
        scale = torch.rand(size, generator=self.random) * 0.1 + 0.02 if self.scales else torch.ones(size)
        return values, scale[..., None]

    def _lay_out(self, values: Tensor, is_k: bool) -> Tensor:
        itemsize = values.element_size()
        shapes = cache_shapes(self.layout, values.shape[0], self.page, values.shape[2], values.shape[3], values.shape[3], itemsize)
        if is_k and self.layout in ("HND_SPLIT", "SPLIT_V0"):
            pages, heads, parts, page, x = shapes[0]
            return values.view(pages, page, heads, parts, x).permute(0, 2, 3, 1, 4).contiguous()
        return values.permute(ORDER[self.layout]).contiguous()

    def _lay_out_scale(self, scale: Tensor) -> float | Tensor:
        if self.scales == "float":
            return float(scale)
        if self.scales != "token":
            return scale.flatten()
        return scale[..., 0] if self.layout == "NHD" else scale[..., 0].permute(0, 2, 1)

    def poison(self) -> Case:
        """Fill all that no sequence owns: slots with NaN (int8: extremes), scales with NaN, table padding with a huge id."""
        for cache, is_k in ((self.k_cache, True), (self.v_cache, False)):
            slot_first = {"NHD": (0, 1), "HND": (0, 2)}.get(self.layout, (0, 3) if is_k or self.layout == "SPLIT_V0" else (0, 2))
            view = cache.movedim(slot_first, (0, 1))
            fill = torch.tensor(-128 if cache.dtype == torch.int8 else math.nan).to(cache.dtype)
            bytes_view, byte = (view.view(torch.uint8), fill.view(torch.uint8)) if cache.element_size() == 1 else (view, fill)
            bytes_view[~self.used] = byte
        for name in ("k_scale", "v_scale"):
            scale = self.args.get(name)
            if isinstance(scale, Tensor) and scale.dim() == 3:
                (scale if self.layout == "NHD" else scale.permute(0, 2, 1))[~self.used] = math.nan
        self.tables[self.tables == -1] = 2**30
        return self

    def query(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.heads[0], self.dims[0], generator=self.random).to(self.dtype)

    def decode(self, q: Tensor, **kwargs: Any) -> Any:
        return flash_decode(q, self.k_cache, self.v_cache, self.seq_lens, self.tables, kv_layout=self.layout, **self.args, **kwargs)

    def prefill(self, q: Tensor, counts: list[int], **kwargs: Any) -> Any:
        kwargs |= {"seq_lens": self.seq_lens, "block_tables": self.tables, "kv_layout": self.layout, "max_q_len": max(counts)}
        return flash_prefill(q, self.k_cache, self.v_cache, cu_seqlens_q=offsets(counts), **self.args, **kwargs)


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def naive(
    q: Tensor, k: list[Tensor], v: list[Tensor], counts: list[int], *, causal: bool = True, scale: float | None = None, softcap: float = 0.0,
    window: int | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention in float64, one row, head and key at a time as the contract words it."""
    out = torch.zeros(q.shape[0], q.shape[1], v[0].shape[2] if v else 0, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    start = 0
    for keys, values, n in zip(k, v, counts, strict=True):
        length, group = keys.shape[0], q.shape[1] // keys.shape[1]
        tree = None if tree_mask is None else tree_mask[start : start + n, :n]
        depth = list(range(n)) if tree is None else [max(0, int(tree[i].sum()) - 1) for i in range(n)]
        for i, h in itertools.product(range(n), range(q.shape[1])):
            position, scores, seen = length - n + depth[i], [], []
            for j in range(length):
                draft = j - (length - n)
                key_position = j if draft < 0 or tree is None else length - n + depth[draft]
                hidden = causal and (j > position if tree is None else draft >= 0 and not tree[i, draft])
                if hidden or (window is not None and position - key_position >= window):
                    continue
                score = float(q[start + i, h].double() @ keys[j, h // group]) * (q.shape[2] ** -0.5 if scale is None else scale)
                score = softcap * math.tanh(score / softcap) if softcap else score
                if alibi_slopes is not None:
                    score -= float(alibi_slopes[h]) * (position - key_position if causal else abs(position - key_position))
                scores.append(score)
                seen.append(j)
            if not seen:
                continue
            every = torch.tensor(scores + ([] if sinks is None else [float(sinks[h])]), dtype=torch.float64)
            lse[start + i, h] = every.logsumexp(0)
            out[start + i, h] = (every - lse[start + i, h]).exp()[: len(seen)] @ values[seen, h // group]
        start += n
    return out, lse


def check(got: tuple[Tensor, Tensor] | Tensor, want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Compare out, or (out, lse), with the exact ones; empty rows must be exactly 0 and -inf."""
    empty = want[1] == -math.inf
    for ours, exact in zip((got,) if isinstance(got, Tensor) else got, want, strict=False):
        assert torch.equal(ours[empty].double(), exact[empty])
        if not empty.all():
            scale = max(1.0, float(exact[~empty].abs().max())) if exact.dim() == 2 else float(exact[~empty].abs().max())
            assert (ours[~empty].double() - exact[~empty]).abs().max() <= TOLERANCE[dtype] * scale


def tree_of(parents: list[int], columns: int) -> Tensor:
    """Mask of a tree, each token seeing its ancestors and itself; other columns hold True, which nobody may read."""
    mask = torch.zeros(len(parents), columns, dtype=torch.bool)
    mask[:, len(parents) :] = True
    for i, parent in enumerate(parents):
        mask[i, i] = True
        if parent >= 0:
            mask[i, : len(parents)] |= mask[parent, : len(parents)]
    return mask
