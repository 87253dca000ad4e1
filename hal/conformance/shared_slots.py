"""Calls of `write_kv` in which many rows name few slots, and the check that each slot holds one of its rows whole.

Every row is a constant of its own (with scales per token: its largest element, then a constant), so that a mixture of two
shows in any element. A row is the same in every head; V's rows are K's in the opposite order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.conformance import oracle
from hal.conformance.caches import CachePair, make_caches, poison_value
from hal.conformance.compare import assert_same_bits
from hal.ops.layouts import CacheFacts, token_scale_shape

__all__ = ["KINDS", "SharedSlots"]

#: kind of cache -> dtype of new rows. int8 has a scale per tensor, int8-token one per token and head.
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16, "int8-token": torch.float32}

_PAGES, _PAGE, _HEADS, _DIM = 4, 8, 8, 256
#: What rows name: six slots, the first and the last of the caches among them, and two that are skipped.
_POOL = (0, 31, 5, 13, 21, 22, -1, 32)
#: First bit pattern of the constants: normal numbers, thousands of them, in every dtype of that size.
_FIRST = {2: 0x0400, 4: 0x3F800000}


def _rows(kind: str, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """New rows (count, D), what a cache holds of each, and the scale (count,) stored beside it."""
    number = torch.arange(count, dtype=torch.int32)
    dtype = KINDS[kind]
    if kind == "int8":
        codes = (number % 251 - 125).view(-1, 1).expand(-1, _DIM)
        return codes.to(dtype), codes.to(torch.int8), None
    if kind == "int8-token":
        codes = (number % 126 + 1).view(-1, 1).repeat(1, _DIM)
        codes[:, 0] = 127
        scales = (number + 1).double() / 127
        return (codes * scales[:, None]).to(dtype), codes.to(torch.int8), scales
    bits = (number + _FIRST[dtype.itemsize]).to(torch.int16 if dtype.itemsize == 2 else torch.int32)
    rows = bits.view(dtype).view(-1, 1).expand(-1, _DIM)
    return rows, rows, None


@dataclass(frozen=True)
class SharedSlots:
    """A call and what its caches may hold afterwards.

    Attributes:
        args: of `write_kv`.
        pair: its caches.
        held: K's and V's rows as the caches hold them, (N, D).
        scales: the scales of those, (N,), and the buffers that they are stored in; empty without scales per token.
    """

    args: dict[str, Any]
    pair: CachePair
    held: tuple[Tensor, Tensor]
    scales: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def build(cls, kind: str, count: int, layout: str, index: torch.dtype, device: torch.device) -> SharedSlots:
        """Build a call of `count` rows, whose slots are all skipped until `name_slots` chooses some."""
        rows, held, scales = _rows(kind, count)
        pair = make_caches(layout, _PAGES, _PAGE, _HEADS, (_DIM, _DIM), held.dtype, device, "compact", 0.0)
        both, pairs = (held.to(device), held.flip(0).to(device)), []
        args: dict[str, Any] = {"k_cache": pair.k, "v_cache": pair.v, "kv_layout": layout}
        args["slot_mapping"] = torch.full((count,), -1, dtype=index, device=device)
        for name, new in (("key", rows), ("value", rows.flip(0))):
            args[name] = new[:, None].expand(-1, _HEADS, -1).contiguous().to(device)
        if scales is not None:
            shape = token_scale_shape(layout, CacheFacts(_PAGES, _PAGE, _HEADS, _DIM, _DIM, 0))
            pairs = [(wanted.to(device), torch.empty(shape, device=device)) for wanted in (scales, scales.flip(0))]
            args |= {"k_scale": pairs[0][1], "v_scale": pairs[1][1]}
        elif kind == "int8":
            args |= {"k_scale": torch.ones((), device=device), "v_scale": 1.0}
        return cls(args, pair, both, tuple(pairs))

    def name_slots(self, generator: torch.Generator) -> None:
        """Let each row name a slot of the pool at random, and blank the caches."""
        mapping = self.args["slot_mapping"]
        mapping.copy_(torch.tensor(_POOL)[torch.randint(len(_POOL), mapping.shape, generator=generator)])
        self.blank()

    def blank(self) -> None:
        """Fill caches and scales with what no row holds."""
        for buffer in self.pair.buffers:
            buffer.fill_(poison_value(buffer.dtype))
        for _, stored in self.scales:
            stored.fill_(math.nan)

    def check(self) -> None:
        """Compare each head of each slot with the rows that name it, and everything else with the blank; all is blank then."""
        layout = self.args["kv_layout"]
        for place, (which, cache) in enumerate((("k", self.pair.k), ("v", self.pair.v))):
            for slot in (s for s in _POOL if 0 <= s < _PAGES * _PAGE):
                named = (self.args["slot_mapping"] == slot).nonzero().flatten()
                if not named.shape[0]:
                    continue
                view = oracle.write_view(cache, layout, which, slot // _PAGE, slot % _PAGE)
                same = (view.reshape(_HEADS, 1, _DIM) == self.held[place][named]).all(-1)
                if self.scales:
                    wanted, stored = self.scales[place]
                    scale = stored[slot // _PAGE, slot % _PAGE] if layout == "NHD" else stored[slot // _PAGE, :, slot % _PAGE]
                    same &= (scale[:, None] - wanted[named]).abs() <= 1e-6 * wanted[named]
                    scale.fill_(math.nan)
                whole = same.any(-1)
                assert bool(whole.all()), f"{which} slot {slot}: heads {(~whole).nonzero().flatten().tolist()} hold none of its rows whole"
                view.fill_(poison_value(cache.dtype))
        for buffer in self.pair.buffers:
            assert_same_bits("caches outside the named slots", buffer, torch.full_like(buffer, poison_value(buffer.dtype)))
        assert all(bool(stored.isnan().all()) for _, stored in self.scales), "scales outside the named slots changed"
