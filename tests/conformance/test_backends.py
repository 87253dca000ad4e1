"""The backends that ship, on the machine at hand."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conformance.runs import Suite


def test_reference(suite: Suite) -> None:
    run = suite("reference", OMP_NUM_THREADS="2")
    assert run.code == 0, run.text[-4000:]
    counts = run.report["counts"]
    assert counts["REFUSED"] == counts["WAIVED"] == counts["FAIL"] == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_under_its_interpreter(suite: Suite) -> None:
    run = suite("triton", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert run.code == 0, run.text[-4000:]
    refused = {c["op"] for c in run.report["cases"] if c["outcome"] == "REFUSED"}
    assert refused <= {"flash_prefill"}
    assert all("fp8" in " ".join(c["reasons"]) for c in run.report["cases"] if c["outcome"] == "WAIVED")
