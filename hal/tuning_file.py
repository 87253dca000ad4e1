"""Reads and writes the files of `hal tune`; every mistake in a file is reported at once, with `file:line:column`."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hal.errors import ConfigError, nearest
from hal.tuning import ExpertsEntry, Tuning
from hal.yaml_marks import NotText, parse, raise_problems

__all__ = ["read_tuning", "write_tuning"]

_MOST_BYTES = 4 << 20
#: Values of a file: that many bytes hold no more.
_MOST_VALUES = 1 << 20
#: Fewest elements that are fetched ahead: 32 bytes.
_LEAST_AHEAD = 16
#: Most elements of a tile of the kernels for few tokens: their registers.
_MOST_TILE = 1 << 15


def _plain(value: Any) -> Any:
    """A scalar as YAML means it: the parser keeps what was typed."""
    if isinstance(value, NotText):
        return {"true": True, "false": False}.get(value.text.lower(), value.text)
    return value


def _power_of_two(value: Any) -> Any:
    number = _plain(value)
    if isinstance(number, str) and number.isdigit() and (int(number) < 1 or int(number) & (int(number) - 1)):
        raise ValueError("must be a power of two")
    return number


def _ahead(value: Any) -> Any:
    number = _plain(value)
    return number if number in ("0", 0) else _at_least_a_sector(_power_of_two(value))


def _at_least_a_sector(number: Any) -> Any:
    if isinstance(number, str) and number.isdigit() and int(number) < _LEAST_AHEAD:
        raise ValueError(f"must be 0 or at least {_LEAST_AHEAD}")
    return number


Flag = Annotated[bool, BeforeValidator(_plain)]
Count = Annotated[int, BeforeValidator(_plain), Field(ge=1, le=1 << 30)]
Tile = Annotated[int, BeforeValidator(_power_of_two), Field(ge=1, le=4096)]
Warps = Annotated[int, BeforeValidator(_power_of_two), Field(ge=1, le=16)]
Stages = Annotated[int, BeforeValidator(_plain), Field(ge=1, le=12)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProductModel(_Model):
    """Options of a product of the sorted path."""

    block_n: Annotated[int, BeforeValidator(_power_of_two), Field(ge=16, le=256)]
    block_k: Annotated[int, BeforeValidator(_power_of_two), Field(ge=16, le=512)]
    warps: Warps
    stages: Stages
    swap: Flag = False
    w_tma: Flag = False
    x_tma: Flag = False
    programs: Annotated[int, BeforeValidator(_plain), Field(ge=0, le=32)] = 0
    group_m: Annotated[int, BeforeValidator(_plain), Field(ge=1, le=4096)] = 8
    ahead: Annotated[int, BeforeValidator(_ahead), Field(ge=0, le=4096)] = 0


class SlotModel(_Model):
    """Options of a kernel of the path for few tokens."""

    rows: Tile
    block_k: Tile
    warps: Warps
    stages: Stages = 1
    prefetch: Flag = True

    @model_validator(mode="after")
    def _fits(self) -> SlotModel:
        if self.rows * self.block_k > _MOST_TILE:
            raise ValueError(f"rows * block_k must be at most {_MOST_TILE}")
        return self


class EntryModel(_Model):
    """One measurement."""

    experts: Count
    hidden: Count
    inner: Count
    top_k: Count
    tokens: Count
    dtype: Literal["bfloat16", "float16", "float32"]
    k_inner: Flag = True
    path: Literal["sorted", "slots"]
    block_m: Annotated[int, BeforeValidator(_power_of_two), Field(ge=16, le=256)] | None = None
    up: ProductModel | SlotModel
    down: ProductModel | SlotModel
    microseconds: Annotated[float, BeforeValidator(_plain), Field(gt=0)]

    @model_validator(mode="before")
    @classmethod
    def _of_its_path(cls, data: Any) -> Any:
        """Read the options as those of the path that the entry names, so that a message speaks of one kind only."""
        if isinstance(data, dict) and data.get("path") in ("sorted", "slots"):
            kind = ProductModel if data["path"] == "sorted" else SlotModel
            if (data.get("block_m") is None) == (kind is ProductModel):
                raise ValueError("`block_m` belongs to `path: sorted`, and only there")
            data = data | {name: kind.model_validate(data[name]) for name in ("up", "down") if isinstance(data.get(name), dict)}
        return data


class FileModel(_Model):
    """A file of `hal tune`, version 1."""

    version: Annotated[Literal[1], BeforeValidator(lambda value: int(value.text) if isinstance(value, NotText) and value.text.isdigit() else value)]
    device: Annotated[str, Field(min_length=1)]
    fused_moe: tuple[EntryModel, ...] = ()


def read_tuning(path: str | os.PathLike[str]) -> Tuning:
    """Read a file.

    Raises:
        ConfigError: it cannot be read or is wrong; one line per mistake.
    """
    file = os.fspath(path)
    try:
        content = Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot be read: {reason}; `hal tune moe --output FILE` writes such a file", f"tuning {file!r}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"is larger than {_MOST_BYTES >> 20} MiB, so it was not written by `hal tune`", file)
    document = parse(content, file, most_values=_MOST_VALUES)
    if not isinstance(document.data, dict):
        document.report(document.values[()], "a tuning file is a mapping with the keys `version`, `device` and `fused_moe`")
        raise_problems(document.problems, file)
    try:
        model = FileModel.model_validate(document.data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            place = document.path(detail["loc"])
            document.report(document.keys.get(place, document.values[place]), _problem(detail))
        raise_problems(document.problems, file)
    if document.problems:
        raise_problems(document.problems, file)
    return Tuning(model.device, tuple(_entry(entry) for entry in model.fused_moe), file)


def _problem(detail: Any) -> str:
    name = ".".join(str(step) for step in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = {f for m in (FileModel, EntryModel, ProductModel, SlotModel) for f in m.model_fields}
        return f"unknown key `{name}`;{nearest(str(detail['loc'][-1]), known)}".rstrip(";")
    if detail["type"] == "missing":
        return f"the key `{name}` is missing; add it"
    found = f", found {detail['input']}" if isinstance(detail["input"], (str, NotText)) else ""
    return f"`{name}`: {detail['msg'][:1].lower()}{detail['msg'][1:]}{found}"


def _entry(model: EntryModel) -> ExpertsEntry:
    plain = {name: getattr(model, name) for name in (f.name for f in fields(ExpertsEntry)) if name not in ("up", "down")}
    return ExpertsEntry(**plain, up=model.up.model_dump(), down=model.down.model_dump())


def write_tuning(tuning: Tuning, path: str | os.PathLike[str]) -> None:
    """Write a file that `read_tuning` reads, one entry on a line."""
    entries = [{f.name: getattr(entry, f.name) for f in fields(entry) if getattr(entry, f.name) is not None} for entry in tuning.fused_moe]
    for entry in entries:
        entry |= {"up": dict(entry["up"]), "down": dict(entry["down"])}
    lines = ["# Written by `hal tune`; a device config names it with the key `tuning`.", "version: 1", f"device: {json.dumps(tuning.device)}"]
    lines += ["fused_moe:" if entries else "fused_moe: []", *(f"- {json.dumps(entry)}" for entry in entries)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
