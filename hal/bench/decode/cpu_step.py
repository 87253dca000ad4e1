"""One decode step of one attention layer on the CPU, beside transformers' own.

    ours:          backend.write_kv(new key and value), backend.flash_decode(...)
    transformers:  DynamicCache.update(new key and value), sdpa_attention_forward(...)

Both start from the same random keys, append the same tokens and must give the same attention. A round is a few steps in
a row, as in decoding, so the cache grows by one token a step; rounds alternate, and so does who goes first. Facts that a
model computes once a step for all its layers (slots, lengths) are not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hal.errors import HalError

__all__ = ["CPU_CASES", "SCHEMA", "CpuCase", "CpuRow", "line", "markdown", "measure_cpu_step", "need_transformers"]

SCHEMA = "hal.bench.decode.cpu/1"

#: Steps in a row, and the seconds and rounds of one side of a case.
_STEPS, _SECONDS, _LEAST_ROUNDS, _MOST_ROUNDS = 8, 3.0, 7, 201
_TOLERANCE = 2e-5  # fp32, relative to the largest magnitude


@dataclass(frozen=True)
class CpuCase:
    """One decode step: sequences, query and kv heads, head dim, keys of each sequence before the step."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.heads}/{self.kv_heads} D{self.head_dim} B{self.batch} ctx {self.context}"


#: SmolLM2-135M's and Llama-3-8B's attention.
CPU_CASES = tuple(CpuCase(batch, *heads, 2048) for heads in ((9, 3, 64), (32, 8, 128)) for batch in (1, 4, 16))


@dataclass(frozen=True)
class CpuRow:
    """Median and least microseconds of a step; `worst` is the largest difference between both results, relative to the largest value."""

    case: CpuCase
    ours_us: float
    transformers_us: float
    ours_least_us: float
    transformers_least_us: float
    rounds: int
    worst: float

    @property
    def ratio(self) -> float:
        """Ours over transformers': below 1 is faster."""
        return self.ours_us / self.transformers_us

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "case": self.case.name, "shape": asdict(self.case), "ratio": self.ratio}


@dataclass(frozen=True)
class _Tokens:
    """The tokens of one step: q (B, H, 1, D), key and value (B, Hkv, 1, D)."""

    q: Tensor
    key: Tensor
    value: Tensor


@dataclass
class _Data:
    """Keys and values before the first step, (B, Hkv, context, D), and the tokens of each step."""

    keys: Tensor
    values: Tensor
    steps: list[_Tokens]

    @classmethod
    def random(cls, case: CpuCase, steps: int) -> _Data:
        """Made as a model makes them: a token's heads beside each other in memory."""
        generator = torch.Generator().manual_seed(0)

        def made(tokens: int, heads: int) -> Tensor:
            return torch.randn(case.batch, tokens, heads, case.head_dim, generator=generator).transpose(1, 2)

        keys, values = (made(case.context, case.kv_heads).contiguous() for _ in range(2))
        return cls(keys, values, [_Tokens(made(1, case.heads), made(1, case.kv_heads), made(1, case.kv_heads)) for _ in range(steps)])


#: Starts from the context and returns a function that does one step and returns its attention (B, H, D).
_Side = Callable[[], Callable[[int], Tensor]]


def measure_cpu_step(backend: Any, case: CpuCase, *, seconds: float = _SECONDS) -> CpuRow:
    """Measure one case.

    Args:
        backend: whose `write_kv` and `flash_decode` are timed.
        case: the step.
        seconds: to spend on each side, at most about that and at least 7 rounds.

    Raises:
        HalError: transformers is not installed, or the two results differ.
    """
    with torch.no_grad():
        data = _Data.random(case, _STEPS)
        sides: dict[str, _Side] = {"ours": _ours(backend, case, data), "transformers": _theirs(case, data)}
        worst = _compare(case, sides)
        slower = max(statistics.median(_round(side)) for side in sides.values())
        rounds = int(seconds / (slower * _STEPS))
        rounds = min(max(rounds, _LEAST_ROUNDS), _MOST_ROUNDS)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(rounds):
            for name in sides if index % 2 == 0 else reversed(sides):
                times[name] += _round(sides[name])
    ours, theirs = ([second * 1e6 for second in times[name]] for name in sides)
    return CpuRow(case, statistics.median(ours), statistics.median(theirs), min(ours), min(theirs), rounds, worst)


