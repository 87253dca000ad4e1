"""What a case of any benchmark has, and how cases are chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["Case", "chosen", "matches"]


class Case(Protocol):
    """A shape that is measured: `name` is unique inside `group`, which says which table it belongs to."""

    @property
    def group(self) -> str:
        """Table."""

    @property
    def name(self) -> str:
        """Row."""


C = TypeVar("C", bound=Case)


def matches(name: str, only: tuple[str, ...]) -> bool:
    """Whether a name contains one of `only`, whatever the case of letters; any does if `only` is empty."""
    return not only or any(text.lower() in name.lower() for text in only)


def chosen(cases: Iterable[C], groups: tuple[str, ...], only: tuple[str, ...] = ()) -> list[C]:
    """Return the cases of `groups` (`all` for all) whose name matches `only`."""
    return [case for case in cases if ("all" in groups or case.group in groups) and matches(case.name, only)]
