"""The configs that ship, and the JSON Schema that describes them to editors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hal.config_file import read, shipped, shipped_path, vocabulary
from hal.config_schema import Known, json_schema
from hal.ops import OPS
from hal.registry import Registry

pytest_plugins = ("tests.fake_backends",)

KNOWN = Known(("ixformer", "reference", "triton"), tuple(OPS), ("ixformer", "triton"))


@pytest.mark.parametrize("name", shipped())
def test_each_is_valid_named_after_its_file_and_explained(name: str) -> None:
    parsed = read(name, KNOWN)
    assert parsed.config.name == name
    assert parsed.description
    assert parsed.match is not None
    assert parsed.config.default.backends[-1] == "reference", "a shipped chain ends in what runs anywhere"
    assert not parsed.config.default.explicit
    assert not any(choice.explicit for choice in parsed.config.ops.values()), "a shipped config makes no explicit request"
    assert Path(shipped_path(name)).read_text(encoding="utf-8").startswith("# ")


def test_iluvatar_configs_say_what_they_were_checked_against() -> None:
    texts = [Path(shipped_path(name)).read_text(encoding="utf-8") for name in shipped() if name.startswith("iluvatar")]
    assert len(texts) == 3
    assert all("Checked against the recorded API of ixformer only; no such machine at hand." in text for text in texts)


@pytest.mark.parametrize("name", shipped())
def test_what_a_comment_suggests_is_valid(name: str, tmp_path: Path) -> None:
    """Commented-out settings are tried: a comment that teaches must not teach a mistake."""
    text = Path(shipped_path(name)).read_text(encoding="utf-8")
    keys = "fallback|versions|disable|ops|backends"
    suggested = re.findall(rf"^#   ((?:{keys}):.*(?:\n#     .*)*)", text, flags=re.MULTILINE)
    for n, setting in enumerate(suggested):
        file = tmp_path / f"{n}.yaml"
        file.write_text("name: a\nbackends: [triton, reference]\n" + setting.replace("\n#   ", "\n") + "\n")
        assert read(file, KNOWN).config.name == "a"
    assert suggested or name not in ("nvidia-hopper", "iluvatar", "iluvatar-bi-v100", "iluvatar-bi-v150")


def test_vocabulary_holds_every_name_of_the_installation(fake_registry: Callable[..., Registry]) -> None:
    assert vocabulary(fake_registry()) == KNOWN


def test_schema_knows_the_names_of_this_installation() -> None:
    schema = json_schema(KNOWN)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["name", "backends"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["ops"]["propertyNames"] == {"enum": sorted(KNOWN.ops)}
    name, chain, use = schema["properties"]["ops"]["additionalProperties"]["oneOf"]
    assert name["enum"] == chain["items"]["enum"] == sorted(KNOWN.backends)
    assert (chain["minItems"], chain["uniqueItems"], use["$ref"]) == (1, True, "#/$defs/UseModel")
    disable = schema["$defs"]["DisableModel"]
    assert disable["required"] == ["backend", "reason"]
    assert disable["properties"]["op"]["enum"] == sorted(KNOWN.ops)
    assert schema["properties"]["validate"]["enum"] == ["always", "first", "off", False]
    assert '"null"' not in str(schema).replace("'", '"')


@pytest.mark.parametrize("name", shipped())
def test_schema_accepts_the_shipped_configs(name: str) -> None:
    schema = json_schema(KNOWN)
    data = yaml.safe_load(Path(shipped_path(name)).read_text(encoding="utf-8"))
    assert _accepts(schema, data, schema)


@pytest.mark.parametrize(
    "data",
    [
        {"name": "a"},
        {"name": "a", "backends": "tritn"},
        {"name": "a", "backends": []},
        {"name": "a", "backends": ["triton", "triton"]},
        {"name": "a", "backends": "triton", "fallbak": "warn"},
        {"name": "a", "backends": "triton", "ops": {"flash_decod": "triton"}},
        {"name": "a", "backends": "triton", "ops": {"write_kv": {"reason": "x"}}},
        {"name": "a", "backends": "triton", "disable": [{"backend": "triton"}]},
        {"name": "a", "backends": "triton", "versions": {"triton": 3.1}},
        {"name": "a", "backends": "triton", "validate": True},
    ],
    ids=str,
)
def test_schema_refuses_what_the_loader_refuses(data: Any) -> None:
    schema = json_schema(KNOWN)
    assert not _accepts(schema, data, schema)


def _accepts(schema: dict[str, Any], data: Any, root: dict[str, Any]) -> bool:
    """A judge for the part of JSON Schema that the config schema uses; it refuses to guess about anything else."""
    judges = {
        "$ref": lambda v: _accepts(root["$defs"][v.removeprefix("#/$defs/")], data, root),
        "type": lambda v: isinstance(data, {"string": str, "object": dict, "array": list}[v]),
        "enum": lambda v: any(data == option and type(data) is type(option) for option in v),
        "oneOf": lambda v: sum(_accepts(option, data, root) for option in v) == 1,
        "required": lambda v: all(key in data for key in v),
        "properties": lambda v: all(_accepts(v[key], value, root) for key, value in data.items() if key in v),
        "additionalProperties": lambda v: all(
            v is not False and _accepts(v, value, root) for key, value in data.items() if key not in schema.get("properties", {})
        ),
        "propertyNames": lambda v: all(_accepts(v, key, root) for key in data),
        "items": lambda v: all(_accepts(v, item, root) for item in data),
        "minItems": lambda v: len(data) >= v,
        "minLength": lambda v: len(data) >= v,
        "uniqueItems": lambda v: len({str(item) for item in data}) == len(data),
    }
    notes = {"$schema", "$defs", "title", "description", "default"}
    assert schema.keys() <= judges.keys() | notes, f"the judge does not know {schema.keys() - judges.keys() - notes}"
    if "type" in schema and not judges["type"](schema["type"]):
        return False
    return all(judges[key](value) for key, value in schema.items() if key in judges)
