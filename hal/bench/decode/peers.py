"""Other implementations to compare with, from a Python file that the user gives.

The file may define any of these. Each returns callables that compute one step, can be captured in a CUDA graph, and are
named; layout NHD, int32 lengths and tables, `out` to be written:

    decode(q, k_cache, v_cache, seq_lens, block_tables, out) -> {name: callable}                  q, out (B, H, D)
    attend(q, k_cache, v_cache, cu_seqlens_q, seq_lens, block_tables, out) -> {name: callable}    q, out (T, H, D), causal
    mla(q, kv_cache, seq_lens, block_tables, scale) -> callable or {name: callable}
        q (B, q_len, H, 576), kv_cache (pages, 64, 1, 576); the callable returns out (B, q_len, H, 512), or a tuple that starts with it
    fp8(q8, k8, v8, seq_lens, block_tables, out, q_scale, k_scale, v_scale) -> {name: callable}
        q8 (B, H, D) and caches in e4m3, x = x8 * scale, scales as float; out (B, H, D) in bf16
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hal.bench.decode.buffers import K_SCALE, Q_SCALE, V_SCALE, Buffers
from hal.bench.peers import PeersFile

__all__ = ["FUNCTIONS", "Peers", "load_peers"]

FUNCTIONS = ("decode", "attend", "mla", "fp8")
#: What a function's single callable is called.
_SINGLE = {"mla": "flashmla"}

#: name -> what computes one step
Callables = Mapping[str, Callable[[], Any]]


class Peers(PeersFile):
    """The functions of a peers file, bound to buffers."""

    def bind(self, function: str, buffers: Buffers, index: int) -> Callables:
        """Return the callables of `function` on set `index` of the buffers."""
        found = self.functions[function](*_ARGUMENTS[function](buffers, index))
        if callable(found):
            return {_SINGLE.get(function, function): found}
        if not isinstance(found, Mapping) or not all(callable(call) for call in found.values()):
            raise TypeError(f"{function} of {self.path.name} must return {{name: callable}}, not {type(found).__name__}")
        return found


def load_peers(path: Path) -> Peers:
    """Import a peers file; raises HalError if it cannot be used."""
    return Peers(path, FUNCTIONS, "the module text of hal/bench/decode/peers.py")


def _decode(b: Buffers, index: int) -> tuple[Any, ...]:
    return b.q, b.keys(index), b.values(index), b.seq_lens, b.tables, b.out


def _attend(b: Buffers, index: int) -> tuple[Any, ...]:
    starts = torch.arange(0, b.q.shape[0] + 1, b.case.q_len, dtype=torch.int32, device=b.q.device)
    return b.q, b.keys(index), b.values(index), starts, b.seq_lens, b.tables, b.out


def _mla(b: Buffers, index: int) -> tuple[Any, ...]:
    q = b.q.view(b.case.batch, b.case.q_len, *b.q.shape[1:])
    return q, b.keys(index), b.seq_lens, b.tables, b.case.head_dim**-0.5


def _fp8(b: Buffers, index: int) -> tuple[Any, ...]:
    return b.q8, b.keys(index), b.values(index), b.seq_lens, b.tables, b.out, Q_SCALE, K_SCALE, V_SCALE


#: function of a peers file -> its arguments, in order, for a set of buffers
_ARGUMENTS: dict[str, Callable[[Buffers, int], tuple[Any, ...]]] = {"decode": _decode, "attend": _attend, "mla": _mla, "fp8": _fp8}
