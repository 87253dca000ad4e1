"""Why a backend does not serve an op or a call: reasons are values, never only log lines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Reason", "ReasonCode"]


class ReasonCode(str, Enum):
    """The closed list of reasons. DTYPE, SHAPE, LAYOUT and FEATURE belong to a call; the others mostly to the machine or config."""

    NOT_INSTALLED = "NOT_INSTALLED"  #: a required package is not installed
    VERSION = "VERSION"  #: a package or the backend interface is outside the declared window
    SYMBOL_MISSING = "SYMBOL_MISSING"  #: the vendor library lacks a symbol that this op needs
    SIGNATURE = "SIGNATURE"  #: a symbol exists with another signature
    LOAD_ERROR = "LOAD_ERROR"  #: importing the implementation raised
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"  #: the backend does not serve this op
    DISABLED_BY_CONFIG = "DISABLED_BY_CONFIG"  #: the config, a variable or an argument leaves it out
    DEVICE = "DEVICE"  #: the tensors' device is not one that the backend serves
    ARCH = "ARCH"  #: the device is of that kind, but of an unsupported generation
    DTYPE = "DTYPE"  #: a dtype is not supported
    SHAPE = "SHAPE"  #: a size is not supported
    LAYOUT = "LAYOUT"  #: a layout or stride is not supported
    FEATURE = "FEATURE"  #: an optional argument is not supported


@dataclass(frozen=True)
class Reason:
    """One reason against a candidate.

    Attributes:
        code: machine-readable kind.
        text: one sentence with the found and the needed value.
        fix: what the user can do; empty if nothing.
    """

    code: ReasonCode
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.code.value}: {self.text}" + (f" ({self.fix})" if self.fix else "")

    def to_dict(self) -> dict[str, str]:
        """Return the reason as plain data for JSON reports."""
        return {"code": self.code.value, "text": self.text, "fix": self.fix}
