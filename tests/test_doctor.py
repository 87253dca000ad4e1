"""The diagnosis: complete, plain, and readable."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hal.backend
import hal.detect
from hal import doctor
from hal.device import DeviceInfo
from hal.doctor import Diagnosis, diagnose
from hal.doctor_view import console, render_diagnosis, render_report
from hal.ops import OPS
from hal.registry import BrokenPlugin, Registry

pytest_plugins = ("tests.fake_backends",)

CPU = DeviceInfo("cpu", 0, "cpu", "x86_64", None, 8)
GPUS = [DeviceInfo("cuda", index, "nvidia", "NVIDIA H200", (9, 0), 132, 150_000_000_000) for index in range(2)]


def broken_plugin() -> BrokenPlugin:
    try:
        raise ImportError("libacme.so: undefined symbol: acme_go[1]")
    except ImportError as error:
        return BrokenPlugin("acme", "acme-kernels", error)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, fake_registry: Callable[..., Registry]) -> list[DeviceInfo]:
    """A machine with two GPUs, the fake built-ins, a broken plug-in and one that HAL_PLUGINS leaves out."""
    devices = [*GPUS, CPU]
    for name in doctor.FOREIGN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "local_devices", lambda: devices)
    monkeypatch.setattr(hal.detect, "local_devices", lambda: devices)
    monkeypatch.setattr(hal.backend, "probe", lambda device: next(d for d in devices if device in (d.type, f"{d.type}:{d.index}")))
    monkeypatch.setattr(hal.backend, "discover", lambda plugins: fake_registry((broken_plugin(),), ("other",)))
    return devices


def drawn(diagnosis: Diagnosis) -> str:
    stream = io.StringIO()
    console(stream).print(render_diagnosis(diagnosis))
    return stream.getvalue()


@pytest.mark.usefixtures("machine")
def test_every_op_on_every_device_has_a_report() -> None:
    found = diagnose()
    assert [(r.op, f"{r.device.type}:{r.device.index}") for r in found.reports] == [(op, d) for d in ("cuda:0", "cuda:1", "cpu:0") for op in OPS]
    chosen = {(r.op, r.device.type): r.chosen for r in found.reports}
    assert chosen[("flash_decode", "cuda")] == "triton"
    assert chosen[("flash_prefill", "cuda")] == "reference"
    assert chosen[("flash_decode", "cpu")] == "reference"
    assert found.problem == ""
    assert found.config is not None
    assert found.config.name == "nvidia-hopper"


@pytest.mark.usefixtures("machine")
def test_the_plain_data_is_complete_and_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CONFIG", "nvidia-ampere")
    data = json.loads(json.dumps(diagnose().to_dict()))
    assert data == json.loads(json.dumps(diagnose().to_dict()))
    assert set(data) == {"versions", "devices", "environment", "config", "backends", "ops", "problem"}
    assert {"hal", "backend interface", "op contracts", "python", "torch", "triton", "ixformer", "transformers"} <= set(data["versions"])
    assert [device["name"] for device in data["devices"]] == ["NVIDIA H200", "NVIDIA H200", "x86_64"]
    assert data["environment"] == {"HAL_CONFIG": "nvidia-ampere"}
    assert data["config"]["source"] == {"kind": "environment", "where": "HAL_CONFIG=nvidia-ampere"}
    assert data["config"]["default"]["source"]["where"].startswith("configs/nvidia-ampere.yaml:")
    rows = {row["name"]: row for row in data["backends"]}
    assert rows["triton"]["ops"] == [op for op in OPS if op != "flash_prefill"]
    assert (rows["acme"]["origin"], rows["acme"]["error"]) == ("acme-kernels", "ImportError: libacme.so: undefined symbol: acme_go[1]")
    assert "Traceback" in rows["acme"]["traceback"]
    assert rows["other"]["error"] == "left out by HAL_PLUGINS"
    prefill = next(op for op in data["ops"] if op["op"] == "flash_prefill")
    assert prefill["decided_by"]["where"].startswith("configs/nvidia-ampere.yaml:")
    reasons = {c["backend"]: [r["code"] for r in c["reasons"]] for c in prefill["candidates"]}
    assert reasons == {"triton": ["NOT_IMPLEMENTED"], "reference": [], "ixformer": ["DISABLED_BY_CONFIG"]}


@pytest.mark.usefixtures("machine")
def test_the_drawing_shows_the_trail_within_100_columns() -> None:
    text = drawn(diagnose())
    assert max(map(len, text.splitlines())) <= 100
    for expected in (
        "NVIDIA H200",
        "139.7 GiB",
        "detection (cuda:0 NVIDIA H200, sm_90 takes configs/nvidia-hopper.yaml)",
        "ImportError: libacme.so: undefined symbol: acme_go[1]",  # brackets are no markup
        "left out by HAL_PLUGINS",
        "Ops on cuda:0 NVIDIA H200, sm_90 (the same on cuda:1)",
        "Ops on cpu x86_64",
        "triton: NOT_IMPLEMENTED: triton does not serve flash_prefill",
        "triton: DEVICE: triton serves cuda tensors; these are on cpu",
        "file (configs/nvidia-hopper.yaml:",
        "not asked for (DISABLED_BY_CONFIG): ixformer",
        "Variables: none is set (HAL_BACKEND, HAL_CACHE_DIR, HAL_CONFIG, HAL_PLUGINS)",
    ):
        assert expected in text, expected
    assert text.count("Ops on") == 2


@pytest.mark.usefixtures("machine")
def test_settings_of_a_config_are_drawn_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        'name: mine\nbackends: [triton, reference]\nops:\n  write_kv: {use: reference, reason: "comparing [a] with [b]"}\n'
        "disable: [{backend: triton, op: merge_states, reason: wrong LSE}]\nversions: {triton: '>=99'}\nfallback: allow\nvalidate: off\n"
    )
    text = drawn(diagnose(config="mine.yaml"))
    for expected in (
        "argument (mine.yaml)",
        "allow (when the reference stands in)",
        "off (arguments checked)",
        "triton >=99 replaces the backend's own window",
        "triton for merge_states: wrong LSE (file (mine.yaml:5))",
        "file (mine.yaml:4): only reference",
        "because comparing [a] with [b]",
        "triton: VERSION: triton is ",
        "needed >=99",
        "DISABLED_BY_CONFIG: disabled by file (mine.yaml:5)",
    ):
        assert expected in text, expected


@pytest.mark.usefixtures("machine")
def test_an_explicit_backend_is_shown_with_what_it_cannot_serve() -> None:
    found = diagnose("triton")
    prefill = next(r for r in found.reports if r.op == "flash_prefill")
    assert prefill.chosen is None
    assert prefill.choice.explicit
    text = drawn(found)
    assert "argument (backend='triton'): only triton" in text
    assert "nothing" in text


@pytest.mark.usefixtures("machine")
def test_one_report_is_drawn_alone() -> None:
    report = next(r for r in diagnose().reports if r.op == "write_kv")
    stream = io.StringIO()
    console(stream).print(render_report(report))
    assert stream.getvalue().startswith("write_kv on cuda:0 NVIDIA H200, sm_90")
    assert "triton: runs (triton " in stream.getvalue()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("variable", "value", "problem", "rows"),
    [
        ("HAL_BACKEND", "trito", "unknown backend 'trito' (environment (HAL_BACKEND=trito)); did you mean 'triton'?", 5),
        ("HAL_CONFIG", "hopper", "HAL_CONFIG=hopper: no such shipped config", 5),
        ("HAL_BACKND", "triton", "HAL_BACKND: unknown variable; did you mean HAL_BACKEND?", 0),
    ],
)
def test_a_problem_is_shown_and_hides_nothing_else(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str, rows: int) -> None:
    monkeypatch.setenv(variable, value)
    found = diagnose()
    assert found.problem.startswith(problem)
    assert len(found.backends) == rows
    assert (found.config, found.reports) == (None, ())
    text = " ".join(drawn(found).split())
    assert "NVIDIA H200" in text
    assert f"{variable} {value}" in text
    assert f"Problem: {problem}" in text


@pytest.mark.usefixtures("machine")
def test_foreign_variables_that_change_the_outcome_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HAL_OTHER", "x")
    found = diagnose()
    assert found.variables == {"CUDA_VISIBLE_DEVICES": "0,1", "HAL_OTHER": "x"}
    text = " ".join(drawn(found).split())
    assert "CUDA_VISIBLE_DEVICES 0,1 which GPUs this process sees" in text
    assert "HAL_OTHER x unknown to hal, no effect" in text


def test_versions_are_read_without_importing() -> None:
    code = (
        "import sys, hal.doctor; found = hal.doctor.package_versions();"
        "print(found['transformers'] != '', [m for m in ('triton', 'transformers', 'ixformer') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert run.stdout.strip() == "True []"


def test_a_module_without_metadata_is_not_called_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ixformer.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.package_versions()["ixformer"] == "present, version unknown"
