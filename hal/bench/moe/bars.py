"""The bars of routing and of the expert layer, as data."""

from __future__ import annotations

from collections.abc import Mapping

from hal.bench.bars import Bar
from hal.bench.moe.rows import MoeRow

__all__ = ["BARS"]

#: A peer that is that close to the floor need only be equalled.
_NEAR_FLOOR = 0.92
#: (model, T) -> fraction of the rate of a large matrix product.
_COMPUTE_BOUND = {("qwen3-30b-a3b", 8192): 0.62, ("mixtral-8x7b", 4096): 0.80}
#: E of the routers that must be clearly faster than the peers, up to that k; others must not be much slower.
_FAST_ROUTERS, _FAST_K = frozenset({128, 256, 512}), 10


def _experts(row: MoeRow) -> bool:
    return row.case.group == "experts"


def _near(row: MoeRow) -> bool:
    """The best peer is near the floor."""
    return row.best_peer is not None and row.floor_us / row.best_peer[1] >= _NEAR_FLOOR


def _wide(row: MoeRow) -> bool:
    """Shapes of many experts that memory should bound."""
    case = row.experts_case
    return _experts(row) and case is not None and 16 <= case.tokens <= 256 and case.experts >= 128 and case.inter >= 512


def _shape(row: MoeRow) -> tuple[str, int] | None:
    return None if row.experts_case is None else (row.experts_case.model, row.case.tokens)


def _is_fast(row: MoeRow) -> bool:
    return row.case.experts in _FAST_ROUTERS and row.case.top_k <= _FAST_K


def _ratio(row: MoeRow, rows: Mapping[str, MoeRow]) -> float | None:
    return row.against_ratio


def _of_memory(row: MoeRow, rows: Mapping[str, MoeRow]) -> float | None:
    return None if row.us is None else row.memory_us / row.us


def _beyond(row: MoeRow, rows: Mapping[str, MoeRow]) -> float | None:
    return None if row.us is None else row.us - 1.5 * row.floor_us


def _of_matmul(row: MoeRow, rows: Mapping[str, MoeRow]) -> float | None:
    return row.of_matmul


def _scratch(row: MoeRow, rows: Mapping[str, MoeRow]) -> float | None:
    return row.scratch_ratio


#: Every bar of a row. Ratios are times, so less is better; fractions are of the ceilings measured in the same run.
BARS: tuple[Bar[MoeRow], ...] = (
    Bar("time / best peer", 0.95, lambda r: _experts(r) and not _near(r), _ratio),
    Bar("time / best peer, itself near the floor", 1.00, lambda r: _experts(r) and _near(r), _ratio),
    Bar("fraction of the memory floor", 0.90, _wide, _of_memory, least=True),
    Bar("microseconds beyond 1.5 x the floor, one token", 6.0, lambda r: _experts(r) and r.case.tokens == 1, _beyond),
    *(
        Bar("fraction of the matmul rate", least, lambda r, shape=shape: _experts(r) and _shape(r) == shape, _of_matmul, least=True)  # type: ignore[misc]
        for shape, least in _COMPUTE_BOUND.items()
    ),
    Bar("scratch / results of the two products", 1.25, lambda r: _experts(r) and r.scratch_bytes is not None, _scratch),
    Bar("time / best peer, routing", 0.90, lambda r: r.case.group == "routing" and _is_fast(r), _ratio),
    Bar("time / best peer, routing of any shape", 1.10, lambda r: r.case.group == "routing" and not _is_fast(r), _ratio),
)
