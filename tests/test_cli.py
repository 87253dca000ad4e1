"""The command line: output, exit codes, and clean errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import hal.backend
from hal import __version__, cli
from hal.config_file import shipped, shipped_path
from hal.errors import ModelError
from hal.registry import Registry
from hal.version import CONTRACT_VERSION

pytest_plugins = ("tests.fake_backends",)


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_registry: Callable[..., Registry]) -> Run:
    """Run `hal` in this process, with the fake built-in backends."""
    monkeypatch.setattr(hal.backend, "discover", lambda plugins: fake_registry())

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["hal", *arguments])
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def test_version(run: Run) -> None:
    assert run("--version") == Ran(0, f"hal {__version__} (backend interface 1, op contracts {CONTRACT_VERSION})\n", "")


def test_help_lists_the_commands(run: Run) -> None:
    text = run("--help").out
    assert all(command in text for command in ("doctor", "explain", "config", "conformance", "generate"))


@pytest.mark.parametrize("arguments", [("docter",), ("explain",), ("doctor", "--jsn"), ("config", "chek"), ("conformance",), ("generate",)])
def test_wrong_usage_is_exit_code_2(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err
    assert ran.err


def test_doctor_draws(run: Run) -> None:
    ran = run("doctor")
    assert ran.code == 0
    assert "Ops on cpu" in ran.out
    assert ran.err == ""


def test_doctor_json_is_json_alone(run: Run) -> None:
    ran = run("doctor", "--json", "--config", "cpu")
    assert ran.code == 0
    assert json.loads(ran.out)["config"]["source"] == {"kind": "argument", "where": "configs/cpu.yaml"}


def test_doctor_with_a_problem(run: Run) -> None:
    ran = run("doctor", "--json", "--backend", "trito")
    assert ran.code == 1
    assert "did you mean 'triton'?" in json.loads(ran.out)["problem"]
    assert ran.err.startswith("hal: unknown backend 'trito' (argument (backend='trito')); did you mean 'triton'?")


def test_explain(run: Run) -> None:
    ran = run("explain", "flash_prefill", "--config", "nvidia", "--device", "cpu")
    assert ran.code == 0
    assert "flash_prefill on cpu" in ran.out
    assert "triton: NOT_IMPLEMENTED: triton does not serve flash_prefill" in ran.out
    data = json.loads(run("explain", "flash_prefill", "--config", "nvidia", "--json").out)
    assert (data["chosen"], data["chain"]) == ("reference", ["triton", "reference"])


def test_explain_where_nothing_can_serve(run: Run) -> None:
    ran = run("explain", "flash_decode", "--backend", "triton", "--device", "cpu:0")
    assert ran.code == 1
    assert "nothing" in ran.out
    assert "triton: DEVICE:" in ran.out


def test_explain_refuses_unknown_ops_and_devices(run: Run) -> None:
    ran = run("explain", "flash_decod")
    assert (ran.code, ran.out) == (1, "")
    assert "did you mean 'flash_decode'?" in ran.err
    ran = run("explain", "flash_decode", "--device", "cuda:99")
    assert ran.code == 2
    assert "'cuda:99' is no device of this machine" in " ".join(ran.err.replace("│", " ").split())


def test_config_check(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text("name: good\nbackends: [reference]\n")
    Path("bad.yaml").write_text("name: bad\nbackends: [refrence]\nfallbak: warn\nversions: {tritn: '>=3'}\n")
    assert run("config", "check", "good.yaml", "cpu") == Ran(0, "good.yaml: ok (good)\ncpu: ok (cpu)\n", "")
    ran = run("config", "check", "bad.yaml", "good.yaml", "none.yaml")
    assert (ran.code, ran.out) == (1, "good.yaml: ok (good)\n")
    lines = ran.err.splitlines()
    assert lines[0].startswith("bad.yaml:2:12: `backends[0]`: unknown backend 'refrence'; ")
    assert lines[1].startswith("bad.yaml:3:1: unknown key 'fallbak'; ")
    assert lines[2] == "bad.yaml:4:12: unknown package 'tritn'; accepted: ixformer, triton; did you mean 'triton'?"
    assert lines[3].startswith("config 'none.yaml': no such file; ")
    assert len(lines) == 4


def test_config_schema(run: Run) -> None:
    ran = run("config", "schema")
    assert ran.code == 0
    assert json.loads(ran.out)["properties"]["ops"]["propertyNames"]["enum"] == sorted(hal.backend.OPS)


def test_config_list_and_show(run: Run) -> None:
    listed = run("config", "list").out.splitlines()
    assert [line.split()[0] for line in listed] == list(shipped())
    assert all(len(line.split()) > 3 for line in listed), "each has a description"
    assert run("config", "show", "cpu").out == Path(shipped_path("cpu")).read_text(encoding="utf-8")
    ran = run("config", "show", "hoper")
    assert ran.code == 1
    assert ran.err.startswith("hal: config 'hoper': no such shipped config; shipped are: cpu, ")


def test_an_error_of_hal_is_one_message_without_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_BACKND", "triton")
    ran = run("explain", "write_kv")
    assert ran == Ran(1, "", "hal: HAL_BACKND: unknown variable; did you mean HAL_BACKEND? Rename it, or unset it if it belongs to another program\n")


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plugins: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(hal.backend, "discover", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("explain", "write_kv")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (2, 1), (4, 2), (5, 1)])
def test_conformance_hands_its_options_on(run: Run, monkeypatch: pytest.MonkeyPatch, status: int, code: int) -> None:
    calls: list[tuple[Any, ...]] = []
    fake = ModuleType("hal.conformance.run")

    def suite(backend: str, **options: Any) -> int:
        calls.append((backend, options))
        return status

    fake.run = suite  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hal.conformance.run", fake)
    ran = run(
        "conformance",
        "--backend",
        "acme",
        "--device",
        "cpu",
        "--json",
        "r.json",
        "--markdown",
        "r.md",
        "--waivers",
        "w.yaml",
        "--seed",
        "7",
        "-k",
        "decode",
    )
    assert ran.code == code
    options = {"device": "cpu", "json_path": Path("r.json"), "markdown_path": Path("r.md"), "waivers": Path("w.yaml"), "seed": 7, "keyword": "decode"}
    assert calls == [("acme", options)]


def test_conformance_has_the_signature_that_is_called() -> None:
    import inspect

    from hal.conformance.run import run as suite

    assert list(inspect.signature(suite).parameters) == ["backend", "device", "json_path", "markdown_path", "waivers", "seed", "keyword"]


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (("conformance", "--backend", "reference"), "hypothesis", "conformance"),
        (("generate", "hello"), "gguf", "transformers"),
    ],
)
def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], module: str, extra: str) -> None:
    real = cli.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == module else real(name))
    ran = run(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"hal: this command needs {module}, which this Python does not have; install with: pip install 'hal-kernels[{extra}]'\n"


def test_generate_hands_its_options_on(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import hal.generate

    monkeypatch.setattr(cli, "find_spec", lambda name: True)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hal.generate, "generate", lambda prompts, options: calls.append((prompts, options)))
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert (
        run("generate", "zero", "--batch", str(file), "-m", "some/model", "-c", "cpu", "-n", "5", "--dtype", "bfloat16", "--raw", "--stats").code == 0
    )
    options = hal.generate.GenerateOptions(model="some/model", config="cpu", max_new_tokens=5, dtype="bfloat16", raw=True, stats=True)
    assert calls == [(["zero", "one", "two"], options)]
    assert run("generate", "zero").code == 0
    assert calls[1] == (["zero"], hal.generate.GenerateOptions())
    assert run("generate", "x", "-n", "0").code == 2


def test_generate_reports_model_errors_cleanly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import hal.generate

    def fail(prompts: object, options: object) -> None:
        raise ModelError("no such model")

    monkeypatch.setattr(cli, "find_spec", lambda name: True)
    monkeypatch.setattr(hal.generate, "generate", fail)
    assert run("generate", "x") == Ran(1, "", "hal: no such model\n")


def test_python_dash_m_is_the_same_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "hal", "--version"], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"hal {__version__} ")
