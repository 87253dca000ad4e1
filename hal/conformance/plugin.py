"""The pytest plug-in: `pytest --pyargs hal.conformance --hal-backend NAME`.

It loads in every pytest run of an environment: it imports nothing heavy, adds prefixed options only, and acts on nothing
but items that use the fixture `hal_subject`.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hal.conformance.outcomes import NotRun, Outcome, Refused

if TYPE_CHECKING:
    from hal.conformance.session import Session
    from hal.conformance.subject import Subject

FIXTURE = "hal_subject"
MARKS = (
    "hal_op(name): the op that a conformance case is about",
    "hal_gpu: a conformance case that needs a CUDA device",
    "hal_no_entry: a conformance case that passes without the backend being entered, because a call must be refused",
)
_SESSION: pytest.StashKey[Session] = pytest.StashKey()
_OUTCOME = "hal_outcome"
#: Ends of a pytest run that leave something to judge; the others are errors already.
_FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_LETTERS = {Outcome.REFUSED: ("refused", "r", "REFUSED"), Outcome.WAIVED: ("waived", "w", "WAIVED"), Outcome.NOT_RUN: ("not run", "n", "NOT RUN")}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("hal", "conformance suite of hal")
    group.addoption("--hal-backend", metavar="NAME", help="backend under test")
    group.addoption("--hal-device", metavar="DEVICE", help="device of all tensors (default: cuda if there is one, else cpu)")
    group.addoption("--hal-json", metavar="PATH", type=Path, help="write the report there")
    group.addoption("--hal-markdown", metavar="PATH", type=Path, help="write a short summary there")
    group.addoption("--hal-waivers", metavar="PATH", type=Path, help="waiver file in addition to the one of the suite")
    group.addoption("--hal-seed", metavar="N", type=int, default=0, help="seed of the suite (default 0)")
    group.addoption("--hal-require-gpu", action="store_true", help="a machine without a CUDA device is an error")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and prepare a run if a backend is named."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    if config.getoption("--hal-backend"):
        from hal.conformance.setup import SetupError, prepare

        try:
            config.stash[_SESSION] = prepare(config.option)
        except SetupError as error:
            raise pytest.UsageError(str(error)) from error


def _own(item: pytest.Item) -> bool:
    return FIXTURE in getattr(item, "fixturenames", ())


def case_id(item: pytest.Item) -> str:
    """Return `module.test[parameters]`, the same from wherever the suite is run."""
    module = getattr(getattr(item, "function", None), "__module__", "") or ""
    return f"{module.rpartition('.')[2]}.{item.name}"


def _op(item: pytest.Item) -> str:
    mark = item.get_closest_marker("hal_op")
    return mark.args[0] if mark else ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take stock of the suite's cases after any selection."""
    own = [item for item in items if _own(item)]
    if not own:
        return
    if _SESSION not in config.stash:
        raise pytest.UsageError("the cases of hal.conformance need a backend: --hal-backend NAME")
    run = config.stash[_SESSION]
    run.collected = {case_id(item): _op(item) for item in own}
    modules = {item.function.__module__ for item in own}  # type: ignore[attr-defined]
    files = {f"hal.conformance.{path.stem}" for path in Path(__file__).parent.glob("test_*.py")}
    run.full = modules == files and not config.option.keyword and not config.option.markexpr and not config.option.deselect


@pytest.fixture
def hal_subject(request: pytest.FixtureRequest) -> Subject:
    """The backend under test."""
    return request.config.stash[_SESSION].subject


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a case under its waiver and its needs."""
    run = item.config.stash.get(_SESSION, None)
    if run is None or not _own(item):
        return (yield)
    subject = run.subject
    subject.start(case_id(item))
    waiver = run.waiver(case_id(item))
    if item.get_closest_marker("hal_gpu") and subject.device.type != "cuda":
        item.runtest = lambda: _raise(NotRun("no CUDA device"))  # type: ignore[method-assign]
    elif waiver is not None and waiver.inconclusive:
        item.runtest = lambda: _raise(_Waived(waiver.reason))  # type: ignore[method-assign]
    try:
        result = yield
    except Refused as refusal:
        _try_anyway(item, subject, refusal)
        raise
    if not subject.record.entered and not item.get_closest_marker("hal_no_entry"):
        raise AssertionError(f"the case passed, but backend {subject.name!r} was never entered")
    return result


class _Waived(Exception):
    """A case that is not run, because it would prove nothing."""


def _raise(error: Exception) -> None:
    raise error


def _try_anyway(item: pytest.Item, subject: Subject, refusal: Refused) -> None:
    """Warn if the target gives right values for what its gate refuses. On a GPU a wrong launch could break the process."""
    if subject.device.type != "cpu" or not subject.narrower(refusal):
        return
    try:
        with subject.bypassing_gates():
            item.runtest()
    except Exception:  # refused rightly: whatever the target does with these arguments, it is not right
        return
    subject.warn(f"claim narrower than the kernel: {refusal.op} gives right values for what it refuses ({'; '.join(refusal.reasons)})")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the end of a case into one of the outcomes."""
    report = yield
    run = item.config.stash.get(_SESSION, None)
    if run is None or not _own(item) or (report.when != "call" and report.passed):
        return report
    from hal.conformance.verdict import judge

    result = judge(run, case_id(item), _op(item), call.excinfo.value if call.excinfo else None, str(report.longrepr or ""), report.duration)
    run.results[result.case] = result
    setattr(report, _OUTCOME, result.outcome)
    path, line, _ = item.location
    if result.outcome in _LETTERS:
        report.outcome, report.longrepr = "skipped", (path, line or 0, f"{result.outcome.value}: {'; '.join(result.reasons)}")
    elif result.outcome is Outcome.FAIL:
        if report.outcome != "failed":
            report.outcome, report.longrepr = "failed", "\n".join(result.reasons)
        seed = run.subject.seed
        report.sections.append(("hal", f"{result.case}: --hal-seed {seed}, seed of the case {run.subject.case_seed()}"))
    return report


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Count the outcomes under their own names."""
    outcome = getattr(report, _OUTCOME, None)
    return None if outcome is None else _LETTERS.get(outcome)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run in which nothing was shown, and write the report."""
    run = session.config.stash.get(_SESSION, None)
    if run is None or session.config.option.collectonly or exitstatus not in _FINISHED:
        return
    if session.shouldstop or session.shouldfail:
        run.full = False
    if run.problems():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if run.json_path is not None or run.markdown_path is not None:
        from hal.conformance.report import write

        write(run, run.json_path, run.markdown_path)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Print the table of outcomes and what the run lacks."""
    run = config.stash.get(_SESSION, None)
    if run is None or not run.collected or config.option.collectonly:
        return
    from hal.conformance.terminal import summary

    terminalreporter.section(f"hal conformance: {run.subject.name} on {run.subject.device}, seed {run.subject.seed}")
    for line in summary(run):
        terminalreporter.write_line(line)
