"""Fixtures of the tests against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import build


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def tiny(device: torch.device) -> Callable[..., Any]:
    return lambda name, dtype=torch.float32: build(name, device, dtype)


@pytest.fixture(scope="session")
def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of eight random prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 2, 5, 8, 13, 17, 31, 40)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = torch.randint(2, 97, (length,), generator=generator)
    return ids.to(device), (ids != 0).long().to(device)
