"""One run of the suite: what every case came to, and whether the backend conforms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.conformance.outcomes import Outcome
from hal.conformance.waivers import Waiver

if TYPE_CHECKING:
    from hal.conformance.subject import Subject

__all__ = ["Result", "Session"]


@dataclass
class Result:
    """The end of one case.

    Attributes:
        case: its id. op: the op that it is about; empty if several.
        outcome: how it ended. reasons: why, unless it passed.
        entered: calls in which the backend under test ran.
        max_error: largest error, as a fraction of the scale of the expected tensor.
        warnings: remarks that are no failures.
        seconds: duration.
    """

    case: str
    op: str
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    entered: int = 0
    max_error: float = 0.0
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass
class Session:
    """The state of a run."""

    subject: Subject
    waivers: tuple[Waiver, ...]
    require_gpu: bool = False
    json_path: Path | None = None
    markdown_path: Path | None = None
    results: dict[str, Result] = field(default_factory=dict)
    collected: dict[str, str] = field(default_factory=dict)  #: case -> op
    full: bool = False
    used: set[Waiver] = field(default_factory=set)
    versions: dict[str, Any] = field(default_factory=dict)

    def waiver(self, case: str) -> Waiver | None:
        """Return the waiver that covers a case here."""
        found = next((w for w in self.waivers if w.matches(case)), None)
        if found is not None:
            self.used.add(found)
        return found

    def counts(self, op: str | None = None) -> dict[str, int]:
        """Number of cases by outcome, of one op or of all."""
        counter = Counter(r.outcome.value for r in self.results.values() if op in (None, r.op))
        return {outcome.value: counter.get(outcome.value, 0) for outcome in Outcome}

    def executed(self, op: str | None = None) -> int:
        """Cases that passed with the backend under test entered."""
        return sum(r.outcome is Outcome.PASS and r.entered > 0 for r in self.results.values() if op in (None, r.op))

    def problems(self) -> list[str]:
        """Return why the run as a whole fails, failed cases apart."""
        name = self.subject.name
        found = []
        if not self.executed():
            found.append(f"nothing passed: no case ran on backend {name!r}")
        groups = {op for op in self.collected.values() if op in self.subject.declared}
        for op in sorted(groups):
            if self.executed() and not self.executed(op):
                found.append(f"nothing executed for {op}, which backend {name!r} declares")
        if self.full:
            found += [f"waiver {w.tests!r} matches no case; remove it" for w in self.waivers if w not in self.used]
        return found

    @property
    def passed(self) -> bool:
        """Whether the backend conforms, as far as the run went."""
        return not self.problems() and not any(r.outcome is Outcome.FAIL for r in self.results.values())
