"""B50: what is compiled on a GPU does not depend on batch size, lengths or table width."""

from __future__ import annotations

import importlib
import pkgutil
import random
from typing import Any

import pytest
import torch


def compiled() -> dict[str, int]:
    """Compiled variants of every kernel so far."""
    from triton.runtime.jit import JITFunction

    import hal.kernels

    found: dict[str, int] = {}
    for module in pkgutil.iter_modules(hal.kernels.__path__):
        for name, kernel in vars(importlib.import_module(f"hal.kernels.{module.name}")).items():
            if isinstance(kernel, JITFunction):
                found[name] = sum(len(caches[0]) for caches in kernel.device_caches.values())
    return found


@pytest.mark.parametrize("features", [{}, {"window": 100}, {"batch_invariant": True}, {"q_len": 3}], ids=str)
def test_sweep_compiles_nothing_after_warm_up(device: torch.device, features: dict[str, Any]) -> None:
    if device.type != "cuda":
        pytest.skip("nothing is compiled under the interpreter; test_launch_rules counts on a CPU")
    from hal.backends.triton_ops import flash_decode, plan_decode

    rng = random.Random(0)
    k, v = (torch.randn(300, 16, 2, 64, device=device).bfloat16() for _ in range(2))
    facts = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, **features}

    def call(sequences: int, columns: int) -> None:
        lengths = torch.tensor([rng.randint(0, 16 * columns) for _ in range(sequences)], dtype=torch.int32, device=device)
        table = torch.randint(300, (sequences, columns), dtype=torch.int32, device=device)
        q = torch.randn(sequences * features.get("q_len", 1), 8, 64, device=device).bfloat16()
        flash_decode(q, k, v, lengths, table, **features)
        flash_decode(q, k, v, lengths, table, **features, plan=plan_decode(lengths, max_seq_len=16 * columns, **facts))

    for sequences in (1, 2, 16):
        for columns in (1, 2, 16, 300):
            call(sequences, columns)
    before = compiled()
    assert sum(before.values()) > 0
    for sequences in range(1, 34):
        for columns in (1, 300, rng.randint(2, 299), rng.randint(2, 299)):
            call(sequences, columns)
    torch.cuda.synchronize(device)
    assert compiled() == before
