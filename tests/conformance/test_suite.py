"""The suite must fail whoever deserves it: backends that lie, throw, or serve nothing, and runs that show nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hal.conformance.report import markdown
from tests.conformance.runs import Suite, environment, pytest_run

Plugin = Callable[[str], Path]

MADE_UP = '''
import torch
from hal import BackendSpec, Implementation, Reason, ReasonCode, hookimpl

@hookimpl
def hal_backends():
    return [BackendSpec("made-up", 1, {IMPLEMENTATIONS})]

def gate(call, device):
    if call.dtype != torch.float32:
        yield Reason(ReasonCode.DTYPE, f"made-up serves float32, not {call.dtype}")

def swallow(call, device):
    yield Reason(ReasonCode.FEATURE, "made-up serves nothing today")

def raises(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
    raise NotImplementedError

def wrong(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
    """Base 2 where the contract has base e."""
    out = torch.empty_like(out_a) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    a, b = torch.exp2(lse_a), torch.exp2(lse_b)
    lse.copy_(torch.log2(a + b))
    out.copy_((a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None])
    return out, lse

def right(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
    out = torch.empty_like(out_a) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    total = torch.logaddexp(lse_a, lse_b)
    merged = (lse_a - total).exp()[..., None] * out_a.float() + (lse_b - total).exp()[..., None] * out_b.float()
    lse.copy_(total)
    out.copy_(merged)
    return out, lse

def touches(out_a, lse_a, out_b, lse_b, *, sinks=None, out=None, lse=None):
    result = right(out_a, lse_a, out_b, lse_b, sinks=sinks, out=out, lse=lse)
    out_a.zero_()
    return result
'''


def source(**implementations: str) -> str:
    """Source of a plug-in that serves ops by functions of MADE_UP: `op="function"` or `op="function gate"`."""
    entries = []
    for op, words in implementations.items():
        function, *gate = words.split()
        entries.append(f'"{op}": Implementation("made_up:{function}"' + (f", gate={gate[0]}" if gate else "") + ")")
    return MADE_UP.replace("IMPLEMENTATIONS", ", ".join(entries))


def test_unknown_backend_is_a_usage_error(suite: Suite) -> None:
    run = suite("referense")
    assert run.code == 4
    assert "did you mean 'reference'?" in run.text
    assert not run.report


def test_cases_without_a_backend_are_a_usage_error(tmp_path: Path) -> None:
    code, text = pytest_run("--pyargs", "hal.conformance", "-k", "by_hand", cwd=tmp_path, env=environment())
    assert code == 4
    assert "--hal-backend NAME" in text


def test_other_peoples_runs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("import pytest\n\ndef test_a(): pass\n\ndef test_b(): pytest.skip('as ever')\n")
    code, text = pytest_run("-p", "no:cacheprovider", cwd=tmp_path, env=environment())
    assert code == 0
    assert "1 passed, 1 skipped" in text
    assert "conform" not in text.replace("hal_conformance", "").replace("hal.conformance", "")


def test_runs_from_any_folder_by_name(tmp_path: Path) -> None:
    code, text = pytest_run("--pyargs", "hal.conformance", "--hal-backend", "reference", "-k", "by_hand", cwd=tmp_path, env=environment())
    assert code == 0, text
    assert "reference conforms (part of the suite ran)" in text


def test_requiring_a_gpu_without_one_is_a_usage_error(tmp_path: Path) -> None:
    arguments = ("--pyargs", "hal.conformance", "--hal-backend", "reference", "--hal-require-gpu", "-k", "by_hand")
    code, text = pytest_run(*arguments, cwd=tmp_path, env=environment(CUDA_VISIBLE_DEVICES=""))
    assert code == 4
    assert "no CUDA device" in text


def test_backend_that_serves_nothing_fails(suite: Suite, plugin: Plugin) -> None:
    run = suite("made-up", plugin(source()), keyword="test_merge")
    assert run.code == 1
    assert "nothing passed" in run.text
    assert set(run.outcomes()) == {"REFUSED", "NOT_RUN"} or set(run.outcomes()) == {"REFUSED"}
    assert not run.report["passed"]


def test_backend_that_refuses_everything_fails(suite: Suite, plugin: Plugin) -> None:
    run = suite("made-up", plugin(source(merge_states="right swallow")), keyword="test_merge and (by_hand or shapes)")
    assert run.code == 1
    assert "nothing passed" in run.text


def test_backend_that_raises_not_implemented_fails(suite: Suite, plugin: Plugin) -> None:
    run = suite("made-up", plugin(source(merge_states="raises")), keyword="test_merge and by_hand")
    assert run.code == 1
    assert run.outcomes("by_hand") == ["FAIL"]


def test_backend_that_lies_fails(suite: Suite, plugin: Plugin) -> None:
    run = suite("made-up", plugin(source(merge_states="wrong")), keyword="test_merge and (by_hand or nothing_to_merge)")
    assert run.code == 1
    assert run.outcomes("by_hand") == ["FAIL"]
    assert "expected" in run.text
    assert "seed of the case" in run.text


def test_backend_that_writes_its_inputs_fails(suite: Suite, plugin: Plugin) -> None:
    run = suite("made-up", plugin(source(merge_states="touches")), keyword="test_merge and by_hand")
    assert run.outcomes("by_hand") == ["FAIL"]
    assert "input `out_a` after the call" in run.text


def test_declared_op_of_which_nothing_ran_fails(suite: Suite, plugin: Plugin) -> None:
    folder = plugin(source(merge_states="right", plan_decode="raises swallow"))
    run = suite("made-up", folder, keyword="test_weights_by_hand or test_one_plan_for_many_layers")
    assert run.outcomes("by_hand") == ["PASS"]
    assert run.code == 1
    assert "nothing executed for plan_decode" in run.text


def test_over_narrow_claim_is_a_warning(suite: Suite, plugin: Plugin) -> None:
    run = suite("made-up", plugin(source(merge_states="right gate")), keyword="test_merge and test_shapes")
    assert run.code == 0
    assert set(run.outcomes()) == {"PASS", "REFUSED"}
    assert "claim narrower than the kernel" in run.text
    warned = [c for c in run.report["cases"] if c["warnings"]]
    assert {c["outcome"] for c in warned} == {"REFUSED"}


def test_selection_that_matches_nothing_fails(suite: Suite) -> None:
    assert suite("reference", keyword="no_such_case").code == 1


def test_import_error_of_the_suite_is_an_error(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['hypothesis.strategies'] = None\n")
    run = suite("reference", tmp_path, keyword="by_hand")
    assert run.code == 2
    assert "error" in run.text


WAIVER = """
- backend: {backend}
  tests: "{tests}"
  reason: known
  link: https://example.org/1
