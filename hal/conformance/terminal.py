"""The summary at the end of a run, as lines of text."""

from __future__ import annotations

from collections import Counter

from hal.conformance.outcomes import Outcome
from hal.conformance.report import rows
from hal.conformance.session import Session

__all__ = ["summary"]

_MOST_LINES = 20


def summary(run: Session) -> list[str]:
    """Return the table of outcomes, the reasons behind refusals and waivers, warnings, and the verdict."""
    table = rows(run)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in table]
    for outcome, label in ((Outcome.REFUSED, "refused"), (Outcome.WAIVED, "waived"), (Outcome.NOT_RUN, "not run")):
        reasons = Counter(reason for r in run.results.values() if r.outcome is outcome for reason in set(r.reasons))
        lines += [f"{label}: {reason} [{count} {'case' if count == 1 else 'cases'}]" for reason, count in reasons.most_common(_MOST_LINES)]
        if len(reasons) > _MOST_LINES:
            lines.append(f"{label}: ... and {len(reasons) - _MOST_LINES} reasons more, in the JSON report")
    warnings = [f"warning: {r.case}: {w}" for r in run.results.values() for w in r.warnings]
    lines += warnings[:_MOST_LINES]
    if len(warnings) > _MOST_LINES:
        lines.append(f"... and {len(warnings) - _MOST_LINES} warnings more, in the JSON report")
    lines += [f"FAILURE: {problem}" for problem in run.problems()]
    lines.append(f"{run.subject.name} {'conforms' if run.passed else 'does NOT conform'}{'' if run.full else ' (part of the suite ran)'}")
    return lines
