"""Runs `hal bench moe`: ceilings first, then the cases one by one; on a CPU tiny ones, which show that everything works."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from hal.bench import view
from hal.bench.cases import chosen
from hal.bench.ceilings import measure_ceilings
from hal.bench.moe import cases as moe_cases
from hal.bench.moe.cases import GROUPS, MoeCase
from hal.bench.moe.host import measure_host
from hal.bench.moe.measure import measure_case
from hal.bench.moe.peers import MoePeers
from hal.bench.moe.plot import draw
from hal.bench.moe.result import MoeResult
from hal.bench.moe.view import VIEW, line
from hal.bench.run import Budget, Options, Session, check_files, check_groups, cuda_device, machine_of, say, show
from hal.bench.timer import method

__all__ = ["run"]

#: dtypes of quantised weights, whose products have a ceiling of their own.
_QUANTISED = ("int8", "e4m3")


def run(options: Options) -> MoeResult:
    """Measure and print; returns the result.

    Raises:
        HalError: an option is wrong, or there is no such device.
    """
    check_files(options)
    on_cpu = options.device == "cpu"
    cases = chosen(moe_cases.CPU_CASES if on_cpu else moe_cases.CUDA_CASES, options.groups, options.only)
    check_groups(options, GROUPS, cases, "host")
    device = torch.device("cpu") if on_cpu else cuda_device(options.device, "bench moe")
    with nullcontext() if on_cpu else torch.cuda.device(device):
        return _run(options, cases, device)


def _run(options: Options, cases: Sequence[MoeCase], device: torch.device) -> MoeResult:
    from hal.backend import get_backend

    budget = Budget(options.limit_seconds)
    backend = get_backend(options.backend or ("reference" if device.type == "cpu" else None))
    ceilings = measure_ceilings(device, _QUANTISED if any(case.group == "quant" for case in cases) else ())
    result = MoeResult(machine_of(device, backend), ceilings, method("weights and ids", "random weights and logits"), judged=device.type == "cuda")
    say(f"{result.machine['gpu']}: read {ceilings.read_gbps:.0f} GB/s, {ceilings.matmul} matmul {ceilings.matmul_tflops:.3g} TFLOP/s")
    peers = None if options.against is None else MoePeers(options.against)
    session = Session(options, result, budget, ("fused_moe", "topk_softmax"), backend)

    def steps() -> None:
        session.measure(cases, lambda case: measure_case(backend, case, ceilings, peers, device), line)
        if options.wants("host"):
            session.host(lambda: measure_host(backend, peers, device), view.host_line)

    session.run(cases, steps)
    show(options, view.render(result, VIEW), lambda: view.markdown(result, VIEW), lambda path: draw(result.to_dict(), path))
    return result
