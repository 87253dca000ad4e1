"""Reads YAML device configs. Every mistake in a file is reported at once, with `file:line:column` and the nearest name.

This module and the two behind it are the only ones that import yaml and pydantic; `import hal` loads none of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from hal.config import Choice, Config, Disabled, Source
from hal.config_schema import ConfigModel, Known, MatchModel, UseModel, model_at, unknown_name
from hal.errors import ConfigError, nearest
from hal.ops import OPS
from hal.registry import Registry
from hal.tuning import Tuning
from hal.tuning_file import read_tuning
from hal.yaml_marks import Document, NotText, Path, parse, raise_problems

__all__ = ["Parsed", "load", "read", "shipped", "shipped_path", "vocabulary"]

SourceKind = Literal["argument", "environment", "detection"]
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Parsed:
    """A config, its description, and the devices that it is for (None if it does not say)."""

    config: Config
    description: str
    match: MatchModel | None


def load(
    path: str | os.PathLike[str],
    *,
    backends: Collection[str],
    ops: Collection[str],
    packages: Collection[str] | None = None,
    source_kind: SourceKind = "argument",
) -> Config:
    """Read a config.

    Args:
        path: a file, or the name of a shipped config such as `nvidia-hopper`.
        backends: names of the registered backends.
        ops: names of the ops.
        packages: packages that `versions:` may name; None for any.
        source_kind: who named the file; kept in `Config.source` and in messages.

    Returns:
        The config; each choice in it carries its `file:line`.

    Raises:
        ConfigError: the file cannot be read or is wrong; one line per mistake.
    """
    return read(path, Known(tuple(backends), tuple(ops), None if packages is None else tuple(packages)), source_kind).config


def read(path: str | os.PathLike[str], known: Known, source_kind: SourceKind = "argument") -> Parsed:
    """Read a config together with its `match` block; see `load`."""
    given = os.fspath(path)
    where = f"HAL_CONFIG={given}" if source_kind == "environment" else f"config {given!r}"
    file, shown = _locate(given, where)
    document = parse(_content(file, where), shown)
    model = _validate(document, known)
    if model is None:
        raise_problems(document.problems, shown)
    source = Source(source_kind, where if source_kind == "environment" else shown)
    tuning = (
        None
        if model.tuning is None
        else _tuning(FilePath(file).parent / FilePath(model.tuning).expanduser(), f"{shown}:{document.line(('tuning',))}")
    )
    return Parsed(_config(model, document, shown, source, tuning), model.description, model.match)


def vocabulary(registry: Registry) -> Known:
    """Return the names that a config may use in this installation; a broken plug-in may be named, and says why it fails."""
    specs = [entry.spec for entry in registry.backends.values()]
    needs = [r for spec in specs for r in (spec.requires, *(i.requires for i in spec.implementations.values()))]
    backends = sorted({*registry.backends, *(plugin.name for plugin in registry.broken)})
    return Known(tuple(backends), tuple(OPS), tuple(sorted({package.name for need in needs for package in need.packages})))


def shipped() -> tuple[str, ...]:
    """Return the names of the configs that ship with this package, sorted."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in files("hal.configs").iterdir() if entry.name.endswith(".yaml")))


def shipped_path(name: str) -> str:
    """Return the file of a shipped config."""
    return str(files("hal.configs") / f"{name}.yaml")


def _locate(given: str, where: str) -> tuple[str, str]:
    """Return the file to open and the name that messages use for it."""
    if not given.strip():
        raise ConfigError(f"the path is empty; give a file, or one of the shipped configs: {', '.join(shipped())}", where)
    if given in shipped():
        return shipped_path(given), f"configs/{given}.yaml"
    path = FilePath(given).expanduser()
    is_name = path.suffix not in (".yaml", ".yml") and os.sep not in given
    if is_name and not os.path.exists(path):
        known = shipped()
        raise ConfigError(
            f"no such shipped config, and no file of that name; shipped are: {', '.join(known)};{nearest(given, known)} "
            "a file is given by its path, such as ./mine.yaml",
            where,
        )
    return str(path), str(path)


