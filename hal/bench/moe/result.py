"""What a run of `hal bench moe` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hal.bench.bars import Judgement, judge_rows
from hal.bench.moe.bars import BARS
from hal.bench.moe.rows import MoeRow
from hal.bench.result import Result

__all__ = ["MoeResult"]


@dataclass
class MoeResult(Result[MoeRow]):
    """A run; `judged` if it is one of the shapes and on the kind of device that the bars are for."""

    schema: ClassVar[str] = "hal.bench.moe/1"

    judged: bool = True

    @property
    def judgements(self) -> list[Judgement]:
        """How the rows stand against the bars."""
        return judge_rows(self.rows, BARS) if self.judged else []
