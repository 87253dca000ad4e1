"""The opaque result of `plan_decode`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["DecodePlan", "PlanFacts"]


@dataclass(frozen=True)
class PlanFacts:
    """What a plan was made for. A call with other facts is refused; B is the number of sequences."""

    device: torch.device
    B: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    max_seq_len: int
    q_len: int | None  #: None with `cu_seqlens_q`
    window: int | None
    kv_dtype: torch.dtype | None  #: None for an unquantised cache
    batch_invariant: bool


_TOKENS: dict[PlanFacts, int] = {}
_NUMBERS = itertools.count()  # drawn even where not used, so that no two threads give one number to different facts


@dataclass(eq=False)
class DecodePlan:
    """A partition of one decode step.

    Attributes:
        facts: what it was made for.
        backend: the backend that made it; others ignore it.
        data: that backend's own, usually tensors on the device.
    """

    facts: PlanFacts
    backend: str
    data: Any = field(default=None, repr=False)
    #: Stands for `facts` in call signatures: equal facts, equal token, and an int hashes at once.
    token: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.token = _TOKENS.setdefault(self.facts, next(_NUMBERS))
