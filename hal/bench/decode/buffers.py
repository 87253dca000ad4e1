"""Tensors of a case: enough distinct KV caches to exceed the L2 cache several times, filled with random data on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hal.bench.decode.cases import DecodeCase
from hal.bench.fill import DTYPES, fill_random

__all__ = ["K_SCALE", "Q_SCALE", "V_SCALE", "Buffers"]

#: Scales of an e4m3 case: q of the 8-bit peers, K, V.
Q_SCALE, K_SCALE, V_SCALE = 0.02, 0.015, 0.025


@dataclass
class Buffers:
    """Everything that the calls of a case work on.

    Attributes:
        case: the case.
        caches: (sets, 1 or 2, pages, P, Hkv, D); MLA has K alone.
        scales: the same without D, fp32, for int8; else None.
        seq_lens: (B,) int32.
        tables: (B, max_pages) int32, pages of each sequence in random order.
        q: (T, H, D) in the case's dtype.
        q8: q in e4m3 for peers that take it so: q = q8 * Q_SCALE exactly; None unless the caches are e4m3.
        out: (T, H, Dv).
    """

    case: DecodeCase
    caches: Tensor
    scales: Tensor | None
    seq_lens: Tensor
    tables: Tensor
    q: Tensor
    q8: Tensor | None
    out: Tensor

    @classmethod
    def make(cls, case: DecodeCase, sets: int, device: torch.device) -> Buffers:
        """Allocate and fill; pages that a window hides share those of the visible keys."""
        generator = torch.Generator(device).manual_seed(0)
        lens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        tables, pages = _page_tables(case, generator, device)
        halves = 1 if case.mla else 2
        shape = (sets, halves, pages, case.page, case.kv_heads, case.head_dim)
        caches, scales = _random_caches(shape, DTYPES[case.stored], generator, device)
        dtype, tokens = DTYPES[case.dtype], case.batch * case.q_len
        q = torch.randn(tokens, case.heads, case.head_dim, generator=generator, device=device)
        q8 = (q / Q_SCALE).to(torch.float8_e4m3fn) if case.kv_dtype == "e4m3" else None
        q = q.to(dtype) if q8 is None else (q8.float() * Q_SCALE).to(dtype)
        out = torch.empty(tokens, case.heads, case.head_dim_v, dtype=dtype, device=device)
        return cls(case, caches, scales, lens, tables, q, q8, out)

    @property
    def sets(self) -> int:
        """Distinct caches."""
        return self.caches.shape[0]

    def keys(self, index: int) -> Tensor:
        """K cache (pages, P, Hkv, D) of one set."""
        return self.caches[index, 0]

    def values(self, index: int) -> Tensor:
        """V cache (pages, P, Hkv, Dv) of one set."""
        return self.caches[index, 0, ..., : self.case.head_dim_v] if self.case.mla else self.caches[index, 1]

    def key_scale(self, index: int) -> float | Tensor | None:
        """`k_scale` of one set."""
        return self.scales[index, 0] if self.scales is not None else self._fixed[0]

    def value_scale(self, index: int) -> float | Tensor | None:
        """`v_scale` of one set."""
        return self.scales[index, 1] if self.scales is not None else self._fixed[1]

    @property
    def max_seq_len(self) -> int:
        """Declared maximum."""
        return self.tables.shape[1] * self.case.page

    @cached_property
    def _fixed(self) -> tuple[float | None, float | None]:
        return (K_SCALE, V_SCALE) if self.case.kv_dtype == "e4m3" else (None, None)


def _page_tables(case: DecodeCase, generator: torch.Generator, device: torch.device) -> tuple[Tensor, int]:
    """Return tables (B, max_pages) int32 and the number of pages: distinct ones where keys are visible, any elsewhere."""
    lens, visible = (torch.tensor(x, device=device) for x in (case.lengths, case.visible))
    ends = (lens + case.page - 1) // case.page
    starts = (lens - visible).clamp(min=0) // case.page
    pages = int((ends - starts).sum())
    width = max(1, int(ends.max()))
    places = torch.arange(width, device=device)
    seen = (places >= starts[:, None]) & (places < ends[:, None])
    tables = torch.zeros(case.batch, width, dtype=torch.int32, device=device)
    tables[seen] = torch.randperm(pages, generator=generator, device=device).to(torch.int32)
    return tables, pages


def _random_caches(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return caches and, for int8, their scales (per token and head)."""
    caches = fill_random(torch.empty(shape, dtype=dtype, device=device), generator, 1 / K_SCALE if dtype == torch.float8_e4m3fn else 1.0)
    if dtype == torch.int8:
        return caches, torch.rand(shape[:-1], generator=generator, device=device) * 0.02 + 0.005
    return caches, None
