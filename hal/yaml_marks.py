"""YAML as plain data in which every key and value knows its line and column. Nothing is ever constructed.

`yaml.compose` gives nodes with positions and shows duplicate keys; a construct step would lose both. Scalars that YAML
reads as something other than text (`on`, `1.5`, an empty value) stay what was typed, as `NotText`, so that a message
can say how to quote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml
from yaml.reader import ReaderError

from hal.errors import ConfigError

__all__ = ["Document", "NotText", "Path", "Problem", "parse", "raise_problems"]

#: Keys and indices from the root to a value.
Path = tuple["str | int", ...]

_TAG = "tag:yaml.org,2002:"
_KINDS = {
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "null": "an empty value",
    "timestamp": "a date",
    "merge": "a merge key",
    "value": "a value key",
}
#: Aliases expand when they are read: the limit keeps a few lines of nested aliases from filling the memory.
_MAX_VALUES = 10_000


@dataclass(frozen=True)
class NotText:
    """A scalar that YAML 1.1 does not read as text: `text` is what was typed, `kind` what YAML makes of it."""

    text: str
    kind: str

    def __str__(self) -> str:
        return (self.kind if self.kind != "an empty value" else "nothing") if not self.text else f"`{self.text}`, which YAML reads as {self.kind}"


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake, at a line and column that count from 1."""

    line: int
    column: int
    text: str


@dataclass
class Document:
    """A parsed file.

    Attributes:
        data: nested dicts, lists, strings and `NotText`.
        problems: mistakes met on the way; reading goes on after each.
        values: path -> line and column of a value.
        keys: path -> line and column of the key that holds a value.
    """

    data: Any = None
    problems: list[Problem] = field(default_factory=list)
    values: dict[Path, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def path(self, location: Sequence[str | int]) -> Path:
        """Return the part of `location` that exists in the file; steps that a validator added in between are left out."""
        found: Path = ()
        for step in location:
            if (*found, step) in self.values:
                found = (*found, step)
        return found

    def line(self, path: Path) -> int:
        """Return the line of the key of a value, or of the value where there is no key."""
        return self.keys.get(path, self.values[path])[0]

    def report(self, position: tuple[int, int], text: str) -> None:
        """Note one problem."""
        self.problems.append(Problem(*position, text))


def raise_problems(problems: Sequence[Problem], file: str) -> NoReturn:
    """Raise one ConfigError that lists all problems in file order, each line with `file:line:column`."""
    ordered = sorted(set(problems))
    first, *rest = ordered
    lines = [first.text, *(f"{file}:{p.line}:{p.column}: {p.text}" for p in rest)]
    raise ConfigError("\n".join(lines), f"{file}:{first.line}:{first.column}")


def parse(content: bytes, file: str, *, most_values: int = _MAX_VALUES) -> Document:
    """Return the single YAML document in `content`; `file` is how errors name it, `most_values` how many values it may have.

    Raises:
        ConfigError: not UTF-8, not YAML, no document or several, or aliases that contain themselves or grow too large.
    """
    text = _decode(content, file)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except ReaderError as error:
        before = text[: error.position]
        raise_problems([Problem(*_end(before), f"the character U+{error.character:04X} is not allowed in YAML; remove it")], file)
    except yaml.MarkedYAMLError as error:
        raise_problems([_syntax_problem(error)], file)
    except RecursionError:
        raise ConfigError("nested too deeply; a config needs four levels at most", f"{file}:1:1") from None
    if root is None:
        raise ConfigError("the file is empty; a config needs at least `name:` and `backends:`", f"{file}:1:1")
    document = Document()
    _Reader(document, file, most_values).read_root(root)
    return document


def _decode(content: bytes, file: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _end(content[: error.start].decode("utf-8-sig", errors="replace"))
        problem = Problem(line, column, f"byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8")
    raise_problems([problem], file)


def _end(text: str) -> tuple[int, int]:
    """Line and column of the character after `text`."""
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def _syntax_problem(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    message = error.problem or "not YAML"
    if "single document" in (error.context or ""):
        return Problem(line, column, "a second document starts here; a config is one YAML document, keep each in a file of its own")
    hint = ""
    if mark and mark.buffer and mark.pointer < len(mark.buffer) and mark.buffer[mark.pointer] == "\t":
        hint = "; indent with spaces, YAML allows no tabs there"
    begun = error.context_mark
    start = f" (begun at {begun.line + 1}:{begun.column + 1})" if begun and begun is not mark and begun.index != getattr(mark, "index", None) else ""
    context = f" {error.context}{start}" if error.context else ""
    return Problem(line, column, f"not valid YAML{context}: {message}{hint}")


class _Reader:
    """Turns nodes into plain data, filling in the positions of a Document."""

    def __init__(self, document: Document, file: str, most_values: int) -> None:
        self.document, self.file, self.most_values = document, file, most_values
        self.count = 0
        self.open: set[int] = set()  # ids of the nodes that are being read: an alias to one of them is a cycle

    def read_root(self, node: yaml.Node) -> None:
        self.document.data = self._read(node, ())

    def _read(self, node: yaml.Node, path: Path) -> Any:
        position = _position(node)
        self.count += 1
        if self.count > self.most_values:
            raise ConfigError(f"more than {self.most_values} values, those of expanded aliases included; write the values out", f"{self.file}:1:1")
        if id(node) in self.open:
            raise ConfigError("an alias contains itself; write the values out", f"{self.file}:{position[0]}:{position[1]}")
        self.document.values.setdefault(path, position)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self.open.add(id(node))
        read = self._mapping if isinstance(node, yaml.MappingNode) else self._sequence
        value = read(node, path)
        self.open.remove(id(node))
        return value

    def _sequence(self, node: Any, path: Path) -> list[Any]:
        self._check_tag(node, "seq")
        return [self._read(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        self._check_tag(node, "map")
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            position = _position(key_node)
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else NotText("", "a list or mapping")
            if isinstance(key, NotText):
                fix = "write the values out" if key.text == "<<" else f"quote it: '{key.text}'" if key.text else "write a name"
                self.document.report(position, f"a key must be a name, found {key}; {fix}")
                continue
            at = (*path, key)
            if key in data:
                self.document.report(position, f"{key!r} is given twice, first in line {self.document.keys[at][0]}; keep one of them")
                continue
            self.document.keys[at] = position
            data[key] = self._read(value_node, at)
        return data

    def _scalar(self, node: yaml.ScalarNode) -> str | NotText:
        tag = node.tag.removeprefix(_TAG)
        if tag in _KINDS:
            return NotText(node.value, _KINDS[tag])
        self._check_tag(node, "str")
        return node.value

    def _check_tag(self, node: yaml.Node, expected: str) -> None:
        if node.tag != _TAG + expected:
            self.document.report(_position(node), f"the tag {node.tag!r} is not accepted; a config holds names, lists and mappings only")


def _position(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
