"""What the runs of all benchmarks share: options and their checks, device, budget, and the loop that shows and writes each row as it comes."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console, RenderableType

from hal.bench.cases import Case
from hal.bench.guard import DeviceLost
from hal.bench.host import HostRow
from hal.bench.result import Result
from hal.bench.rows import Row
from hal.errors import HalError, nearest
from hal.version import __version__

__all__ = ["Budget", "Options", "Session", "check_files", "check_groups", "cuda_device", "machine_of", "say", "served_by", "show", "versions"]

#: Columns where there is no terminal: the widest table has eight numbers and four peers.
_WIDTH = 200


@dataclass(frozen=True)
class Options:
    """What a benchmark can be told.

    Attributes:
        backend: a backend's name; None for what the machine's config chooses, on a CPU the reference.
        against: a peers file.
        only: run only cases whose name contains one of these.
        groups: of cases, or `all`.
        json_path: write everything there, after each row.
        plot_path: draw a plot there.
        markdown_path: write the tables there.
        device: `cuda`, `cuda:1`, `cpu`.
        limit_seconds: start no row after that.
    """

    backend: str | None = None
    against: Path | None = None
    only: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("main",)
    json_path: Path | None = None
    plot_path: Path | None = None
    markdown_path: Path | None = None
    device: str = "cuda"
    limit_seconds: float | None = None

    def wants(self, group: str) -> bool:
        """Whether a group is asked for."""
        return group in self.groups or "all" in self.groups


class Budget:
    """Seconds in which rows may start, from when it is made."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self._start = seconds, time.monotonic()

    @property
    def spent(self) -> bool:
        """Nothing more may start."""
        return self.seconds is not None and time.monotonic() - self._start > self.seconds


R = TypeVar("R", bound=Row[Any])
C = TypeVar("C", bound=Case)


class Session(Generic[R]):
    """A run in progress: each row is shown and written as it comes, and what is left out is listed."""

    def __init__(self, options: Options, result: Result[R], budget: Budget, ops: Collection[str], backend: Any) -> None:
        self.options, self.result, self._budget, self._ops, self._backend = options, result, budget, ops, backend

    def measure(self, cases: Sequence[C], measure: Callable[[C], R], line: Callable[[R], str]) -> None:
        """Measure cases one by one, until the budget is spent; a lost device raises."""
        for index, case in enumerate(cases):
            if self._budget.spent:
                self.leave_out([(left.group, left.name) for left in cases[index:]], f"after {self._budget.seconds:g} seconds")
                return
            row = measure(case)
            self.result.rows.append(row)
            self._came(line(row))

    def host(self, rows: Callable[[], Iterable[HostRow]], line: Callable[[HostRow], str]) -> bool:
        """Measure host rows unless the budget is spent; return whether that was done."""
        if self._budget.spent:
            self.leave_out([("host", "all")], f"after {self._budget.seconds:g} seconds")
            return False
        for row in rows():
            self.result.host.append(row)
            self._came(line(row))
        return True

    def run(self, cases: Sequence[C], steps: Callable[[], None]) -> None:
        """Run `steps`; if the device is lost on the way, list those of `cases` that have no row."""
        try:
            steps()
        except DeviceLost as error:
            done = {(row.case.group, row.case.name) for row in self.result.rows}
            self.leave_out([(case.group, case.name) for case in cases if (case.group, case.name) not in done], str(error))
        self.write()

    def leave_out(self, names: Sequence[tuple[str, str]], why: str) -> None:
        """Note what is not run."""
        self.result.not_run += names
        self.result.stopped = why

    def write(self) -> None:
        """Write what was found so far."""
        self.result.machine["served_by"] = served_by(self._backend, self._ops)
        if self.options.json_path:
            self.result.write(self.options.json_path)

    def _came(self, text: str) -> None:
        say(text)
        self.write()


def show(options: Options, rendered: RenderableType, markdown: Callable[[], str], draw: Callable[[Path], None]) -> None:
    """Print the tables and write the files that were asked for."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    console.print()
    console.print(rendered)
    if options.markdown_path:
        options.markdown_path.write_text(markdown(), encoding="utf-8")
    if options.plot_path:
        draw(options.plot_path)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def served_by(backend: Any, ops: Collection[str]) -> str:
    """Who computed some ops so far."""
    return ", ".join(sorted({report.chosen or "nobody" for report in backend.decisions() if report.op in ops}))


def check_groups(options: Options, known: Sequence[str], found: Sequence[object], apart: str) -> None:
    """Raise HalError if a group is unknown, or if nothing is left to do; `apart` is a group that has no cases."""
    for group in options.groups:
        if group not in (*known, "all"):
            raise HalError(f"--group {group}: no such group;{nearest(group, known)} Groups are: {', '.join(known)}, all")
    if not found and not options.wants(apart):
        raise HalError(f"--only {' '.join(options.only)}: no case of group {', '.join(options.groups)} has such a name")


def check_files(options: Options) -> None:
    """Refuse before hours of work what would fail after them."""
    for option, path in (("--json", options.json_path), ("--plot", options.plot_path), ("--markdown", options.markdown_path)):
        if path is not None and not os.access(path.parent, os.W_OK):
            raise HalError(f"{option} {path}: folder {path.parent} is not there or cannot be written; make it first")
    if options.against is not None and not options.against.is_file():
        raise HalError(f"--against {options.against}: there is no such file")
    if options.plot_path is not None:
        from hal.bench.plot import need_matplotlib

        need_matplotlib()


def cuda_device(text: str, command: str) -> torch.device:
    """The CUDA device of that name; raises HalError if this machine has none such."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cuda":
        raise HalError(f"--device {text}: accepted are cuda, cuda:N and cpu")
    if not torch.cuda.is_available():
        raise HalError(f"{command}: PyTorch sees no CUDA device here; run it on a machine with one, or give --device cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise HalError(f"--device {text}: this machine has cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def machine_of(device: torch.device, backend: Any) -> dict[str, str]:
    """The device and the versions."""
    if device.type == "cpu":
        return {"gpu": f"CPU, {torch.get_num_threads()} threads", **versions(backend)}
    facts = torch.cuda.get_device_properties(device)
    return {
        "gpu": facts.name,
        "multiprocessors": str(facts.multi_processor_count),
        "l2_bytes": str(facts.L2_cache_size),
        "memory_bytes": str(facts.total_memory),
        **versions(backend),
    }


def versions(backend: Any) -> dict[str, str]:
    """Versions, date, and who is asked; `served_by` is empty at first."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "torch": torch.__version__,
        "triton": triton,
        "cuda": str(torch.version.cuda),
        "hal": __version__,
        "backend": backend.name,
        "served_by": "",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