"""


def test_waived_failure(suite: Suite, plugin: Plugin) -> None:
    waivers = WAIVER.format(backend="made-up", tests="test_merge.test_weights_*")
    run = suite("made-up", plugin(source(merge_states="wrong")), keyword="by_hand or nothing_to_merge", waivers=waivers)
    assert run.outcomes("test_merge.test_weights_by_hand") == ["WAIVED"]
    assert "waived: known (https://example.org/1)" in run.text


def test_stale_waiver_fails(suite: Suite) -> None:
    run = suite("reference", keyword="test_weights_by_hand", waivers=WAIVER.format(backend="reference", tests="test_merge.test_weights_*"))
    assert run.code == 1
    assert run.outcomes() == ["FAIL"]
    assert "stale waiver" in run.text


def test_waiver_of_another_backend_is_not_ours(suite: Suite) -> None:
    run = suite("reference", keyword="test_weights_by_hand", waivers=WAIVER.format(backend="triton", tests="*"))
    assert run.code == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- backend: reference\n  tests: x\n", "lacks reason, link"),
        ("- {backend: a, tests: b, reason: c, link: d, whem: e}\n", "unknown keys whem"),
        ("- {backend: a, tests: b, reason: c, link: d, when: full-moon}\n", "known conditions are"),
        ("backend: reference\n", "a list of waivers is needed"),
        ("- [\n", "waivers.yaml"),
    ],
)
def test_wrong_waiver_file_is_a_usage_error(suite: Suite, text: str, problem: str) -> None:
    run = suite("reference", keyword="by_hand", waivers=text)
    assert run.code == 4
    assert problem in run.text


def test_gpu_cases_are_not_passes_without_a_gpu(suite: Suite) -> None:
    run = suite("reference", keyword="by_hand or merge_graph", CUDA_VISIBLE_DEVICES="")
    assert run.code == 0
    assert run.outcomes("merge_graph") == ["NOT_RUN"]
    assert "not run: no CUDA device [1 case]" in run.text


def test_report_names_versions_seed_and_device(suite: Suite) -> None:
    import torch

    import hal

    report = suite("reference", keyword="test_merge").report
    assert report["versions"]["hal"] == hal.__version__
    assert report["versions"]["contract"] == hal.CONTRACT_VERSION
    assert report["versions"]["torch"] == torch.__version__.partition("+")[0] or report["versions"]["torch"] == torch.__version__
    assert report["seed"] == 0
    assert report["device"]["type"] in ("cpu", "cuda")
    assert report["counts"]["PASS"] == report["ops"]["merge_states"]["executed"] > 0
    assert all(c["entered"] > 0 for c in report["cases"] if c["outcome"] == "PASS")
    assert any(0 < c["max_error"] < 1e-2 for c in report["cases"])
    text = markdown(report)
    assert "## Backend `reference` conforms" in text
    assert f"| merge_states | {report['counts']['PASS']} | 0 |" in text
