"""Kernel tests run on the GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    import triton

    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    assert torch.cuda.is_available(), "kernel tests need a GPU, or TRITON_INTERPRET=1 set before triton is imported"
    return torch.device("cuda", torch.cuda.current_device())
