"""Draws a diagnosis and a report for people, readable at 100 columns. Data comes from `hal.doctor` and `hal.report`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hal.config import Config
from hal.device import DeviceInfo
from hal.doctor import FOREIGN_VARIABLES, BackendRow, Diagnosis
from hal.environment import VARIABLES
from hal.report import Candidate, Report

__all__ = ["console", "render_diagnosis", "render_report", "report_table"]

_PIPE_WIDTH = 100


def console(stream: IO[str] | None = None) -> Console:
    """Return a console for `stream` (standard output): the terminal's width, or 100 columns where there is no terminal."""
    target = stream or sys.stdout
    made = Console(file=target, highlight=False, soft_wrap=False)
    return made if made.is_terminal else Console(file=target, highlight=False, width=_PIPE_WIDTH)


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    """Return the whole diagnosis as something that rich can print."""
    parts: list[RenderableType] = [
        _versions(diagnosis),
        _devices(diagnosis.devices),
        _variables(diagnosis),
    ]
    if diagnosis.backends:
        parts.append(_backends(diagnosis.backends))
    if diagnosis.config:
        parts.append(_config(diagnosis.config))
    parts += [report_table(same, title) for title, same in _by_device(diagnosis.reports)]
    if diagnosis.problem:
        parts.append(Text(f"Problem: {diagnosis.problem}", style="bold red"))
    return Group(*(part for item in parts for part in (item, Text(""))))


def render_report(report: Report) -> RenderableType:
    """Return one report as something that rich can print."""
    return report_table([report], f"{report.op} on {report.device}")


def report_table(reports: Sequence[Report], title: str) -> Table:
    """Return a table of reports: op, what runs, who decided, and every other candidate with its reasons."""
    table = _table(title, ("op", 13), ("runs", 10), ("decided by, and why not the others", None))
    for report in reports:
        runs = Text(report.chosen, style="green") if report.chosen else Text("nothing", style="bold red")
        table.add_row(Text(report.op), runs, _trail(report))
    return table


def _trail(report: Report) -> Text:
    chain = " > ".join(report.choice.backends)
    lines = [Text(f"{report.choice.source}: {'only ' if report.choice.explicit else ''}{chain}")]
    if report.choice.reason:
        lines.append(Text(f"because {report.choice.reason}"))
    for candidate in report.candidates:
        lines += _candidate(candidate, report)
    unasked = [c.backend for c in report.candidates if not c.listed]
    if unasked:
        lines.append(Text(f"not asked for (DISABLED_BY_CONFIG): {', '.join(unasked)}", style="dim"))
    return Text("\n").join(lines)


def _candidate(candidate: Candidate, report: Report) -> list[Text]:
    if not candidate.listed:
        return []
    if candidate.reasons:
        return [Text(f"{candidate.backend}: {reason}", style="yellow") for reason in candidate.reasons]
    notes = [f"{name} {number}".strip() for name, number in candidate.packages]
    notes += ["its gate judges each call"] if candidate.gated and report.call is None else []
    notes += ["waits for the device"] if candidate.host_sync else []
    role = "runs" if candidate.backend == report.chosen else "could serve"
    return [Text(f"{candidate.backend}: {role}" + (f" ({', '.join(notes)})" if notes else ""), style="dim")]


def _versions(diagnosis: Diagnosis) -> Table:
    table = _table("Versions", ("library", 20), ("version", None))
    for name, number in diagnosis.versions.items():
        if number or name not in ("cuda", "hip"):
            table.add_row(Text(name), Text(number or "not installed", style="" if number else "dim"))
    return table


def _devices(devices: Sequence[DeviceInfo]) -> Table:
    table = _table("Devices", ("device", 10), ("vendor", 10), ("name", None), ("capability", 10), ("memory", 10))
    for device in devices:
        arch = f"{device.arch[0]}.{device.arch[1]}" if device.arch else "-"
        memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else "-"
        table.add_row(Text(f"{device.type}:{device.index}"), Text(device.vendor), Text(device.name), Text(arch), Text(memory))
    return table


def _variables(diagnosis: Diagnosis) -> RenderableType:
    if not diagnosis.variables:
        return Text(f"Variables: none is set ({', '.join(VARIABLES)})")
    table = _table("Variables", ("name", 16), ("value", None), ("meaning", None))
    meanings = {**VARIABLES, **FOREIGN_VARIABLES}
    for name, value in diagnosis.variables.items():
        table.add_row(Text(name), Text(value or "(empty)"), Text(meanings.get(name, "unknown to hal, no effect"), style="dim"))
    return table


def _backends(rows: Sequence[BackendRow]) -> Table:
    table = _table("Backends", ("name", 12), ("from", 12), ("what it serves", None))
    for row in rows:
        served = Text(row.description or "-")
        served.append(f"\nops: {', '.join(row.ops) or 'none'}", style="dim")
        table.add_row(Text(row.name), Text(row.origin), Text(row.error, style="bold red") if row.error else served)
    return table


def _config(config: Config) -> Table:
    table = _table("Config", ("setting", 12), ("value", None))
    table.add_row(Text("name"), Text(config.name))
    table.add_row(Text("because"), Text(str(config.source)))
    table.add_row(Text("fallback"), Text(f"{config.fallback} (when the reference stands in)"))
    table.add_row(Text("validate"), Text(f"{config.validate} (arguments checked)"))
    for package, window in config.versions.items():
        table.add_row(Text("version"), Text(f"{package} {window or 'any'} replaces the backend's own window"))
    for entry in config.disabled:
        table.add_row(Text("disabled"), Text(f"{entry.backend} for {entry.op or 'every op'}: {entry.reason} ({entry.source})"))
    return table


def _table(title: str, *columns: tuple[str, int | None]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header, width in columns:
        table.add_column(header, min_width=width, overflow="fold")
    return table


def _by_device(reports: Iterable[Report]) -> list[tuple[str, list[Report]]]:
    """Reports grouped by device, with a title; devices that differ in their index only are shown once."""
    devices: dict[DeviceInfo, list[Report]] = {}
    for report in reports:
        devices.setdefault(report.device, []).append(report)
    alike: dict[DeviceInfo, list[DeviceInfo]] = {}
    for device in devices:
        alike.setdefault(replace(device, index=0), []).append(device)
    return [(_group_title(group), devices[group[0]]) for group in alike.values()]


def _group_title(group: Sequence[DeviceInfo]) -> str:
    others = ", ".join(f"{device.type}:{device.index}" for device in group[1:])
    return f"Ops on {group[0]}" + (f" (the same on {others})" if others else "")
