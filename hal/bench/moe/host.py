"""What one eager call of routing and of the expert layer costs the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hal.bench.guard import sentence
from hal.bench.host import HostRow, host_row
from hal.bench.moe.cases import ExpertsCase, RoutingCase
from hal.bench.moe.experts import ExpertsWork
from hal.bench.moe.peers import MoePeers
from hal.bench.moe.routing import RoutingWork
from hal.bench.moe.work import Work

__all__ = ["measure_host"]

#: Type of device -> expert layer and router of one token.
_CASES: dict[str, tuple[ExpertsCase, RoutingCase]] = {
    "cuda": (ExpertsCase("host", "qwen3-30b-a3b", 128, 2048, 768, 8, 1), RoutingCase("host", 128, 8, 1)),
    "cpu": (ExpertsCase("host", "tiny", 8, 64, 32, 2, 1, "fp32"), RoutingCase("host", 8, 2, 1, "fp32")),
}


def measure_host(backend: Any, peers: MoePeers | None, device: torch.device) -> Iterator[HostRow]:
    """Measure eager calls through the backend, then those of the peers."""
    experts, router = _CASES[device.type]
    works: tuple[tuple[str, Work], ...] = ((router.name, RoutingWork.make(router, 1, device)), (experts.name, ExpertsWork.make(experts, 1, device)))
    for name, work in works:
        positional, given = work.arguments(0)
        for what, keywords in (("", {}), (", outputs given", given)):
            yield host_row(backend.name, f"{work.op}, {name}{what}", partial(_call, backend, work.op, positional, keywords), device)
    for name, work in works:
        try:
            makers = dict(work.peers_of(peers)) if peers is not None else {}
        except Exception as error:
            yield HostRow(peers.path.name if peers else "", work.op, None, problem=sentence(error))
            continue
        for who, maker in (makers | dict(work.peers_of_torch())).items():
            yield host_row(who, f"{work.op}, {name}", partial(maker, 0), device)


def _call(backend: Any, op: str, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Callable[[], Any]:
    """Return a call as an engine makes it: by a bound method, without partial application."""
    function = getattr(backend, op)
    return lambda: function(*positional, **keywords)
