"""Reading configs: what is read, and every message with its position."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.config import Config, Source
from hal.config_file import load, shipped
from hal.errors import ConfigError

BACKENDS = ("triton", "reference", "ixformer")
OPS = ("flash_decode", "flash_prefill", "merge_states", "plan_decode", "write_kv")
GOOD = "name: mine\nbackends: [triton, reference]\n"

Read = Callable[..., Config]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Load a text as ./c.yaml of the current folder, so that messages start with `c.yaml:`."""
    monkeypatch.chdir(tmp_path)

    def load_text(content: str | bytes, **kwargs: object) -> Config:
        Path("c.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
        return load("c.yaml", backends=BACKENDS, ops=OPS, packages=("triton", "ixformer"), **kwargs)  # type: ignore[arg-type]

    return load_text


def messages(read: Read, content: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(content)
    return str(caught.value).splitlines()


def test_everything_is_read(read: Read) -> None:
    config = read(
        """\
name: mine
description: for the lab
match: {type: cuda, vendor: nvidia, name: ["NVIDIA H*"], arch: ">=9.0"}
backends: [triton, reference]
ops:
  flash_decode: triton
  flash_prefill: [reference]
  write_kv: {use: [reference, triton], reason: "measured"}
  merge_states: {use: reference}
disable:
- {backend: triton, op: merge_states, reason: "wrong LSE"}
- {backend: ixformer, reason: "not here"}
versions: {triton: ">=3.1"}
fallback: error
validate: always
"""
    )
    assert config.name == "mine"
    assert config.source == Source("argument", "c.yaml")
    assert (config.fallback, config.validate, dict(config.versions)) == ("error", "always", {"triton": ">=3.1"})
    assert config.default.backends == ("triton", "reference")
    assert config.default.source == Source("file", "c.yaml:4")
    found = {op: (c.backends, c.explicit, c.reason, c.source.where) for op, c in config.ops.items()}
    assert found == {
        "flash_decode": (("triton",), True, "", "c.yaml:6"),
        "flash_prefill": (("reference",), False, "", "c.yaml:7"),
        "write_kv": (("reference", "triton"), False, "measured", "c.yaml:8"),
        "merge_states": (("reference",), True, "", "c.yaml:9"),
    }
    disabled = [(d.backend, d.op, d.reason, d.source) for d in config.disabled]
    assert disabled == [
        ("triton", "merge_states", "wrong LSE", Source("file", "c.yaml:11")),
        ("ixformer", None, "not here", Source("file", "c.yaml:12")),
    ]


def test_defaults(read: Read) -> None:
    config = read(GOOD)
    assert (config.fallback, config.validate, dict(config.ops), dict(config.versions), config.disabled) == ("warn", "first", {}, {}, ())


def test_one_name_for_all_ops_is_explicit(read: Read) -> None:
    assert read("name: a\nbackends: triton\n").default.explicit
    assert not read("name: a\nbackends: [triton]\n").default.explicit


@pytest.mark.parametrize("text", ["off", "Off", "OFF", "'off'"])
def test_validate_off_may_stay_unquoted(read: Read, text: str) -> None:
    assert read(f"{GOOD}validate: {text}\n").validate == "off"


def test_an_empty_version_window_accepts_any_version(read: Read) -> None:
    assert read(f"{GOOD}versions: {{triton: ''}}\n").versions == {"triton": ""}


def test_byte_order_mark_crlf_comments_and_anchors_are_fine(read: Read) -> None:
    config = read(b"\xef\xbb\xbf# a comment\r\nname: a\r\nbackends: &chain [triton, reference]\r\nops: {write_kv: *chain}\r\n")
    assert config.ops["write_kv"].backends == ("triton", "reference")
    assert config.ops["write_kv"].source.where == "c.yaml:4"


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("fallbak: warn", "c.yaml:3:1: unknown key 'fallbak'; "
         "accepted: backends, description, disable, fallback, match, name, ops, tuning, validate, versions; "
         "did you mean 'fallback'?"),
        ("ops: {flash_decod: triton}", "c.yaml:3:7: unknown op 'flash_decod'; "
         "accepted: flash_decode, flash_prefill, merge_states, plan_decode, write_kv; "
         "did you mean 'flash_decode'?"),
        ("ops: {write_kv: tritn}", "c.yaml:3:17: `ops.write_kv`: unknown backend 'tritn'; accepted: ixformer, reference, triton; "
         "did you mean 'triton'?"),
        ("ops: {write_kv: {use: [cuda]}}", "c.yaml:3:24: `ops.write_kv.use[0]`: unknown backend 'cuda'; accepted: ixformer, reference, triton"),
        ("ops: {write_kv: {use: [triton], reson: x}}", "c.yaml:3:33: unknown key 'reson'; accepted: reason, use; did you mean 'reason'?"),
        ("ops: {write_kv: {reason: x}}", "c.yaml:3:17: the key `use` is missing in `ops.write_kv`; add it"),
        ("ops: {write_kv: {use: {a: b}}}", "c.yaml:3:23: `ops.write_kv.use` must be the name of a backend, or a list of such names "
         "(ixformer, reference, triton), found a mapping"),
        ("ops: {write_kv: no}", "c.yaml:3:17: `ops.write_kv` must be the name of a backend, or a list of such names "
         "(ixformer, reference, triton), found `no`, which YAML reads as a boolean; quote it: 'no'"),
        ("ops: {write_kv: []}", "c.yaml:3:17: `ops.write_kv`: the list is empty; give at least one name, or leave the key out"),
        ("ops: {write_kv: [triton, triton]}", "c.yaml:3:26: 'triton' stands twice in this chain; keep the first"),
        ("ops:", "c.yaml:3:5: `ops` must be a mapping, found nothing; give a value, or leave the key out"),
        ("ops: [write_kv]", "c.yaml:3:6: `ops` must be a mapping, found a list"),
        ("ops: {on: triton}", "c.yaml:3:7: a key must be a name, found `on`, which YAML reads as a boolean; quote it: 'on'"),
        ("disable: [{backend: triton}]", "c.yaml:3:11: the key `reason` is missing in `disable[0]`; add it"),
        ("disable: [{backend: triton, reason: ' '}]", "c.yaml:3:37: `disable[0].reason`: must not be empty; write a few words"),
        ("disable: [{backend: triton, reason: x, op: wrte_kv}]", "c.yaml:3:44: `disable[0].op`: unknown op 'wrte_kv'; accepted: "
         "flash_decode, flash_prefill, merge_states, plan_decode, write_kv; did you mean 'write_kv'?"),
        ("disable: [triton]", "c.yaml:3:11: `disable[0]` must be a mapping, found 'triton'"),
        ("disable: triton", "c.yaml:3:10: `disable` must be a list, found 'triton'"),
        ("versions: {triton: 3.1}", "c.yaml:3:20: `versions.triton` must be a text, found `3.1`, which YAML reads as a number; "
         "write a window such as '>=3.1'"),
        ("versions: {triton: '3.1'}", "c.yaml:3:20: `versions.triton`: '3.1' is no version window; accepted: operators with versions, "
         "such as '>=3.1,<4', or '' for any version"),
        ("versions: {triton: }", "c.yaml:3:19: `versions.triton` must be a text, found nothing; give a value, or leave the key out"),
        ("versions: {tritn: '>=3'}", "c.yaml:3:12: unknown package 'tritn'; accepted: ixformer, triton; did you mean 'triton'?"),
        ("fallback: wran", "c.yaml:3:11: `fallback` must be one of 'warn', 'error' or 'allow', found 'wran'; did you mean 'warn'?"),
        ("validate: no", "c.yaml:3:11: `validate` must be one of 'always', 'first' or 'off', found `no`, which YAML reads as a boolean"),
        ("match: {type: cdua}", "c.yaml:3:15: `match.type` must be one of 'cpu', 'cuda', 'hpu', 'mps', 'npu' or 'xpu', found 'cdua'; "
         "did you mean 'cuda'?"),
        ("match: {arch: 9.0}", "c.yaml:3:15: `match.arch` must be a text, found `9.0`, which YAML reads as a number; write a window such as '>=9.0'"),
        ("match: {arch: ''}", "c.yaml:3:15: `match.arch`: '' is no window of compute capabilities; "
         "accepted: operators with versions, such as '>=9.0,<10.0'"),
        ("match: {name: H200}", "c.yaml:3:15: `match.name` must be a list, found 'H200'; write ['H200']"),
        ("match: {nam: [x]}", "c.yaml:3:9: unknown key 'nam'; accepted: arch, name, type, vendor; did you mean 'name'?"),
        ("description: 2024-01-01", "c.yaml:3:14: `description` must be a text, found `2024-01-01`, which YAML reads as a date; "
         "quote it: '2024-01-01'"),
        ("name: twice", "c.yaml:3:1: 'name' is given twice, first in line 1; keep one of them"),
        ("ops: {write_kv: triton, write_kv: reference}", "c.yaml:3:25: 'write_kv' is given twice, first in line 3; keep one of them"),
        ("<<: {name: b}", "c.yaml:3:1: a key must be a name, found `<<`, which YAML reads as a merge key; write the values out"),
        ("? [a]\n: b", "c.yaml:3:3: a key must be a name, found a list or mapping; write a name"),
        ("description: !!python/name:os.system x", "c.yaml:3:14: the tag 'tag:yaml.org,2002:python/name:os.system' is not accepted; "
         "a config holds names, lists and mappings only"),
        ("description: '{braces}'\nfallback: '{x}'", "c.yaml:4:11: `fallback` must be one of 'warn', 'error' or 'allow', found '{x}'"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_place_and_its_remedy(read: Read, addition: str, message: str) -> None:
    assert messages(read, f"{GOOD}{addition}\n") == [message]


def test_all_mistakes_are_reported_in_file_order(read: Read) -> None:
    found = messages(
        read,
        """\
nam: x
backends: [triton, refrence, triton]
ops:
  flash_decod: triton
  write_kv: {use: [], why: x}
fallback: maybe
fallback: warn
""",
    )
    assert [line.split(": ")[0] for line in found] == [
        "c.yaml:1:1", "c.yaml:1:1", "c.yaml:2:20", "c.yaml:2:30", "c.yaml:4:3", "c.yaml:5:19", "c.yaml:5:23", "c.yaml:6:11", "c.yaml:7:1",
    ]  # fmt: skip
    assert "the key `name` is missing" in found[0]
    assert "unknown key 'nam'" in found[1]


def test_the_error_names_the_first_position(read: Read) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"{GOOD}a: b\nc: d\n")
    assert caught.value.where == "c.yaml:3:1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "c.yaml:1:1: the file is empty; a config needs at least `name:` and `backends:`"),
        ("# only a comment\n", "c.yaml:1:1: the file is empty; a config needs at least `name:` and `backends:`"),
        ("- a\n", "c.yaml:1:1: a config is a mapping of keys such as `name:` and `backends:`, found a list"),
        ("\n\nhello\n", "c.yaml:3:1: a config is a mapping of keys such as `name:` and `backends:`, found 'hello'"),
        ("name: a\n\tbackends: b\n",
         "c.yaml:2:1: not valid YAML while scanning for the next token: found character '\\t' that cannot start any token; "
         "indent with spaces, YAML allows no tabs there"),
        ("name: a\nbackends: [triton\nops: x\n", "c.yaml:3:4: not valid YAML while parsing a flow sequence (begun at 2:11): "
         "expected ',' or ']', but got ':'"),
        ("name: a\n---\nname: b\n", "c.yaml:2:1: a second document starts here; a config is one YAML document, keep each in a file of its own"),
        (b"name: a\nback\xffends: x\n", "c.yaml:2:5: byte 0xff is not UTF-8; save the file as UTF-8"),
        (b"\xff\xfen\x00", "c.yaml:1:1: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("name: a\nba\x07ckends: b\n", "c.yaml:2:3: the character U+0007 is not allowed in YAML; remove it"),
        ("name: &a [*a]\n", "c.yaml:1:7: an alias contains itself; write the values out"),
        ("name: a\nbackends: *nobody\n", "c.yaml:2:11: not valid YAML: found undefined alias 'nobody'"),
        ("a: " + "[" * 5000, "c.yaml:1:1: nested too deeply; a config needs four levels at most"),
    ],
)  # fmt: skip
def test_files_that_are_no_config(read: Read, content: str | bytes, message: str) -> None:
    assert messages(read, content) == [message]


def test_nested_aliases_cannot_fill_the_memory(read: Read) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert messages(read, "\n".join(lines)) == ["c.yaml:1:1: more than 10000 values, those of expanded aliases included; write the values out"]


def test_python_objects_are_never_made(read: Read, tmp_path: Path) -> None:
    victim = tmp_path / "made"
    found = messages(read, f"{GOOD}description: !!python/object/apply:os.mkdir ['{victim}']\n")
    assert not victim.exists()
    assert any("python/object/apply:os.mkdir' is not accepted" in line for line in found)


@pytest.mark.parametrize(("kind", "where"), [("argument", "config 'nvidia_hopper'"), ("environment", "HAL_CONFIG=nvidia_hopper")])
def test_an_unknown_shipped_name(kind: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("nvidia_hopper", backends=BACKENDS, ops=OPS, source_kind=kind)  # type: ignore[arg-type]
    assert caught.value.where == where
    assert f"shipped are: {', '.join(shipped())}; did you mean 'nvidia-hopper'?" in str(caught.value)


def test_a_missing_file_names_its_nearest_neighbour(read: Read) -> None:
    read(GOOD)
    os.rename("c.yaml", "nodes.yaml")
    with pytest.raises(ConfigError, match=r"^config 'node.yaml': no such file; did you mean 'nodes.yaml'\? shipped configs are: cpu, "):
        load("node.yaml", backends=BACKENDS, ops=OPS)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    def message(path: str | Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load(path, backends=BACKENDS, ops=OPS)
        return str(caught.value)

    assert "the path is empty" in message("  ")
    assert message(tmp_path) == f"config {str(tmp_path)!r}: is a folder; give the YAML file in it"
    assert "the folder" in message(tmp_path / "nowhere" / "a.yaml")
    assert "cannot be read: embedded null byte" in message("a\0.yaml")
    assert "cannot be read: Not a directory" in message("/dev/null/a.yaml")
    big = tmp_path / "big.yaml"
    big.write_text("#" * (1 << 20) + "\n")
    assert "is larger than 1 MiB" in message(big)


def test_a_file_without_suffix_can_be_named_by_its_path(read: Read) -> None:
    read(GOOD)
    os.rename("c.yaml", "plain")
    assert load("./plain", backends=BACKENDS, ops=OPS).name == "mine"
    assert load("plain", backends=BACKENDS, ops=OPS).name == "mine"


def test_a_shipped_name_wins_over_a_file_of_that_name(read: Read) -> None:
    read(GOOD)
    os.rename("c.yaml", "cpu")
    assert load("cpu", backends=BACKENDS, ops=OPS).default.source.where.startswith("configs/cpu.yaml:")
    assert load("./cpu", backends=BACKENDS, ops=OPS).name == "mine"


def test_who_named_the_file_is_kept(read: Read) -> None:
    assert read(GOOD, source_kind="environment").source == Source("environment", "HAL_CONFIG=c.yaml")
    assert load(Path("c.yaml"), backends=BACKENDS, ops=OPS).source == Source("argument", "c.yaml")


def test_importing_hal_loads_neither_yaml_nor_pydantic() -> None:
    code = "import sys, hal; print([m for m in ('yaml', 'pydantic', 'typer', 'rich') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert run.stdout.strip() == "[]"


_TOKENS = [
    "name", "backends", "ops", "match", "use", "reason", "triton", "reference", "write_kv", "disable", "versions", "validate", "off", "~", "1.5",
    "'", '"', "[", "]", "{", "}", ",", "&a ", "*a", "!!set ", "<use>", "#", "|", ">", "<<", ": ", ":\n", "\n", "\n  ", "\n- ", "- ", "? ", "|\n",
    "\t", "---\n", "\x00", "\\n", "é", "\ufeff", "\x85",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_TOKENS), max_size=30).map("".join))
def test_any_text_is_a_config_or_a_clean_error(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "c.yaml")
        file.write_text(GOOD + text, encoding="utf-8", newline="")
        try:
            load(file, backends=BACKENDS, ops=OPS)
        except ConfigError as error:
            lines = (GOOD + text).splitlines() or [""]
            for message in str(error).splitlines():
                found = re.match(rf"{re.escape(str(file))}:(\d+):(\d+): \S", message)
                assert found, message
                assert 1 <= int(found[1]) <= len(lines) + 1
