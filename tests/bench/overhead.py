"""Cost of one dispatched call over calling the chosen function directly, in microseconds of host time.

    python tests/bench/overhead.py [--json FILE] [--check]

The implementation is an empty function with the contract's signature, so only dispatch is measured; tensors are on the
CPU, with the shapes of a small decode step, and of 8 small experts. Medians of 7 rounds. `--check` fails beyond twice the limits in the last column.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import timeit
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from hal import Backend, BackendSpec, Choice, Config, Implementation, Source
from hal.ops import OPS
from hal.registry import Registered, Registry

ROUNDS, CALLS = 7, 20_000


def empty_function(op: str) -> Any:
    """A function with exactly the contract's parameters that does nothing."""
    parts = []
    for p in OPS[op].parameters.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    scope: dict[str, Any] = {}
    exec(f"def run({', '.join(parts)}): return None", scope)  # text from hal's own contract; a wrapper would cost time itself
    return scope["run"]


def backend(op: str, validate: Any, gated: bool) -> tuple[Backend, Any]:
    """A backend whose only implementation does nothing, and that implementation."""
    function = empty_function(op)
    module = ModuleType("overhead_target")
    module.run = function  # type: ignore[attr-defined]
    sys.modules["overhead_target"] = module
    gate = (lambda call, device: ()) if gated else None
    spec = BackendSpec("empty", 1, {op: Implementation("overhead_target:run", gate=gate)})
    source = Source("argument", "bench")
    config = Config("bench", source, Choice(("empty",), True, source), validate=validate)
    return Backend("bench", config, Registry(MappingProxyType({"empty": Registered(spec, "bench")}))), function


def calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a decode step: 4 sequences, 32 query heads on 8, D = 128, 64 pages of 16."""
    q, cache = torch.randn(4, 32, 128), torch.randn(64, 16, 8, 128)
    lens, table = torch.full((4,), 100, dtype=torch.int32), torch.arange(64, dtype=torch.int32).view(4, 16)
    lse = torch.randn(4, 32)
    new = torch.randn(4, 8, 128)
    slots = torch.arange(4)
    write: tuple[Any, dict[str, Any]] = ((new, new, cache, cache, slots), {})
    x, up, down = torch.randn(4, 64), torch.randn(8, 64, 64), torch.randn(8, 64, 32)
    weights, ids = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    return {
        "topk_softmax": ((torch.randn(4, 8), 2), {"renormalize": True}),
        "fused_moe": ((x, up, down, weights, ids), {}),
        "write_kv": write,
        "merge_states": ((q, lse, q, lse), {}),
        "flash_decode": ((q, cache, cache, lens, table), {"window": 64, "return_lse": True}),
    }


def microseconds(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Median host time of one call."""
    rounds = timeit.repeat(lambda: function(*args, **kwargs), number=CALLS, repeat=ROUNDS)
    return statistics.median(rounds) / CALLS * 1e6


ROWS = (  # what, op, validate, gated, limit in microseconds
    ("validate: off, no gate", "merge_states", "off", False, 1.0),
    ("validate: first (signature key)", "merge_states", "first", False, 2.5),
    ("validate: off, gated (signature key)", "flash_decode", "off", True, 2.5),
    ("validate: first, CPU (values read too)", "flash_decode", "first", True, 6.0),
    ("validate: first (signature key)", "write_kv", "first", True, 6.0),
    ("validate: first (signature key)", "topk_softmax", "first", True, 2.0),
    ("validate: first (signature key)", "fused_moe", "first", True, 4.0),
)


def main() -> int:
    """Measure, print, and with --check compare with the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}; median of {ROUNDS} x {CALLS} calls")
    results, failed = [], False
    slack = 2.0  # a shared machine is noisy; what doubles is no noise
    torch.set_grad_enabled(False)  # as in serving
    for what, op, validate, gated, limit in ROWS:
        args, kwargs = calls()[op]
        made, function = backend(op, validate, gated)
        getattr(made, op)(*args, **kwargs)
        direct, through = microseconds(function, args, kwargs), microseconds(getattr(made, op), args, kwargs)
        cost = through - direct
        failed |= limit is not None and cost > slack * limit
        results.append({"what": what, "op": op, "direct_us": direct, "dispatched_us": through, "cost_us": cost, "limit_us": limit})
        print(f"{what:38} {op:13} direct {direct:5.2f}  dispatched {through:5.2f}  cost {cost:5.2f} us  limit {limit if limit else '-'}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(failed and options.check)


if __name__ == "__main__":
    sys.exit(main())