def _round(side: _Side) -> list[float]:
    """Seconds of each step of one round."""
    step, times = side(), []
    for index in range(_STEPS):
        start = time.perf_counter()
        step(index)
        times.append(time.perf_counter() - start)
    return times


def _compare(case: CpuCase, sides: dict[str, _Side]) -> float:
    ours, theirs = (side() for side in sides.values())
    worst = 0.0
    for index in range(_STEPS):
        a, b = ours(index), theirs(index)
        worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    if not worst <= _TOLERANCE:
        raise HalError(
            f"bench decode, {case.name}: our attention differs from transformers' by {worst:.1e} of its largest value; {_TOLERANCE} is accepted"
        )
    return worst


def _ours(backend: Any, case: CpuCase, data: _Data) -> _Side:
    """A paged cache, each sequence on consecutive pages."""
    spec = backend.kv_cache_spec(case.kv_heads, case.head_dim, data.keys.dtype, device="cpu")
    each = -(-(case.context + _STEPS) // spec.page_size)
    k_cache, v_cache = spec.allocate(case.batch * each, "cpu")
    tables = torch.arange(case.batch * each, dtype=torch.int32).view(case.batch, each)
    first = torch.arange(case.batch) * (each * spec.page_size)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        backend.write_kv(keys, values, k_cache, v_cache, slots, kv_layout=spec.layout)

    prompt = (first[:, None] + torch.arange(case.context)).flatten()
    write(data.keys.transpose(1, 2).flatten(0, 1), data.values.transpose(1, 2).flatten(0, 1), prompt)
    slots = [first + case.context + i for i in range(_STEPS)]
    lengths = [torch.full((case.batch,), case.context + i + 1, dtype=torch.int32) for i in range(_STEPS)]

    def step(index: int) -> Tensor:
        tokens = data.steps[index]
        write(tokens.key.squeeze(2), tokens.value.squeeze(2), slots[index])
        out: Tensor = backend.flash_decode(tokens.q.squeeze(2), k_cache, v_cache, lengths[index], tables, kv_layout=spec.layout)
        return out

    return lambda: step  # steps write to the same slots each round


def _theirs(case: CpuCase, data: _Data) -> _Side:
    cache_class, attention = need_transformers()
    layer = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads, is_causal=True, training=False)
    scale = case.head_dim**-0.5

    def start() -> Callable[[int], Tensor]:
        cache = cache_class()
        cache.update(data.keys, data.values, 0)

        def step(index: int) -> Tensor:
            tokens = data.steps[index]
            keys, values = cache.update(tokens.key, tokens.value, 0)
            out: Tensor = attention(layer, tokens.q, keys, values, None, scaling=scale)[0]
            return out.squeeze(1)

        return step

    return start


def need_transformers() -> tuple[Any, Any]:
    """Return `DynamicCache` and `sdpa_attention_forward`."""
    try:
        from transformers.cache_utils import DynamicCache
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError as error:
        raise HalError(
            f"bench decode --device cpu compares with transformers, which this Python cannot import ({error}); "
            "install it with: pip install 'hal-kernels[transformers]'"
        ) from error
    return DynamicCache, sdpa_attention_forward


def line(row: CpuRow) -> str:
    """One line for a row as it comes."""
    ours, theirs = (
        f"{row.ours_us:9.1f} us (least {row.ours_least_us:9.1f})",
        f"{row.transformers_us:9.1f} us (least {row.transformers_least_us:9.1f})",
    )
    return f"{row.case.name:28} ours {ours}  transformers {theirs}  ratio {row.ratio:.3f}  {row.rounds} rounds"


def markdown(rows: Sequence[CpuRow]) -> str:
    """Return the rows as a Markdown table."""
    head = "| case (query/kv heads, fp32) | ours us | transformers us | ours / transformers |\n|---|---:|---:|---:|\n"
    return head + "".join(f"| {row.case.name} | {row.ours_us:.0f} | {row.transformers_us:.0f} | {row.ratio:.3f} |\n" for row in rows)
