"""What a run of `hal bench decode` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hal.bench.bars import Judgement
from hal.bench.decode.bars import judge
from hal.bench.decode.host import Scratch
from hal.bench.decode.rows import DecodeRow
from hal.bench.result import Result

__all__ = ["DecodeResult"]


@dataclass
class DecodeResult(Result[DecodeRow]):
    """A run; `scratch` is the work memory, None if not measured."""

    schema: ClassVar[str] = "hal.bench.decode/1"

    scratch: Scratch | None = None

    @property
    def judgements(self) -> list[Judgement]:
        """How the rows stand against the bars."""
        return judge(self.rows, self.host, self.scratch)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**super().to_dict(), "scratch": None if self.scratch is None else self.scratch.to_dict()}
