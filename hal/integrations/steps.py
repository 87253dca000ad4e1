"""The index tensors of one forward pass, prepared once and shared by all layers on a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.errors import ArgumentError

__all__ = ["Packing", "Step", "Steps", "pack"]


@dataclass(frozen=True)
class Packing:
    """How the rows of a padded batch (B * n) are reordered into blocks of real tokens, pads last.

    Attributes:
        cu_seqlens: (B+1,) int32 offsets of the blocks.
        order: (B * n,) which row of the batch stands at each place; None if there are no pads.
        inverse: (B * n,) the place of each row of the batch; None if there are no pads.
        left_padded: pads stand in front only.
    """

    cu_seqlens: Tensor
    order: Tensor | None = None
    inverse: Tensor | None = None
    left_padded: bool = True

    def gather(self, rows: Tensor) -> Tensor:
        """Bring (B * n, ...) rows into packed order."""
        return rows if self.order is None else rows.index_select(0, self.order)

    def scatter(self, rows: Tensor) -> Tensor:
        """Bring packed rows back into the order of the batch."""
        return rows if self.inverse is None else rows.index_select(0, self.inverse)


def pack(batch: int, tokens: int, device: torch.device, real: Tensor | None) -> Packing:
    """Return the packing of a batch.

    Args:
        batch: B.
        tokens: n.
        device: where.
        real: (B, n) bool, True for real tokens; None if all are. Its values are read, which waits for the device.
    """
    if real is None or bool(real.all()):
        return Packing(torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device))
    cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(real.sum(1), 0, dtype=torch.int32, out=cu_seqlens[1:])
    order = torch.argsort(real.flatten().logical_not().to(torch.uint8), stable=True)
    left_padded = not bool((real[:, :-1] & ~real[:, 1:]).any())
    return Packing(cu_seqlens, order, torch.argsort(order), left_padded)


@dataclass(frozen=True)
class Step:
    """What the ops of one forward pass need.

    Attributes:
        slots: (B * n,) int64, where each new token goes, -1 for pads.
        seq_lens: (B,) int32, real tokens of each sequence, the new ones included.
        block_tables: (B, pages_each) int32.
        packing: None for a step of one token each, which needs none.
        left_padded: no pads but in front of a sequence so far: windows over positions and over real tokens agree.
    """

    slots: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    packing: Packing | None
    left_padded: bool


@dataclass
class Steps:
    """Where the tokens of a batch of sequences lie on one device, step after step.

    Args:
        batch: B.
        device: where the index tensors live.
        page_size: P.
        room: tokens of a sequence to make room for at first.

    Attributes:
        length: tokens so far, pads included: an upper bound of the sequences' lengths that the host knows.
        pages_each: pages of each sequence.
        plans: plans by their facts, with the length they were made at; dropped when the pages move.
        step: the step under way.
    """

    batch: int
    device: torch.device
    page_size: int
    room: int
    length: int = 0
    pages_each: int = 0
    plans: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    step: Step = field(init=False)
    _padded: bool = False
    _left_padded: bool = True

    def __post_init__(self) -> None:
        self._seq_lens = torch.zeros(self.batch, dtype=torch.int32, device=self.device)

    def advance(self, tokens: int, mask: Tensor | None) -> None:
        """Begin the next step.

        Args:
            tokens: n, new tokens of each sequence.
            mask: (B, length + n) bool, True for real tokens; None if all are.

        Raises:
            ArgumentError: the mask does not cover all tokens, or contradicts that of earlier steps.
        """
        if mask is None and self._padded:
            accepted = "a mask that covers the padded tokens stored before"
            raise ArgumentError("attention", "attention_mask", "is missing", accepted, "Pass it at every step.")
        if mask is not None and mask.shape != (self.batch, self.length + tokens):
            wanted = (self.batch, self.length + tokens)
            raise ArgumentError("attention", "attention_mask", f"has shape {tuple(mask.shape)}", f"(B, tokens so far) = {wanted}")
        if self.length + tokens > self.pages_each * self.page_size:
            self._grow(self.length + tokens)
        self._padded = self._padded or mask is not None
        new = None if mask is None else mask[:, self.length :]
        self.step = self._single(new) if tokens == 1 and self.length else self._block(tokens, new, mask)
        self.length += tokens

    def _grow(self, needed: int) -> None:
        room = max(self.room, needed, 2 * self.pages_each * self.page_size if self.pages_each else 0)
        self.pages_each = -(-room // self.page_size)
        pages = torch.arange(self.batch * self.pages_each, dtype=torch.int32, device=self.device)
        self._block_tables = pages.view(self.batch, self.pages_each)
        self._first_slots = torch.arange(self.batch, device=self.device) * (self.pages_each * self.page_size)
        self.plans.clear()

    def _single(self, new: Tensor | None) -> Step:
        """One token each: nothing is packed and nothing read back from the device."""
        slots = self._first_slots + self._seq_lens
        if new is None:
            self._seq_lens += 1
        else:
            slots = torch.where(new[:, 0], slots, -1)
            self._seq_lens += new[:, 0]
        return Step(slots, self._seq_lens, self._block_tables, None, self._left_padded)

    def _block(self, tokens: int, new: Tensor | None, mask: Tensor | None) -> Step:
        if mask is not None and self.length and not torch.equal(mask[:, : self.length].sum(1, dtype=torch.int32), self._seq_lens):
            raise ArgumentError("attention", "attention_mask", "differs from earlier steps", "the mask of earlier tokens as it was")
        packing = pack(self.batch, tokens, self.device, new)
        if packing.order is None:
            new = None
        self._left_padded = self._left_padded and packing.left_padded and (packing.order is None or self.length == 0)
        if new is None:
            slots = (self._first_slots + self._seq_lens)[:, None] + torch.arange(tokens, device=self.device)
            self._seq_lens += tokens
        else:
            offsets = new.cumsum(1) - 1
            slots = torch.where(new, (self._first_slots + self._seq_lens)[:, None] + offsets, -1)
            self._seq_lens += new.sum(1, dtype=torch.int32)
        return Step(slots.flatten(), self._seq_lens, self._block_tables, packing, self._left_padded)
