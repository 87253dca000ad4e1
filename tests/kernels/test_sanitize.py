"""The calls that are meant for compute-sanitizer give right results, and the script says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import sanitize


@pytest.mark.parametrize("name", sanitize.CASES)
def test_result(device: torch.device, name: str) -> None:
    sanitize.CASES[name](device)


def run(*names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run([sys.executable, Path(sanitize.__file__), *names], capture_output=True, text=True, env=environment, check=False)


def test_script() -> None:
    done = run("merge", TRITON_INTERPRET="1")
    assert (done.returncode, done.stdout) == (0, "merge: right\n")


def test_script_names_its_cases() -> None:
    done = run("mergee", TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert "no case mergee; there are edges" in done.stderr


def test_script_needs_somewhere_to_run() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1" in done.stderr


def test_a_wrong_result_is_an_error(device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hal.backends import triton_ops

    right = triton_ops.merge_states

    def wrong(*args: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args)
        return out, lse

    monkeypatch.setattr(triton_ops, "merge_states", wrong)
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert sanitize.main(["merge"]) == 1
    assert "merge: out: error" in capsys.readouterr().out
