"""Bars that rows are held to, as data, and how a row is judged.

A bar that cannot be judged (a peer that did not run, a base row that was left out) is `unjudged`: neither met nor missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hal.bench.rows import Row

__all__ = ["Bar", "Judgement", "aggregate", "geometric_mean", "judge_rows"]

R = TypeVar("R", bound=Row[Any])


@dataclass(frozen=True)
class Bar(Generic[R]):
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
    applies: Callable[[R], bool]
    value: Callable[[R, Mapping[str, R]], float | None]
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


def judge_rows(rows: Sequence[R], bars: Sequence[Bar[R]]) -> list[Judgement]:
    """Hold every row to every bar that applies to it."""
    groups: dict[str, dict[str, R]] = {}
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
    return found


def aggregate(group: str, row: str, what: str, value: float | None, limit: float, *, failed: bool = False) -> Judgement:
    """Hold a number of no single row to an upper limit."""
    met = False if failed else None if value is None else value <= limit
    return Judgement(group, row, what, value, limit, False, met)


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
