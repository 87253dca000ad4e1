"""The schema of a YAML config, version 1: what may stand where.

Data arrives from `hal.yaml_marks` and leaves as frozen models, which `hal.config_file` turns into a `hal.config.Config`.
pydantic knows no positions; its `loc` is mapped back onto the file by `hal.config_file`. The same models give the
JSON Schema for editors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from hal.config import Fallback, Validate
from hal.errors import nearest
from hal.yaml_marks import NotText

__all__ = ["ConfigModel", "DisableModel", "Known", "MatchModel", "UseModel", "json_schema", "model_at", "unknown_name"]


@dataclass(frozen=True)
class Known:
    """The names that a config may use. `packages` None means that any package may be named."""

    backends: tuple[str, ...]
    ops: tuple[str, ...]
    packages: tuple[str, ...] | None = None


def unknown_name(kind: str, name: str, accepted: Collection[str]) -> str:
    """Return the message for a name that nobody knows: the value, the accepted ones, the nearest of them."""
    return f"unknown {kind} {name!r}; accepted: {', '.join(sorted(accepted)) or 'none'};{nearest(name, accepted)}".rstrip(";")


def _error(text: str) -> PydanticCustomError:
    # The text goes in as a value: braces in it must not be taken for placeholders.
    return PydanticCustomError("hal", "{text}", {"text": text})


def _known(kind: str, name: str, accepted: Collection[str] | None) -> str:
    if accepted is not None and name not in accepted:
        raise _error(unknown_name(kind, name, accepted))
    return name


def _backend(name: str, info: ValidationInfo[Known]) -> str:
    return _known("backend", name, info.context.backends)


def _op(name: str, info: ValidationInfo[Known]) -> str:
    return _known("op", name, info.context.ops)


def _package(name: str, info: ValidationInfo[Known]) -> str:
    return _known("package", name, info.context.packages)


def _written(text: str) -> str:
    if not text.strip():
        raise _error("must not be empty; write a few words")
    return text


def _window(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise _error(f"{text!r} is no version window; accepted: operators with versions, such as '>=3.1,<4', or '' for any version") from None
    return text


def _arch_window(text: str) -> str:
    try:
        if not text.strip():
            raise InvalidSpecifier
        SpecifierSet(text)
    except InvalidSpecifier:
        raise _error(f"{text!r} is no window of compute capabilities; accepted: operators with versions, such as '>=9.0,<10.0'") from None
    return text


def _filled(chain: Any) -> Any:
    if not chain:
        raise _error("the list is empty; give at least one name, or leave the key out")
    return chain


def _off_as_text(value: Any) -> Any:
    # People write `validate: off`, which YAML 1.1 reads as a boolean.
    return "off" if isinstance(value, NotText) and value.text.lower() == "off" else value


# pydantic puts these tags into the location of an error: in brackets, they cannot be taken for keys of the file.
def _use_form(value: Any) -> str:
    return "<chain>" if isinstance(value, list) else "<name>"


def _op_form(value: Any) -> str:
    return "<use>" if isinstance(value, dict) else _use_form(value)


Text = Annotated[str, AfterValidator(_written), Field(json_schema_extra={"minLength": 1})]
BackendName = Annotated[str, AfterValidator(_backend), WithJsonSchema({"type": "string", "title": "backend"})]
OpName = Annotated[str, AfterValidator(_op), WithJsonSchema({"type": "string", "title": "op"})]
PackageName = Annotated[str, AfterValidator(_package)]
Chain = Annotated[tuple[BackendName, ...], AfterValidator(_filled), Field(json_schema_extra={"minItems": 1, "uniqueItems": True})]
DeviceType = Literal["cpu", "cuda", "hpu", "mps", "npu", "xpu"]
Vendor = Literal["amd", "cpu", "iluvatar", "nvidia", "unknown"]
Patterns = Annotated[tuple[Text, ...], AfterValidator(_filled)]
NameOrChain = Annotated[Annotated[BackendName, Tag("<name>")] | Annotated[Chain, Tag("<chain>")], Discriminator(_use_form)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UseModel(_Model):
    """A choice with its reason."""

    use: NameOrChain = Field(description="One name (explicit, never degrades) or a list (a chain, tried in order).")
    reason: Text = Field(default="", description="Why; shown by `hal doctor` and `explain`.")


class MatchModel(_Model):
    """Which devices a shipped config is for; every key that is given must match, and an empty block matches any device."""

    type: DeviceType | None = Field(default=None, description="torch device type; AMD and Iluvatar say cuda.")
    vendor: Vendor | None = Field(default=None, description="Maker of the device.")
    name: Patterns | None = Field(default=None, description="Glob patterns; one must match the name.")
    arch: Annotated[str, AfterValidator(_arch_window)] | None = Field(default=None, description="Window of compute capabilities.")


class DisableModel(_Model):
    """A backend that is left out."""

    backend: BackendName = Field(description="The backend to leave out.")
    op: OpName | None = Field(default=None, description="For this op only; without it, for all ops.")
    reason: Text = Field(description="Why; shown wherever the backend is missed.")


Selection = Annotated[
    Annotated[BackendName, Tag("<name>")] | Annotated[Chain, Tag("<chain>")] | Annotated[UseModel, Tag("<use>")],
    Discriminator(_op_form),
]


class ConfigModel(_Model):
    """A device config of hal, version 1."""

    name: Text = Field(description="Name of the device class.")
    description: Text = Field(default="", description="One or two sentences for people.")
    match: MatchModel | None = Field(default=None, description="Devices that detection gives a shipped config to.")
    backends: NameOrChain = Field(description="Backends for every op that `ops` does not name.")
    ops: dict[OpName, Selection] = Field(default={}, description="Choices for single ops.")
    disable: tuple[DisableModel, ...] = Field(default=(), description="Backends to leave out, each with its reason.")
    versions: dict[PackageName, Annotated[str, AfterValidator(_window)]] = Field(
        default={}, description="Package -> version window that replaces the backend's own: an opt-in to untested versions."
    )
    tuning: Text | None = Field(default=None, description="File of `hal tune`, relative to this one: measured choices of speed.")
    fallback: Fallback = Field(default="warn", description="What happens when the reference stands in for another backend of a chain.")
    validate_: Annotated[Validate, BeforeValidator(_off_as_text)] = Field(
        default="first",
        alias="validate",
        description="Which values inside tensors are read: of all tensors (always), of CPU tensors (first), none (off).",
    )


def model_at(location: tuple[str | int, ...]) -> type[BaseModel]:
    """Return the model of the mapping that holds the key at `location`; used to list the accepted keys."""
    inner: Mapping[str | int, type[BaseModel]] = {"match": MatchModel, "ops": UseModel, "disable": DisableModel}
    return inner[location[0]] if len(location) > 1 and location[0] in inner else ConfigModel


def json_schema(known: Known) -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) for editors, with the op and backend names of this installation as enums."""
    schema = ConfigModel.model_json_schema(by_alias=True)
    enums = {"backend": sorted(known.backends), "op": sorted(known.ops)}
    schema = _for_editors(schema, enums)
    schema["properties"]["ops"]["propertyNames"] = {"enum": enums["op"]}
    # `off` without quotes is a boolean to a YAML 1.1 editor; the loader accepts it.
    schema["properties"]["validate"] = {**schema["properties"]["validate"], "enum": ["always", "first", "off", False]}
    schema["properties"]["validate"].pop("type", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hal device config"}


def _for_editors(node: Any, enums: Mapping[str, list[str]]) -> Any:
    """Fill in the enums, and take out null, which stands for an absent key in the models but is refused in a file."""
    if isinstance(node, list):
        return [_for_editors(item, enums) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _for_editors(value, enums) for key, value in node.items() if not (key == "default" and value is None)}
    options = node.get("anyOf", ())
    if {"type": "null"} in options:
        (only,) = (option for option in options if option != {"type": "null"})
        node = only | {key: value for key, value in node.items() if key != "anyOf"}
    title = str(node.get("title")).lower()
    return {**node, "enum": enums[title]} if node.get("type") == "string" and title in enums else node
