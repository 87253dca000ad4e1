"""Data of the expert layer: sets of weights, each with ids of its own, and how its results are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hal.bench.fill import DTYPES, fill_random
from hal.bench.guard import relative
from hal.bench.moe.cases import ExpertsCase
from hal.bench.moe.peers import Experts, MoePeers, experts_of_torch
from hal.bench.moe.work import Call, Maker
from hal.conformance import moe_oracle
from hal.conformance.compare import OUTPUT, REQUANTISED_ROWS
from hal.ops import OPS

__all__ = ["ExpertsWork"]

#: Standard deviation of the codes of quantised weights; of int8 that of uniform ones.
_DEVIATION = {"int8": 73.3, "e4m3": 50.0}
#: Tokens whose result is held to float64 where the oracle rounds activations value by value.
_QUANTISED_SAMPLE = 16


@dataclass
class ExpertsWork:
    """Everything that the calls of a case work on.

    Attributes:
        case: the case.
        x: (T, H) standard normal.
        w_gate_up: (sets, E, 2I, H), w_down: (sets, E, H, I), scaled so that results are about 1.
        scales: of both, a set each; empty for weights that are not quantised.
        weights: (sets, T, k) fp32, ids: (sets, T, k) int32: the best k of random logits, renormalised.
        out: (T, H).
    """

    op: ClassVar[str] = "fused_moe"

    case: ExpertsCase
    x: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    scales: tuple[Tensor, ...]
    weights: Tensor
    ids: Tensor
    out: Tensor

    @classmethod
    def make(cls, case: ExpertsCase, sets: int, device: torch.device) -> ExpertsWork:
        """Allocate and fill."""
        generator = torch.Generator(device).manual_seed(0)
        dtype = DTYPES[case.dtype]
        x = fill_random(torch.empty(case.tokens, case.hidden, dtype=dtype, device=device), generator)
        shapes = ((case.experts, 2 * case.inter, case.hidden), (case.experts, case.hidden, case.inter))
        stored = DTYPES[case.quantised or case.dtype]
        stacks = [
            fill_random(torch.empty(sets, *shape, dtype=stored, device=device), generator, _DEVIATION.get(case.quantised, shape[-1] ** -0.5))
            for shape in shapes
        ]
        scales = [
            _random_scales((sets, case.experts, *shape), depth**-0.5 / _DEVIATION[case.quantised], generator, device)
            for shape, depth in zip(case.scale_shapes, (case.hidden, case.inter), strict=False)
        ]
        if case.scales == "channel":
            scales = [scale.squeeze(-1) for scale in scales]
        logits = torch.randn(sets, case.tokens, case.experts, generator=generator, device=device)
        weights, ids = torch.softmax(logits, dim=-1).topk(case.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        return cls(case, x, stacks[0], stacks[1], tuple(scales), weights, ids.int(), torch.empty_like(x))

    @property
    def sets(self) -> int:
        """Distinct weights and ids."""
        return self.ids.shape[0]

    @property
    def touched(self) -> float:
        """Experts that a call touches, on average over the sets."""
        return sum(len(chosen.unique()) for chosen in self.ids) / self.sets

    @property
    def bytes_read(self) -> float:
        """Bytes of the experts that a call touches, on average over the sets."""
        return self.touched * self.case.expert_bytes

    @property
    def tolerance(self) -> float:
        """Largest error against float64."""
        found = REQUANTISED_ROWS[self.w_down.dtype] if self.scales else OUTPUT[self.x.dtype]
        return found.limit

    def arguments(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of our call on a set."""
        keywords: dict[str, Any] = {"out": self.out}
        if self.scales:
            keywords["w_scales"] = tuple(scale[index] for scale in self.scales)
        return self._tensors(index), keywords

    def exact_error(self, result: Tensor, index: int) -> float:
        """Error against float64: of all tokens, or of some where weights are quantised."""
        positional, keywords = self.arguments(index)
        arguments = dict(vars(OPS[self.op].bind(positional, keywords)))
        if self.scales:
            tokens = torch.linspace(0, self.case.tokens - 1, min(self.case.tokens, _QUANTISED_SAMPLE), device=self.x.device).long()
            arguments |= {name: arguments[name][tokens] for name in ("x", "weights", "ids")}
            result = result[tokens]
        return relative(result, moe_oracle.fused_moe(arguments))

    def difference(self, result: Tensor, expected: Tensor) -> float:
        """Relative difference of two results."""
        return relative(result.reshape(expected.shape), expected)

    def peers_of_torch(self) -> Mapping[str, Maker]:
        """Those of PyTorch; none for quantised weights."""
        return {} if self.scales else self._bound(experts_of_torch())

    def peers_of(self, file: MoePeers) -> Mapping[str, Maker]:
        """Those of a peers file; none for quantised weights."""
        case = self.case
        return {} if self.scales else self._bound(file.experts(case.experts, case.inter, case.hidden, case.tokens))

    def _tensors(self, index: int) -> tuple[Tensor, ...]:
        return self.x, self.w_gate_up[index], self.w_down[index], self.weights[index], self.ids[index]

    def _bound(self, found: Mapping[str, Experts]) -> Mapping[str, Maker]:
        def maker(call: Callable[..., Any]) -> Maker:
            def on(index: int) -> Call:
                return partial(call, *self._tensors(index))

            return on

        return {name: maker(call) for name, call in found.items()}


def _random_scales(shape: tuple[int, ...], middle: float, generator: torch.Generator, device: torch.device) -> Tensor:
    return (torch.rand(shape, generator=generator, device=device) + 0.5) * middle
