"""Runs `hal bench decode`: ceilings first, then the cases one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata

import torch

from hal.bench import view
from hal.bench.cases import matches
from hal.bench.ceilings import measure_ceilings
from hal.bench.decode.cases import GROUPS, DecodeCase, select
from hal.bench.decode.host import measure_host, measure_scratch
from hal.bench.decode.measure import measure_case
from hal.bench.decode.peers import load_peers
from hal.bench.decode.plot import draw
from hal.bench.decode.result import DecodeResult
from hal.bench.decode.view import VIEW, line
from hal.bench.run import Budget, Options, Session, check_files, check_groups, cuda_device, machine_of, say, show, versions
from hal.bench.timer import method
from hal.errors import HalError

__all__ = ["run"]


def run(options: Options) -> DecodeResult | None:
    """Measure and print; returns the result, None for a CPU run.

    Raises:
        HalError: an option is wrong, or there is no such device.
    """
    check_files(options)
    if options.device == "cpu":
        _run_cpu(options)
        return None
    cases = select(options.groups, options.only)
    check_groups(options, GROUPS, cases, "host")
    device = cuda_device(options.device, "bench decode")
    with torch.cuda.device(device):
        return _run_cuda(options, cases, device)


def _run_cuda(options: Options, cases: Sequence[DecodeCase], device: torch.device) -> DecodeResult:
    from hal.backend import get_backend

    backend, budget = get_backend(options.backend), Budget(options.limit_seconds)
    result = DecodeResult(machine_of(device, backend), measure_ceilings(device), method("KV caches", "random data, shuffled page tables"))
    say(f"{result.machine['gpu']}: read {result.ceilings.read_gbps:.0f} GB/s, bf16 {result.ceilings.matmul_tflops:.0f} TFLOP/s")
    peers = None if options.against is None else load_peers(options.against)
    session = Session(options, result, budget, ("flash_decode",), backend)

    def steps() -> None:
        # The host's rows come before cases with larger work memory, which is never freed.
        if options.wants("host") and session.host(lambda: measure_host(backend, peers, device), view.host_line):
            result.scratch = measure_scratch(backend, device)
        session.measure(cases, lambda case: measure_case(backend, case, result.ceilings, peers, device), line)

    session.run(cases, steps)
    show(options, view.render(result, VIEW), lambda: view.markdown(result, VIEW), lambda path: draw(result.to_dict(), path))
    return result


def _run_cpu(options: Options) -> None:
    """One decode step of the reference beside transformers'."""
    from hal.backend import get_backend
    from hal.bench.decode import cpu_step

    backend = get_backend(options.backend or "reference")
    cases = [case for case in cpu_step.CPU_CASES if matches(case.name, options.only)]
    if not cases:
        raise HalError(f"--only {' '.join(options.only)}: no CPU case has such a name; they are: {', '.join(c.name for c in cpu_step.CPU_CASES)}")
    cpu_step.need_transformers()
    found = f"torch {torch.__version__}, transformers {metadata.version('transformers')}"
    say(f"CPU, {torch.get_num_threads()} threads, {found}, fp32, backend {backend.name}")
    rows = []
    for case in cases:
        rows.append(cpu_step.measure_cpu_step(backend, case))
        say(cpu_step.line(rows[-1]))
        if options.json_path:
            data = {
                "schema": cpu_step.SCHEMA,
                "machine": {"threads": torch.get_num_threads(), **versions(backend)},
                "rows": [r.to_dict() for r in rows],
            }
            options.json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.markdown_path:
        options.markdown_path.write_text(cpu_step.markdown(rows), encoding="utf-8")
