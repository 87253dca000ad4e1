"""From how a test function ended to the outcome of its case."""

from __future__ import annotations

from hal.conformance.outcomes import NotRun, Outcome, Refused
from hal.conformance.session import Result, Session

__all__ = ["judge"]


def judge(run: Session, case: str, op: str, error: BaseException | None, text: str, seconds: float) -> Result:
    """Return the result of a case, given what its test function raised; see `hal.conformance.outcomes`."""
    record, waiver = run.subject.record, run.waiver(case)
    outcome, reasons = _outcome(error, text)
    if waiver is not None and outcome is not Outcome.NOT_RUN:
        if outcome is Outcome.FAIL or waiver.inconclusive:
            outcome, reasons = Outcome.WAIVED, (f"{waiver.reason} ({waiver.link})",)
        else:
            reasons = (f"stale waiver {waiver.tests!r}: the case ended as {outcome.value}; remove or narrow the waiver",)
            outcome = Outcome.FAIL
    return Result(case, op, outcome, reasons, record.entered, record.max_error, record.warnings, seconds)


def _outcome(error: BaseException | None, text: str) -> tuple[Outcome, tuple[str, ...]]:
    if error is None:
        return Outcome.PASS, ()
    if isinstance(error, Refused):
        return Outcome.REFUSED, error.reasons
    if isinstance(error, NotRun):
        return Outcome.NOT_RUN, (str(error),)
    # A plain skip is no outcome of this suite: what was not shown has failed.
    return Outcome.FAIL, (f"{type(error).__name__}: {error}" if str(error) else text,)
