"""Python processes with the sources importable, and what a run of the suite in one of them left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """What a run of the suite printed, and how it ended."""

    code: int
    text: str
    report: dict[str, Any]

    def outcomes(self, case: str = "") -> list[str]:
        return [c["outcome"] for c in self.report["cases"] if case in c["id"]]


Suite = Callable[..., Run]


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    """This environment with the sources and `paths` importable, and none of our own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_", "PYTEST_", "TRITON_"))}
    # One thread: on a busy machine, threads that wait for each other make tiny operations slow.
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), "OMP_NUM_THREADS": "1"} | variables


def python(*arguments: str, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False)
    return done.returncode, done.stdout + done.stderr


def pytest_run(*arguments: str, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """Run pytest with the plug-in of the suite, whether or not an installed entry point brings it."""
    main = (
        "import pytest, sys; from importlib.metadata import entry_points as found;"
        "there = any(x.name == 'hal_conformance' for x in found(group='pytest11'));"
        f"sys.exit(pytest.main([*([] if there else ['-p', 'hal.conformance.plugin']), *{list(arguments)!r}]))"
    )
    return python("-c", main, cwd=cwd, env=env)
