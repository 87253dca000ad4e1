"""Known deviations: a file of entries with reasons and links, each of which must be needed.

An entry of the file::

    - backend: triton
      tests: "test_write.test_fp8*"      # shell pattern on the id of a case
      reason: the interpreter converts fp32 to e4m3 wrongly
      link: https://...
      when: interpreter                  # optional; see CONDITIONS
      inconclusive: true                 # optional: neither a pass nor a failure proves anything here, so it is not run

A waived case that passes or is refused makes its waiver stale: a failure. So does, in a full run, an entry that no case matches.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CONDITIONS", "DEFAULT", "Waiver", "WaiverError", "load"]

#: The waivers that ship with the suite.
DEFAULT = Path(__file__).with_name("waivers.yaml")


class WaiverError(ValueError):
    """A waiver file is wrong."""


def _interpreter(device: str) -> bool:
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "True", "on", "ON", "yes", "y")


#: Name -> does it hold here, given the device type under test.
CONDITIONS: dict[str, Callable[[str], bool]] = {
    "interpreter": _interpreter,
    "cpu": lambda device: device == "cpu",
    "cuda": lambda device: device == "cuda",
}


@dataclass(frozen=True)
class Waiver:
    """One entry; see the module."""

    backend: str
    tests: str
    reason: str
    link: str
    when: str = ""
    inconclusive: bool = False

    def applies(self, backend: str, device: str) -> bool:
        """Whether the entry holds for this backend on this device."""
        return self.backend == backend and (not self.when or CONDITIONS[self.when](device))

    def matches(self, case: str) -> bool:
        """Whether it covers a case; brackets in the pattern stand for themselves."""
        return fnmatch.fnmatchcase(case, self.tests.replace("[", "[[]"))


def load(path: Path) -> tuple[Waiver, ...]:
    """Read a waiver file.

    Raises:
        WaiverError: the file cannot be read, or an entry lacks a key, has an unknown one or an unknown condition.
    """
    import yaml

    try:
        entries = yaml.safe_load(path.read_text()) or []
    except (OSError, yaml.YAMLError) as error:
        raise WaiverError(f"{path}: {error}") from error
    if not isinstance(entries, list):
        raise WaiverError(f"{path}: holds a {type(entries).__name__}; a list of waivers is needed")
    return tuple(_entry(path, index, entry) for index, entry in enumerate(entries, 1))


def _entry(path: Path, index: int, entry: Any) -> Waiver:
    where = f"{path}: entry {index}"
    if not isinstance(entry, dict):
        raise WaiverError(f"{where} is a {type(entry).__name__}; a mapping is needed")
    needed, optional = ("backend", "tests", "reason", "link"), ("when", "inconclusive")
    missing = [k for k in needed if not str(entry.get(k) or "").strip()]
    unknown = [str(k) for k in entry if k not in (*needed, *optional)]
    if missing or unknown:
        problems = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown keys {', '.join(unknown)}"] * bool(unknown)
        raise WaiverError(f"{where} {' and '.join(problems)}; keys are {', '.join(needed)}, and optionally {', '.join(optional)}")
    if entry.get("when") and entry["when"] not in CONDITIONS:
        raise WaiverError(f"{where}: `when: {entry['when']}`; known conditions are {', '.join(CONDITIONS)}")
    if not isinstance(entry.get("inconclusive", False), bool):
        raise WaiverError(f"{where}: `inconclusive` is {entry['inconclusive']!r}; true or false is needed")
    return Waiver(**{k: v for k, v in entry.items() if v is not None})
