"""Runs of a mixture of experts, and who served them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import hal

#: Ids and mask of a batch.
Batch = tuple[Tensor, Tensor]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the implementations that the dispatcher enters."""
    seen: Counter[str] = Counter()
    with hal.use_backend(hal.backend.build_backend(None, observe=lambda op, name, target: seen.update([op]))):
        yield seen


def logits(model: Any, served: str, batch: Batch) -> Tensor:
    """Logits of a batch in fp32, with experts by `served`; rows of pads are among them."""
    ids, mask = batch
    model.set_experts_implementation(served)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), use_cache=False).logits.float()
