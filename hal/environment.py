"""The HAL_* environment variables: the only place that reads them.

A variable that is one slip away from a known one is an error, because a setting that is silently ignored costs hours.
Any other unknown one gets one warning, since the prefix is not ours alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hal.errors import ConfigError

__all__ = ["RETIRED", "VARIABLES", "Environment", "in_force", "read", "warn_once"]

log = logging.getLogger("hal")

PREFIX = "HAL_"

#: Every variable with what it does, as `hal doctor` shows it.
VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "HAL_BACKEND": "name of the backend that serves every op: an explicit request that runs or raises",
        "HAL_CACHE_DIR": "folder for downloaded models",
        "HAL_CONFIG": "config file, or the name of a shipped config",
        "HAL_PLUGINS": "comma-separated entry points that may load; empty for none",
    }
)

#: Variables of earlier versions -> what to set instead. Setting one is an error: it no longer does anything.
RETIRED: Mapping[str, str] = MappingProxyType({})

_said: set[str] = set()


@dataclass(frozen=True)
class Environment:
    """The settings made by variables; None where a variable is not set.

    Attributes:
        backend: HAL_BACKEND.
        config: HAL_CONFIG.
        plugins: HAL_PLUGINS, entry-point names; empty means that none may load.
        cache_dir: HAL_CACHE_DIR.
    """

    backend: str | None
    config: str | None
    plugins: tuple[str, ...] | None
    cache_dir: str | None


def read(environ: Mapping[str, str] = os.environ, *, retired: Mapping[str, str] = RETIRED) -> Environment:
    """Read the HAL_* variables.

    Args:
        environ: where they are set.
        retired: names that earlier versions knew -> what to set instead.

    Raises:
        ConfigError: a variable is misspelt by one slip, retired, or has no usable value; one line for each.
    """
    problems: list[ConfigError] = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            _judge_unknown(name, retired, problems)

    def value(name: str, parse: Callable[[str], Any]) -> Any:
        if name not in environ:
            return None
        try:
            return parse(environ[name])
        except ValueError as error:
            problems.append(ConfigError(str(error), name))
            return None

    found = Environment(
        backend=value("HAL_BACKEND", _backend),
        config=value("HAL_CONFIG", _config),
        plugins=value("HAL_PLUGINS", _plugins),
        cache_dir=value("HAL_CACHE_DIR", _cache_dir),
    )
    if problems:
        first, *rest = problems
        raise ConfigError("\n".join([str(first).removeprefix(f"{first.where}: "), *map(str, rest)]), first.where)
    return found


def in_force(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the HAL_* variables that are set, known or not, sorted by name."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(PREFIX)}


def warn_once(key: str, text: str) -> None:
    """Log a warning unless one was logged under this key before, in this process."""
    if key not in _said:
        _said.add(key)
        log.warning("%s", text)


def _judge_unknown(name: str, retired: Mapping[str, str], problems: list[ConfigError]) -> None:
    known = ", ".join(VARIABLES)
    if name in retired:
        problems.append(ConfigError(f"is retired and has no effect; {retired[name]}", name))
        return
    meant = next((k for k in VARIABLES if _one_slip(name.upper(), k)), None)
    if meant:
        problems.append(ConfigError(f"unknown variable; did you mean {meant}? Rename it, or unset it if it belongs to another program", name))
        return
    warn_once(f"variable {name}", f"environment variable {name} is unknown to hal and has no effect here; known are {known}")


def _backend(text: str) -> str:
    if not text.strip():
        raise ValueError("is set but empty; give the name of a backend (`hal doctor` lists them), or unset it")
    return text.strip()


def _config(text: str) -> str:
    if not text.strip():
        raise ValueError("is set but empty; give a YAML file or a shipped config (`hal config list` lists them), or unset it")
    return text


def _plugins(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    if "" in names:
        raise ValueError(f"{text!r} has an empty name between commas; give entry-point names such as acme,other, or nothing to load none")
    return tuple(dict.fromkeys(names))


def _cache_dir(text: str) -> str:
    if not text.strip():
        raise ValueError("is set but empty; give a folder, or unset it for the default")
    return text


def _one_slip(name: str, known: str) -> bool:
    """Whether at most one insertion, deletion, substitution or swap of neighbours turns `name` into `known`."""
    if name == known:
        return True
    short, long = sorted((name, known), key=len)
    if len(long) - len(short) > 1:
        return False
    i = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) != len(long):
        return short[i:] == long[i + 1 :]
    swapped = long[:i] + long[i + 1 : i + 2] + long[i : i + 1] + long[i + 2 :]
    return short[i + 1 :] == long[i + 1 :] or short == swapped
