"""How a case can end, and the exceptions that say so."""

from __future__ import annotations

from enum import Enum

__all__ = ["NotRun", "Outcome", "Refused"]


class Outcome(str, Enum):
    """The end of one case."""

    PASS = "PASS"  #: the backend under test ran, and its results are right
    REFUSED = "REFUSED"  #: refused before launch, with reasons that `explain` had given before
    WAIVED = "WAIVED"  #: a known deviation, listed in a waiver file
    NOT_RUN = "NOT_RUN"  #: needs hardware that is not here
    FAIL = "FAIL"


class Refused(Exception):
    """The backend refused a call in the way that it should.

    Args:
        op: name of the op.
        reasons: the reasons, as text.
        codes: their codes.
    """

    def __init__(self, op: str, reasons: tuple[str, ...], codes: tuple[str, ...]) -> None:
        self.op, self.reasons, self.codes = op, reasons, codes
        super().__init__(f"{op} refused: " + "; ".join(reasons))


class NotRun(Exception):
    """A case cannot run on this machine."""
