"""Data of routing: sets of logits, and how its results are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hal.bench.fill import DTYPES, fill_random
from hal.bench.guard import relative
from hal.bench.moe.cases import RoutingCase
from hal.bench.moe.peers import MoePeers, Router, routers_of_torch
from hal.bench.moe.work import Call, Maker
from hal.bench.timer import last_index
from hal.conformance.compare import ROUTER_WEIGHTS

__all__ = ["RoutingWork"]

#: Weights and ids, both (T, k).
Routed = tuple[Tensor, Tensor]


@dataclass
class RoutingWork:
    """Everything that the calls of a case work on: logits (sets, T, E), standard normal, and outputs (T, k)."""

    op: ClassVar[str] = "topk_softmax"

    case: RoutingCase
    logits: Tensor
    weights: Tensor
    ids: Tensor

    @classmethod
    def make(cls, case: RoutingCase, sets: int, device: torch.device) -> RoutingWork:
        """Allocate and fill."""
        generator = torch.Generator(device).manual_seed(0)
        logits = fill_random(torch.empty(sets, case.tokens, case.experts, dtype=DTYPES[case.dtype], device=device), generator)
        weights = torch.empty(case.tokens, case.top_k, device=device)
        return cls(case, logits, weights, torch.empty(case.tokens, case.top_k, dtype=torch.int32, device=device))

    @property
    def sets(self) -> int:
        """Distinct logits."""
        return self.logits.shape[0]

    @property
    def touched(self) -> None:
        """Routing reads no expert."""

    @property
    def bytes_read(self) -> float:
        """Bytes of the logits and the results."""
        return self.case.bytes_expected

    @property
    def tolerance(self) -> float:
        """Largest error of a weight, relative to the largest of its row."""
        return ROUTER_WEIGHTS.limit

    def arguments(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of our call on a set."""
        return (self.logits[index], self.case.top_k), {"weights": self.weights, "ids": self.ids}

    def exact_error(self, result: Routed, index: int) -> float:
        """Error of the weights against float64; infinite unless the ids are those of a stable sort."""
        logits = self.logits[index].double()
        expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, : self.case.top_k]
        if not torch.equal(result[1].long(), expected):
            return float("inf")
        weights = torch.softmax(logits, dim=-1).gather(1, expected)
        return relative(result[0] / weights[:, :1], weights / weights[:, :1])

    def difference(self, result: Routed, expected: Routed) -> float:
        """Relative difference of the weights, and of the logits that were chosen: among equal ones peers may choose any."""
        logits = self.logits[last_index(self.sets)].float()
        found, wanted = (logits.gather(1, ids.long().clamp(0, self.case.experts - 1)) for _, ids in (result, expected))
        return max(relative(result[0], expected[0]), relative(found, wanted))

    def peers_of_torch(self) -> Mapping[str, Maker]:
        """Those of PyTorch."""
        return self._bound(routers_of_torch())

    def peers_of(self, file: MoePeers) -> Mapping[str, Maker]:
        """Those of a peers file."""
        return self._bound(file.routers())

    def _bound(self, found: Mapping[str, Router]) -> Mapping[str, Maker]:
        def maker(call: Router) -> Maker:
            def on(index: int) -> Call:
                return partial(call, self.logits[index], self.case.top_k)

            return on

        return {name: maker(call) for name, call in found.items()}
