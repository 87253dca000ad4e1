"""Routers of transformers models replaced by `topk_softmax`; small random models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hal.integrations.transformers as hal_transformers
from hal.errors import ArgumentError
from hal.integrations.experts import expert_modules
from hal.integrations.transformers import PagedCache, serve_routers
from tests.integrations.expert_runs import Batch, counted, logits
from tests.integrations.tiny_models import MIXTURES, build

Tiny = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    hal_transformers.register()


@pytest.fixture
def served(tiny: Tiny) -> Callable[[str], Any]:
    def make(name: str) -> Any:
        model = tiny(name)
        model.set_experts_implementation("hal")
        return model

    return make


@pytest.mark.parametrize("name", MIXTURES)
def test_fp32_logits_equal_the_models_own_routing(name: str, served: Callable[[str], Any], batch: Batch) -> None:
    model = served(name)
    expected = logits(model, "eager", batch)
    model.set_experts_implementation("hal")
    assert len(serve_routers(model)) == len(expert_modules(model))
    with counted() as seen:
        found = logits(model, "hal", batch)
    assert seen == {"topk_softmax": len(expert_modules(model)), "fused_moe": len(expert_modules(model))}
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_renormalisation_is_the_models(device: torch.device, batch: Batch) -> None:
    for renormalize in (True, False):
        model = build("qwen3-moe", device)
        model.set_experts_implementation("hal")
        for module in model.modules():
            if type(module).__name__ == "Qwen3MoeTopKRouter":
                module.norm_topk_prob = renormalize
        expected = logits(model, "hal", batch)
        serve_routers(model)
        torch.testing.assert_close(logits(model, "hal", batch), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_generate_with_all_of_it(served: Callable[[str], Any], batch: Batch) -> None:
    model = served("olmoe")
    ids, mask = batch
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**options)
    model.set_attn_implementation("hal")
    serve_routers(model)
    with counted() as seen:
        found = model.generate(**options, **PagedCache.for_model(model).as_kwargs())
    assert torch.equal(found, expected)
    assert seen["topk_softmax"] == seen["fused_moe"] == seen["write_kv"] == 3 * 8


@pytest.mark.parametrize("offload_first", [True, False], ids=["offloaded-before", "offloaded-after"])
def test_offloaded_by_accelerate(offload_first: bool, served: Callable[[str], Any], batch: Batch) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = served("gpt-oss")
    expected = logits(model, "hal", batch)
    steps = [lambda: accelerate.cpu_offload(model, execution_device=batch[0].device), lambda: serve_routers(model)]
    for step in steps if offload_first else steps[::-1]:
        step()
    with counted() as seen:
        found = logits(model, "hal", batch)
    assert seen["topk_softmax"] == 3
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_router_logits_are_still_recorded(served: Callable[[str], Any], batch: Batch) -> None:
    model = served("mixtral")
    with torch.no_grad():
        expected = model(input_ids=batch[0], output_router_logits=True, use_cache=False).router_logits
        serve_routers(model)
        found = model(input_ids=batch[0], output_router_logits=True, use_cache=False).router_logits
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class OtherTopKRouter(torch.nn.Module):
    """Routers of other kinds, by the part in which they differ from a softmax router."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.top_k = kind, 2
        self.weight = torch.nn.Parameter(torch.randn(4, 64))
        if kind == "extra":
            self.register_buffer("e_score_correction_bias", torch.zeros(4))

    def forward(self, x: Tensor, *needed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(x, self.weight)
        scores = logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1)
        weights, ids = scores.topk(2, dim=-1)
        if self.kind == "arguments":
            weights = weights + needed[0]
        return logits, weights * (2.5 if self.kind == "scaled" else 1), ids


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("sigmoid", "OtherTopKRouter does not choose the best of a softmax"),
        ("scaled", "OtherTopKRouter does not choose the best of a softmax"),
        ("extra", "OtherTopKRouter has e_score_correction_bias"),
        ("arguments", "OtherTopKRouter does not route by tokens alone"),
    ],
)
def test_refuses_other_routers_and_replaces_none(kind: str, complaint: str, served: Callable[[str], Any], batch: Batch) -> None:
    model = served("mixtral")
    model.model.layers[1].mlp.gate = OtherTopKRouter(kind).to(batch[0].device)
    with pytest.raises(ArgumentError, match=complaint):
        serve_routers(model)
    with torch.no_grad(), counted() as seen:
        model.model.layers[0].mlp(torch.randn(1, 3, 64, device=batch[0].device))
    assert seen == {"fused_moe": 1}


def test_refuses_experts_by_others(tiny: Tiny) -> None:
    model = tiny("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(ArgumentError, match=r"`model` has experts by 'eager'; accepted: experts by 'hal'"):
        serve_routers(model)
    with pytest.raises(ArgumentError, match="has no experts that an implementation can be chosen for"):
        serve_routers(tiny("llama-gqa"))
