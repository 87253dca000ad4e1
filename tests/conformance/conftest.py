"""Runs of the suite in processes of their own, with plug-ins that exist only there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.runs import ROOT, Run, Suite, environment, python

_RUN = "import sys; from pathlib import Path; from hal.conformance.run import run; sys.exit(run({backend!r}, {arguments}))"


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Run the suite against a backend from an empty folder: (backend, *paths of plug-ins, keyword, waivers, ...)."""

    def run(backend: str, *paths: Path, keyword: str | None = None, waivers: str | None = None, **variables: str) -> Run:
        folder = tmp_path / "elsewhere"
        folder.mkdir(exist_ok=True)
        arguments = f"json_path=Path('report.json'), keyword={keyword!r}"
        if waivers is not None:
            (folder / "waivers.yaml").write_text(waivers)
            arguments += ", waivers=Path('waivers.yaml')"
        code, text = python("-c", _RUN.format(backend=backend, arguments=arguments), cwd=folder, env=environment(*paths, **variables))
        report = folder / "report.json"
        return Run(code, text, json.loads(report.read_text()) if report.exists() else {})

    return run


@pytest.fixture(scope="session")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the third-party distribution installed in it."""
    source, target = tmp_path_factory.mktemp("source") / "acme_hal", tmp_path_factory.mktemp("acme")
    shutil.copytree(ROOT / "tests" / "plugins" / "acme_hal", source)
    arguments = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(source))
    code, text = python(*arguments, cwd=source, env=environment())
    assert code == 0, text
    return target


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a made-up distribution whose entry point is a module with the given source."""

    def make(source: str) -> Path:
        folder = tmp_path / "plugin"
        metadata = folder / "made_up-1.dist-info"
        metadata.mkdir(parents=True)
        (folder / "made_up.py").write_text(source)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[hal.backends]\nmade-up = made_up\n")
        return folder

    return make
