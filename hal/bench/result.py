"""Everything that one run found, and how it is written as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hal.bench.bars import Judgement, geometric_mean
from hal.bench.ceilings import Ceilings
from hal.bench.host import HostRow
from hal.bench.rows import Row

__all__ = ["Result"]

R = TypeVar("R", bound=Row[Any])


@dataclass
class Result(Generic[R]):
    """What a run found so far.

    Attributes:
        schema: name and version of the JSON file's form.
        machine: device, versions, date.
        ceilings: of this run.
        method: how times were taken.
        rows: measured cases.
        host: host cost of eager calls.
        not_run: (group, case) of the rows that were left out.
        stopped: why they were.
    """

    schema: ClassVar[str]

    machine: dict[str, str]
    ceilings: Ceilings
    method: str
    rows: list[R] = field(default_factory=list)
    host: list[HostRow] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)
    stopped: str = ""

    @property
    def judgements(self) -> list[Judgement]:
        """How the rows stand against the bars."""
        raise NotImplementedError

    def means(self) -> Iterator[tuple[str, float, int, int]]:
        """Yield group, geometric mean of ours / best peer, rows that have it, rows that could."""
        for group in dict.fromkeys(row.case.group for row in self.rows if row.has_rivals):
            rows = [row for row in self.rows if row.case.group == group and row.has_rivals]
            ratios = [row.ratio for row in rows if row.ratio is not None]
            mean = geometric_mean(ratios)
            if mean is not None:
                yield group, mean, len(ratios), len(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schema": self.schema,
            "machine": self.machine,
            "method": self.method,
            "ceilings": self.ceilings.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "host": [row.to_dict() for row in self.host],
            "means": [{"group": g, "geometric_mean": mean, "rows": n, "of": total} for g, mean, n, total in self.means()],
            "bars": [judgement.to_dict() for judgement in self.judgements],
            "not_run": [{"group": group, "case": name} for group, name in self.not_run],
            "stopped": self.stopped,
        }

    def write(self, path: Path) -> None:
        """Write JSON; a run that is cut while writing leaves the file as it was."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(part, path)
