# mypy: allow-untyped-defs
"""What the ids of a call mean, on the host (`Routing`) and inside kernels (`local_expert`)."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["ROUTED", "VARYING", "Routing", "local_expert"]

#: Arguments of `local_expert` that change from call to call: no variant of a kernel may depend on their value.
ROUTED = ["slots", "top_k", "stride_it", "num_experts", "start", "local"]
#: Those, and the numbers of an activation.
VARYING = ["alpha", "limit", *ROUTED]


@dataclass(frozen=True)
class Routing:
    """What ids mean.

    Attributes:
        ids: (T, k) int32, last dimension contiguous.
        num_experts: experts that the ids speak of.
        start: id of the first local expert, without a map.
        local: E, experts held here.
        expert_map: (num_experts,) int32 id -> local expert or -1, or None.
        num_valid_tokens: int32 of one element, or None for all: later tokens are padding.
    """

    ids: Tensor
    num_experts: int
    start: int
    local: int
    expert_map: Tensor | None = None
    num_valid_tokens: Tensor | None = None

    @classmethod
    def of(
        cls,
        ids: Tensor,
        num_experts: int,
        *,
        local: int | None = None,
        expert_range: tuple[int, int] | None = None,
        expert_map: Tensor | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Routing:
        """From the arguments of the ops; `local` is needed with a map."""
        start, end = expert_range or (0, num_experts)
        held = end - start if expert_map is None else num_experts if local is None else local
        return cls(ids, num_experts, start, held, expert_map, num_valid_tokens)

    @property
    def slots(self) -> int:
        """T * k."""
        return self.ids.shape[0] * self.ids.shape[1]

    def arguments(self) -> tuple[object, ...]:
        """What `local_expert` is given after the slots; without a stride where rows lie side by side."""
        tokens, top_k = self.ids.shape
        stride = None if self.ids.is_contiguous() else self.ids.stride(0)
        return (
            self.ids, self.expert_map, self.num_valid_tokens, tokens * top_k, top_k, stride, self.num_experts, self.start, self.local,
        )  # fmt: skip


@triton.jit
def local_expert(slot, ids_ptr, map_ptr, valid_ptr, slots, top_k, stride_it, num_experts, start, local):
    """Local expert of each slot; `local` for slots that are skipped or beyond the last.

    Only a row stride costs a division per slot. Loads go past L1, so that a kernel may call this before it waits for the one before it.
    """
    ok = slot < slots
    if valid_ptr is not None:
        # Clamped before the product, which would otherwise wrap for garbage.
        valid = tl.maximum(tl.minimum(tl.load(valid_ptr, cache_modifier=".cg"), slots // top_k), 0)
        ok = ok & (slot < valid * top_k)
    place = slot if stride_it is None else (slot // top_k).to(tl.int64) * stride_it + slot % top_k
    expert = tl.load(ids_ptr + place, mask=ok, other=-1, cache_modifier=".cg")
    ok = ok & (expert >= 0) & (expert < num_experts)
    expert = tl.where(ok, expert, 0) - start if map_ptr is None else tl.load(map_ptr + expert, mask=ok, other=-1, cache_modifier=".cg")
    ok = ok & (expert >= 0) & (expert < local)
    return tl.where(ok, expert, local)