def _content(file: str, where: str) -> bytes:
    try:
        with open(file, "rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        folder = FilePath(file).parent
        siblings = [p.name for p in folder.glob("*.y*ml")] if folder.is_dir() else []
        missing = "no such file" if folder.is_dir() else f"no such file: the folder {str(folder)!r} does not exist"
        hint = nearest(FilePath(file).name, siblings)
        raise ConfigError(f"{missing};{hint} shipped configs are: {', '.join(shipped())}", where) from None
    except IsADirectoryError:
        raise ConfigError("is a folder; give the YAML file in it", where) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot be read: {reason}", where) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"is larger than {_MAX_BYTES >> 20} MiB, so it is no device config", where)
    return content


def _validate(document: Document, known: Known) -> ConfigModel | None:
    """Return the model, or None with the problems noted in the document."""
    if not isinstance(document.data, dict):
        document.report(document.values[()], f"a config is a mapping of keys such as `name:` and `backends:`, found {_shown(document.data)}")
        return None
    _check_repeated(document)
    model = None
    try:
        model = ConfigModel.model_validate(document.data, context=known)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _report(document, detail, known)
    return None if document.problems else model


def _check_repeated(document: Document) -> None:
    """Note every name that stands twice in a chain."""
    ops = document.data.get("ops")
    chains: list[tuple[Path, Any]] = [(("backends",), document.data.get("backends"))]
    for op, value in ops.items() if isinstance(ops, dict) else ():
        chains.append((("ops", op, "use"), value.get("use")) if isinstance(value, dict) else (("ops", op), value))
    for path, chain in chains:
        names = chain if isinstance(chain, list) else []
        for index, name in enumerate(names):
            if isinstance(name, str) and name in names[:index]:
                at = (*path, index)
                document.report(document.values[at], f"{name!r} stands twice in this chain; keep the first")


def _report(document: Document, detail: Any, known: Known) -> None:
    """Note one pydantic error at its place in the file."""
    location: Path = detail["loc"]
    path = document.path(location)
    kind, value = detail["type"], detail["input"]
    at_key = kind == "extra_forbidden" or "[key]" in location
    position = document.keys[path] if at_key and path in document.keys else document.values[path]
    if kind == "extra_forbidden":
        accepted = [field.alias or name for name, field in model_at(location).model_fields.items()]
        document.report(position, unknown_name("key", str(location[-1]), accepted))
    elif kind == "missing":
        within = f" in `{_dotted(path)}`" if path else ""
        document.report(position, f"the key `{_alias(location[-1])}` is missing{within}; add it")
    elif kind == "hal":
        document.report(position, detail["msg"] if at_key else f"`{_dotted(path)}`: {detail['msg']}")
    else:
        document.report(position, f"`{_dotted(path)}` must be {_accepted(detail, known)}, found {_shown(value)}{_fix(detail)}")


def _accepted(detail: Any, known: Known) -> str:
    """What pydantic's error says would be accepted."""
    location, kind = detail["loc"], detail["type"]
    if kind == "literal_error":
        return "one of " + detail["ctx"]["expected"]
    if kind == "string_type" and location[0] in ("backends", "ops") and location[-1] != "reason":
        return f"the name of a backend, or a list of such names ({', '.join(sorted(known.backends))})"
    if kind == "string_type":
        return "a text"
    return "a list" if kind == "tuple_type" else "a mapping"


def _fix(detail: Any) -> str:
    """A hint for what to type instead, or nothing."""
    value, kind = detail["input"], detail["type"]
    if isinstance(value, NotText) and not value.text:
        return "; give a value, or leave the key out"
    if kind == "literal_error":
        options = detail["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        hint = nearest(value, options) if isinstance(value, str) else ""
        return f";{hint}" if hint else ""
    if kind == "tuple_type" and isinstance(value, str) and detail["loc"] == ("match", "name"):
        return f"; write [{value!r}]"
    if isinstance(value, NotText) and value.kind == "a number" and (detail["loc"][0] == "versions" or detail["loc"][-1] == "arch"):
        return f"; write a window such as '>={value.text}'"
    return f"; quote it: '{value.text}'" if isinstance(value, NotText) and kind == "string_type" else ""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value) if isinstance(value, str) else str(value)


def _alias(name: Any) -> str:
    return name.rstrip("_") if isinstance(name, str) else str(name)


def _dotted(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step if step.isprintable() else repr(step)}" for step in path)
    return text.removeprefix(".")


def _tuning(path: FilePath, named_by: str) -> Tuning:
    try:
        return read_tuning(path)
    except ConfigError as error:
        raise ConfigError(f"`tuning`: {error}", named_by) from error


def _config(model: ConfigModel, document: Document, shown: str, source: Source, tuning: Tuning | None) -> Config:
    def placed(*path: str | int) -> Source:
        return Source("file", f"{shown}:{document.line(path)}")

    def choice(use: str | tuple[str, ...], where: Source, reason: str = "") -> Choice:
        explicit = isinstance(use, str)
        return Choice((use,) if isinstance(use, str) else use, explicit, where, reason)

    ops: Mapping[str, Choice] = {
        op: choice(value.use, placed("ops", op), value.reason) if isinstance(value, UseModel) else choice(value, placed("ops", op))
        for op, value in model.ops.items()
    }
    return Config(
        name=model.name,
        source=source,
        default=choice(model.backends, placed("backends")),
        ops=MappingProxyType(dict(ops)),
        fallback=model.fallback,
        validate=model.validate_,
        versions=MappingProxyType(dict(model.versions)),
        disabled=tuple(Disabled(entry.backend, entry.op, placed("disable", i), entry.reason) for i, entry in enumerate(model.disable)),
        tuning=tuning,
    )
