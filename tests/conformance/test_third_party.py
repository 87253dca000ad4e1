"""A backend of another distribution: found by its entry point, run through the whole suite from somewhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.runs import Suite, environment, pytest_run, python


def test_found_by_its_entry_point(acme: Path, tmp_path: Path) -> None:
    code, text = python("-c", "import hal; print(hal.get_backend('acme').explain('merge_states'))", cwd=tmp_path, env=environment(acme))
    assert code == 0, text
    assert "acme: runs" in text


def test_left_out_by_hal_plugins(acme: Path, suite: Suite) -> None:
    run = suite("acme", acme, keyword="by_hand", HAL_PLUGINS="")
    assert run.code == 4
    assert "HAL_PLUGINS leaves out: acme" in run.text


def test_whole_suite(acme: Path, suite: Suite) -> None:
    """Conforms, with refusals; and in a full run, a waiver that nobody needs is the only thing to complain about."""
    run = suite("acme", acme, waivers="- {backend: acme, tests: 'test_gone.*', reason: r, link: 'https://example.org'}\n")
    assert run.report["full"]
    counts = run.report["counts"]
    assert counts["FAIL"] == counts["WAIVED"] == 0, run.text[-3000:]
    assert run.report["problems"] == ["waiver 'test_gone.*' matches no case; remove it"]
    assert run.code == 1
    assert counts["PASS"] > 100
    assert counts["REFUSED"] > 100
    for op in ("flash_decode", "merge_states"):
        assert run.report["ops"][op]["declared"]
        assert run.report["ops"][op]["executed"] > 20
    refused = [c for c in run.report["cases"] if c["outcome"] == "REFUSED"]
    assert all(c["reasons"] for c in refused)
    assert any(r.startswith("FEATURE: acme does not serve sinks") for c in refused for r in c["reasons"])
    assert any(r.startswith("NOT_IMPLEMENTED") for c in refused for r in c["reasons"])
    # acme's code ignores what its gate refuses: a case that passes regardless could not tell that an argument is ignored.
    blind = [c["id"] for c in refused if c["warnings"] and any(r.startswith(("FEATURE", "LAYOUT")) for r in c["reasons"])]
    assert blind == []


def test_cases_can_be_imported_into_a_repository_of_its_own(acme: Path, tmp_path: Path) -> None:
    (tmp_path / "test_acme.py").write_text("from hal.conformance.test_merge import *\n")
    code, text = pytest_run("test_acme.py", "--hal-backend", "acme", "-q", cwd=tmp_path, env=environment(acme))
    assert code == 0, text
    assert "acme conforms (part of the suite ran)" in text


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds(acme: Path, tmp_path: Path, seed: int) -> None:
    code = f"import sys; from hal.conformance.run import run; sys.exit(run('acme', seed={seed}, keyword='test_merge or test_properties'))"
    status, text = python("-c", code, cwd=tmp_path, env=environment(acme))
    assert status == 0, text
    assert f"seed {seed}" in text
