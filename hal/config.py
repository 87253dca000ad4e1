"""What a config says, as plain frozen data. `hal.config_file` reads it from YAML; `detect` finds the shipped one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from hal.tuning import Tuning

__all__ = ["Choice", "Config", "Disabled", "Fallback", "Source", "Validate"]

Fallback = Literal["warn", "error", "allow"]
Validate = Literal["always", "first", "off"]


@dataclass(frozen=True)
class Source:
    """Where a setting came from.

    Attributes:
        kind: `argument`, `environment`, `file` or `detection`, in falling precedence.
        where: `file:line`, the variable, the argument, or what was detected.
    """

    kind: Literal["argument", "environment", "file", "detection"]
    where: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.where})"


@dataclass(frozen=True)
class Choice:
    """Which backends may serve an op, in order.

    Attributes:
        backends: names; one name given by a user is explicit and never degrades.
        explicit: an explicit request runs or raises.
        source: who said so.
        reason: why, in the words of the config.
    """

    backends: tuple[str, ...]
    explicit: bool
    source: Source
    reason: str = ""


@dataclass(frozen=True)
class Disabled:
    """A backend that a config leaves out, for one op or (op None) for all."""

    backend: str
    op: str | None
    source: Source
    reason: str = ""


@dataclass(frozen=True)
class Config:
    """One effective device config.

    Attributes:
        name: name of the device class.
        source: where it came from.
        default: choice for every op that `ops` does not name.
        ops: op name -> choice.
        fallback: what happens when the reference stands in for another backend of a chain.
        validate: shapes, dtypes, devices and strides are checked once per distinct signature, which holds all that
            those checks look at; `off` leaves that out for ops whose backends have no gates. Values inside tensors:
            `off` reads none, `first` those of CPU tensors on each call, `always` those on every device, outside
            graph capture.
        versions: package -> version window that replaces the backend's own.
        disabled: backends left out.
        tuning: measured choices of speed, or None.
    """

    name: str
    source: Source
    default: Choice
    ops: Mapping[str, Choice] = field(default_factory=lambda: MappingProxyType({}))
    fallback: Fallback = "warn"
    validate: Validate = "first"
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    disabled: tuple[Disabled, ...] = ()
    tuning: Tuning | None = None

    def choice(self, op: str) -> Choice:
        """Return the choice for one op."""
        return self.ops.get(op, self.default)
