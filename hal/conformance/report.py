"""The report of a run: JSON for machines, Markdown for people."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from hal.conformance import SUITE_VERSION
from hal.conformance.outcomes import Outcome
from hal.conformance.session import Session
from hal.conformance.waivers import CONDITIONS
from hal.version import API_VERSION, CONTRACT_VERSION, __version__

__all__ = ["markdown", "rows", "to_dict", "write"]

#: Distributions whose versions every report names when they are installed; a backend's own come on top.
_LIBRARIES = ("torch", "triton", "ixformer", "numpy", "hypothesis", "pytest")


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _versions(session: Session) -> dict[str, str | None]:
    vendor = {}
    for op in sorted(session.subject.declared):
        report = session.subject.backend().explain(op, device=session.subject.device)
        vendor.update({name: version for c in report.candidates if c.backend == session.subject.name for name, version in c.packages})
    return {
        "suite": SUITE_VERSION,
        "hal": __version__,
        "api": str(API_VERSION),
        "contract": CONTRACT_VERSION,
        "python": platform.python_version(),
        **{library: _version(library) for library in _LIBRARIES},
        **vendor,
    }


def to_dict(session: Session) -> dict[str, Any]:
    """Return the whole report as plain data."""
    from hal.device import probe

    subject = session.subject
    ops = sorted({op for op in session.collected.values() if op})
    return {
        "backend": subject.name,
        "passed": session.passed,
        "problems": session.problems(),
        "versions": _versions(session),
        "platform": platform.platform(),
        "device": probe(subject.device).to_dict(),
        "interpreter": CONDITIONS["interpreter"](subject.device.type),
        "seed": subject.seed,
        "full": session.full,
        "counts": session.counts(),
        "ops": {op: {"declared": op in subject.declared, "executed": session.executed(op), **session.counts(op)} for op in ops},
        "waivers": [vars(w) for w in session.waivers],
        "cases": [
            {
                "id": r.case,
                "op": r.op,
                "outcome": r.outcome.value,
                "reasons": list(r.reasons),
                "entered": r.entered,
                "max_error": r.max_error,
                "warnings": list(r.warnings),
                "seconds": round(r.seconds, 4),
            }
            for r in session.results.values()
        ],
    }


def write(session: Session, json_path: Path | None, markdown_path: Path | None) -> None:
    """Write the report as JSON, as Markdown, or both."""
    report = to_dict(session)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if markdown_path is not None:
        markdown_path.write_text(markdown(report))


def rows(session: Session) -> list[tuple[str, ...]]:
    """Return the summary table: a header, one row per op, and the total."""
    header = ("op", *(o.value for o in Outcome), "largest error")
    groups: list[tuple[str, str | None]] = [(op or "several", op) for op in sorted(set(session.collected.values()))]
    lines = [header]
    for label, op in [*groups, ("total", None)]:
        counts = session.counts(op)
        errors = [r.max_error for r in session.results.values() if op in (None, r.op)]
        lines.append((label, *(str(counts[o.value]) for o in Outcome), f"{max(errors, default=0.0):.1e}"))
    return lines


def markdown(report: dict[str, Any]) -> str:
    """Return a short Markdown summary of a report in the form of `to_dict`."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    verdict = "conforms" if report["passed"] else "does not conform"
    lines = [
        f"## Backend `{report['backend']}` {verdict}",
        "",
        f"{report['device']['type']} {report['device']['name']}; {versions}; seed {report['seed']}.",
        "",
        "| op | " + " | ".join(o.value for o in Outcome) + " |",
        "|---" * (len(Outcome) + 1) + "|",
    ]
    for op, counts in [*report["ops"].items(), ("total", report["counts"])]:
        lines.append(f"| {op} | " + " | ".join(str(counts[o.value]) for o in Outcome) + " |")
    for title, outcome in (("Failed", "FAIL"), ("Waived", "WAIVED"), ("Not run", "NOT_RUN")):
        cases = [c for c in report["cases"] if c["outcome"] == outcome]
        if cases:
            lines += ["", f"{title}:", ""] + [f"- `{c['id']}`: {'; '.join(c['reasons']).splitlines()[0] if c['reasons'] else ''}" for c in cases]
    warnings = [(c["id"], w) for c in report["cases"] for w in c["warnings"]]
    if warnings:
        lines += ["", "Warnings:", ""] + [f"- `{case}`: {text}" for case, text in warnings]
    if report["problems"]:
        lines += ["", "Problems:", ""] + [f"- {p}" for p in report["problems"]]
    return "\n".join(lines) + "\n"
