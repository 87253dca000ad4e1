"""Runs `hal bench decode`: ceilings first, then the cases one by one, each shown and written as it comes."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hal.bench import view
from hal.bench.cases import GROUPS, DecodeCase, select
from hal.bench.ceilings import measure_ceilings
from hal.bench.host import measure_host, measure_scratch
from hal.bench.measure import DeviceLost, measure_case
from hal.bench.peers import Peers, load_peers
from hal.bench.result import Result
from hal.bench.timer import METHOD
from hal.errors import HalError, nearest
from hal.version import __version__

__all__ = ["Options", "run"]

#: Columns where there is no terminal: the widest table has eight numbers and four peers.
_WIDTH = 200


@dataclass(frozen=True)
class Options:
    """What `hal bench decode` can be told.

    Attributes:
        backend: a backend's name; None for what the machine's config chooses.
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


def run(options: Options) -> Result | None:
    """Measure and print; returns the result, None for a CPU run.

    Raises:
        HalError: an option is wrong, or there is no such device.
    """
    _check_files(options)
    if options.device == "cpu":
        _run_cpu(options)
        return None
    cases = _cases(options)
    device = _cuda(options.device)
    with torch.cuda.device(device):
        return _run_cuda(options, cases, device)


def _run_cuda(options: Options, cases: Sequence[DecodeCase], device: torch.device) -> Result:
    from hal.backend import get_backend

    backend, start = get_backend(options.backend), time.monotonic()
    result = Result(_machine(device, backend), measure_ceilings(device), METHOD)
    _say(f"{result.machine['gpu']}: read {result.ceilings.read_gbps:.0f} GB/s, bf16 {result.ceilings.matmul_tflops:.0f} TFLOP/s")
    peers = None if options.against is None else load_peers(options.against)

    def over() -> bool:
        return options.limit_seconds is not None and time.monotonic() - start > options.limit_seconds

    try:
        if _wants_host(options):  # before cases with larger work memory, which is never freed
            _run_host(result, options, backend, peers, device, over)
        for index, case in enumerate(cases):
            if over():
                _left_out(result, cases[index:], f"after {options.limit_seconds:g} seconds")
                break
            row = measure_case(backend, case, result.ceilings, peers, device)
            result.rows.append(row)
            result.machine["served_by"] = _served_by(backend)
            _say(view.line(row))
            _write(result, options)
    except DeviceLost as error:
        done = {(row.case.group, row.case.name) for row in result.rows}
        _left_out(result, [case for case in cases if (case.group, case.name) not in done], str(error))
    _write(result, options)
    _show(result, options)
    return result


def _run_host(result: Result, options: Options, backend: Any, peers: Peers | None, device: torch.device, over: Callable[[], bool]) -> None:
    if over():
        result.not_run.append(("host", "all"))
        return
    for row in measure_host(backend, peers, device):
        result.host.append(row)
        _say(view.host_line(row))
    result.scratch = measure_scratch(backend, device)
    result.machine["served_by"] = _served_by(backend)
    _write(result, options)


def _served_by(backend: Any) -> str:
    """Who computed our side so far."""
    return ", ".join(sorted({report.chosen or "nobody" for report in backend.decisions() if report.op == "flash_decode"}))


def _wants_host(options: Options) -> bool:
    return bool({"host", "all"} & set(options.groups))


def _left_out(result: Result, cases: Sequence[DecodeCase], why: str) -> None:
    result.not_run += [(case.group, case.name) for case in cases]
    result.stopped = why


def _show(result: Result, options: Options) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    console.print()
    console.print(view.render(result))
    if options.markdown_path:
        options.markdown_path.write_text(view.markdown(result), encoding="utf-8")
    if options.plot_path:
        from hal.bench.plot import draw

        draw(result.to_dict(), options.plot_path)


def _write(result: Result, options: Options) -> None:
    if options.json_path:
        result.write(options.json_path)


def _say(text: str) -> None:
    print(text, flush=True)


def _cases(options: Options) -> list[DecodeCase]:
    """The cases asked for; raises HalError if a group is unknown or nothing is left."""
    known = (*GROUPS, "all")
    for group in options.groups:
        if group not in known:
            raise HalError(f"--group {group}: no such group;{nearest(group, known)} Groups are: {', '.join(known)}")
    cases = select(options.groups, options.only)
    if not cases and not _wants_host(options):
        raise HalError(f"--only {' '.join(options.only)}: no case of group {', '.join(options.groups)} has such a name")
    return cases


def _check_files(options: Options) -> None:
    """Refuse before hours of work what would fail after them."""
    for option, path in (("--json", options.json_path), ("--plot", options.plot_path), ("--markdown", options.markdown_path)):
        if path is not None and not os.access(path.parent, os.W_OK):
            raise HalError(f"{option} {path}: folder {path.parent} is not there or cannot be written; make it first")
    if options.against is not None and not options.against.is_file():
        raise HalError(f"--against {options.against}: there is no such file")
    if options.plot_path is not None:
        from hal.bench.plot import need_matplotlib

        need_matplotlib()


def _cuda(text: str) -> torch.device:
    """The CUDA device of that name; raises HalError if this machine has none such."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cuda":
        raise HalError(f"--device {text}: accepted are cuda, cuda:N and cpu")
    if not torch.cuda.is_available():
        raise HalError("bench decode: PyTorch sees no CUDA device here; run it on a machine with one, or give --device cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise HalError(f"--device {text}: this machine has cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def _machine(device: torch.device, backend: Any) -> dict[str, str]:
    facts = torch.cuda.get_device_properties(device)
    return {
        "gpu": facts.name,
        "multiprocessors": str(facts.multi_processor_count),
        "l2_bytes": str(facts.L2_cache_size),
        "memory_bytes": str(facts.total_memory),
        **_versions(backend),
    }


def _versions(backend: Any) -> dict[str, str]:
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


def _run_cpu(options: Options) -> None:
    """One decode step of the reference beside transformers'."""
    from hal.backend import get_backend
    from hal.bench import cpu_step

    backend = get_backend(options.backend or "reference")
    wanted = [text.lower() for text in options.only]
    cases = [case for case in cpu_step.CPU_CASES if not wanted or any(text in case.name.lower() for text in wanted)]
    if not cases:
        raise HalError(f"--only {' '.join(options.only)}: no CPU case has such a name; they are: {', '.join(c.name for c in cpu_step.CPU_CASES)}")
    cpu_step.need_transformers()
    versions = f"torch {torch.__version__}, transformers {metadata.version('transformers')}"
    _say(f"CPU, {torch.get_num_threads()} threads, {versions}, fp32, backend {backend.name}")
    rows = []
    for case in cases:
        rows.append(cpu_step.measure_cpu_step(backend, case))
        _say(cpu_step.line(rows[-1]))
        if options.json_path:
            data = {
                "schema": cpu_step.SCHEMA,
                "machine": {"threads": torch.get_num_threads(), **_versions(backend)},
                "rows": [r.to_dict() for r in rows],
            }
            options.json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.markdown_path:
        options.markdown_path.write_text(cpu_step.markdown(rows), encoding="utf-8")
