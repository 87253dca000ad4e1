"""The opaque result of `plan_decode`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.errors import ArgumentError
from hal.ops.checks import QUANTISED

__all__ = ["DecodePlan", "PlanFacts"]


@dataclass(frozen=True)
class PlanFacts:
    """What a plan was made for. A call with other facts is refused."""

    device: torch.device
    sequences: int
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

    @classmethod
    def of(
        cls,
        seq_lens: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        page_size: int,
        max_seq_len: int,
        q_len: int = 1,
        cu_seqlens_q: Tensor | None = None,
        window: int | None = None,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> PlanFacts:
        """Return the facts of a `plan_decode` call with these arguments."""
        return cls(
            device=seq_lens.device,
            sequences=seq_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            page_size=page_size,
            max_seq_len=max_seq_len,
            q_len=q_len if cu_seqlens_q is None else None,
            window=window,
            kv_dtype=kv_dtype if kv_dtype in QUANTISED else None,
            batch_invariant=batch_invariant,
        )


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

    def check_maker(self, backend: str) -> None:
        """Raise ArgumentError unless `backend` made this plan: only its maker can refresh one."""
        if self.backend != backend:
            found, accepted = f"was made by backend {self.backend!r}", f"a plan of backend {backend!r}"
            raise ArgumentError("plan_decode", "out", found, accepted, "Leave it out to make a new plan.")

    def __post_init__(self) -> None:
        self.token = _TOKENS.setdefault(self.facts, next(_NUMBERS))
