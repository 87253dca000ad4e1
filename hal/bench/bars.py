"""The bars that rows are held to, as data, and how a row is judged.

A bar that cannot be judged (a peer that did not run, a base row that was left out) is `unjudged`: neither met nor missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hal.bench.host import HostRow, Scratch
from hal.bench.rows import Row

__all__ = ["BARS", "Bar", "Judgement", "geometric_mean", "judge"]

MB, GB = 10**6, 10**9


@dataclass(frozen=True)
class Bar:
    """A limit on one number of a row.

    Attributes:
        what: the number, in words.
        limit: the most (or, with `least`, the least) that meets the bar.
        applies: to which rows.
        value: the number, from a row and all rows of its group by name; None if it cannot be told.
        least: the limit is a lower one.
    """

    what: str
    limit: float
    applies: Callable[[Row], bool]
    value: Callable[[Row, Mapping[str, Row]], float | None]
    least: bool = False

    def met(self, value: float) -> bool:
        """Whether a value meets the bar."""
        return value >= self.limit if self.least else value <= self.limit


@dataclass(frozen=True)
class Judgement:
    """How a row stands against a bar; `met` is None if it cannot be told."""

    group: str
    row: str
    what: str
    value: float | None
    limit: float
    least: bool
    met: bool | None

    def __str__(self) -> str:
        sign = ">=" if self.least else "<="
        return f"{self.group} | {self.row} | {self.what}: {'not measured' if self.value is None else f'{self.value:.3g}'}, bar {sign} {self.limit:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(self.__dict__)


def _ratio(row: Row, rows: Mapping[str, Row]) -> float | None:
    return row.ratio


def _of_read(row: Row, rows: Mapping[str, Row]) -> float | None:
    return row.of_read


def _us(row: Row, rows: Mapping[str, Row]) -> float | None:
    return row.us


def _to_base(number: Callable[[Row], float | None]) -> Callable[[Row, Mapping[str, Row]], float | None]:
    """Return the number of a row over that of its base row."""

    def value(row: Row, rows: Mapping[str, Row]) -> float | None:
        base = rows.get(row.case.base)
        own, other = number(row), None if base is None else number(base)
        return None if own is None or not other else own / other

    return value


def _to_fastest(row: Row, rows: Mapping[str, Row]) -> float | None:
    times = [other.us for other in rows.values() if other.us is not None]
    return None if row.us is None or len(times) < 2 else row.us / min(times)


def _group(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.case.group in names


def _streams(row: Row) -> bool:
    """Rows of unquantised caches that memory alone should bound."""
    return row.case.group in ("main", "groups", "dims", "pages") and not row.case.kv_dtype


#: Every bar of a row. Ratios are times, so less is better; fractions are of the ceilings measured in the same run.
BARS: tuple[Bar, ...] = (
    Bar("time / best peer", 0.97, lambda r: r.case.group == "main" and bool(r.case.peers), _ratio),
    Bar("fraction of the read ceiling, KV >= 1 GB", 0.95, lambda r: _streams(r) and r.case.kv_bytes >= GB, _of_read, least=True),
    Bar("fraction of the read ceiling, KV >= 250 MB", 0.85, lambda r: _streams(r) and 250 * MB <= r.case.kv_bytes < GB, _of_read, least=True),
    Bar("microseconds, KV of 4 MB", 6.5, lambda r: r.case.group == "main" and r.case.kv_bytes <= 5 * MB, _us),
    Bar("microseconds, KV of 17 to 34 MB", 14.0, lambda r: r.case.group == "main" and 16 * MB <= r.case.kv_bytes <= 34 * MB, _us),
    Bar("time per byte / uniform lengths", 1.05, lambda r: r.case.group == "main" and bool(r.case.base), _to_base(lambda r: r.ns_per_kb)),
    Bar("time / FlashMLA, 16 heads", 0.95, lambda r: r.case.mla and r.case.heads == 16, _ratio),
    Bar("time / FlashMLA, 128 heads", 1.25, lambda r: r.case.mla and r.case.heads == 128, _ratio),
    Bar(
        "fraction of the read ceiling, fp8 KV >= 250 MB",
        0.85,
        lambda r: r.case.kv_dtype == "e4m3" and r.case.kv_bytes >= 250 * MB,
        _of_read,
        least=True,
    ),
    Bar("time / fastest page size", 1.10, _group("pages"), _to_fastest),
    Bar("time / q_len 1, up to 64 rows", 1.20, lambda r: r.case.group == "qlen" and bool(r.case.base) and _rows(r) <= 64, _to_base(lambda r: r.us)),
    Bar("time / context of the window's size", 1.10, lambda r: r.case.window is not None, _to_base(lambda r: r.us)),
    Bar("time per byte / one sequence less", 1.03, lambda r: r.case.group == "batch" and bool(r.case.base), _to_base(lambda r: r.ns_per_kb)),
)
_MEAN_LIMIT, _HOST_LIMIT, _SCRATCH_LIMIT = 0.90, 24.0, 32 * 1024 * 1024


def _rows(row: Row) -> int:
    """Query rows that share a kv head."""
    return row.case.heads // row.case.kv_heads * row.case.q_len


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def judge(rows: Sequence[Row], host: Sequence[HostRow] = (), scratch: Scratch | None = None, bars: Sequence[Bar] = BARS) -> list[Judgement]:
    """Hold every row to every bar that applies to it, then the aggregates."""
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(row.case.group, {})[row.case.name] = row
    found = []
    for row in rows:
        for bar in bars:
            if bar.applies(row):
                value = bar.value(row, groups[row.case.group])
                met = None if value is None else bar.met(value)
                if row.problem:  # our own failure is a miss, not an excuse
                    met = False
                found.append(Judgement(row.case.group, row.case.name, bar.what, value, bar.limit, bar.least, met))
    main = [row for row in rows if row.case.group == "main" and row.case.peers]
    if main:
        ratios = [row.ratio for row in main if row.ratio is not None]
        mean = geometric_mean(ratios) if len(ratios) == len(main) else None  # a bar over all rows: told only of all
        what = f"geometric mean of time / best peer, {len(ratios)} of {len(main)} rows"
        found.append(_aggregate("main", "all rows", what, mean, _MEAN_LIMIT))
    found += [_aggregate("host", row.name, "host microseconds", row.us, _HOST_LIMIT, failed=bool(row.problem)) for row in host if row.judged]
    if scratch is not None:
        found.append(_aggregate("host", f"{scratch.calls} calls", "scratch bytes grown", scratch.after - scratch.before, 0))
        found.append(_aggregate("host", "up to 16 rows", "scratch bytes", scratch.after, _SCRATCH_LIMIT))
    return found


def _aggregate(group: str, row: str, what: str, value: float | None, limit: float, *, failed: bool = False) -> Judgement:
    met = False if failed else None if value is None else value <= limit
    return Judgement(group, row, what, value, limit, False, met)
