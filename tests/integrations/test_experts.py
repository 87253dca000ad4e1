"""Mixtures of experts through transformers, their experts computed by `fused_moe`; small random models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations import moe

import hal
import hal.integrations.transformers as hal_transformers
from hal.errors import ArgumentError
from hal.integrations.expert_gates import gate_options
from hal.integrations.experts import expert_modules, experts
from hal.integrations.transformers import PagedCache
from tests.integrations.expert_runs import Batch, counted, logits
from tests.integrations.tiny_models import MIXTURES

Tiny = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    assert hal_transformers.register() == "hal"


@contextmanager
def routed_alike(model: Any, record: dict[str, Any]) -> Iterator[None]:
    """Record what each router chose, or, where that was recorded, choose it again: the teacher of 16-bit models."""

    def hook(name: str) -> Callable[..., Any]:
        def teach(module: Any, args: Any, output: Any) -> Any:
            _, weights, ids = record.setdefault(name, output)
            return output[0], weights.to(output[1].dtype), ids

        return teach

    routers = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")}
    assert routers
    handles = [module.register_forward_hook(hook(name)) for name, module in routers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", MIXTURES)
def test_fp32_logits_equal_eager_experts(name: str, tiny: Tiny, batch: Batch) -> None:
    model = tiny(name)
    expected = logits(model, "eager", batch)
    with counted() as seen:
        found = logits(model, "hal", batch)
    assert seen == {"fused_moe": len(expert_modules(model))}
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_sixteen_bit_logits_teacher_forced(name: str, dtype: torch.dtype, tiny: Tiny, batch: Batch) -> None:
    """The same tokens through the same experts; logits must be as close to fp32's as those of eager experts are."""
    model = tiny(name)
    record: dict[str, Any] = {}
    with routed_alike(model, record):
        exact = logits(model, "eager", batch)
    model = tiny(name, dtype)
    with routed_alike(model, record):
        theirs, ours = logits(model, "eager", batch), logits(model, "hal", batch)
    real = batch[1].bool()
    error, allowed = (ours - exact)[real].abs(), (theirs - exact)[real].abs()
    assert error.mean() <= 1.1 * allowed.mean(), f"mean error {error.mean():.4f}, eager's own {allowed.mean():.4f}"
    assert error.max() <= 2 * allowed.max(), f"largest error {error.max():.4f}, eager's own {allowed.max():.4f}"


@pytest.mark.parametrize("name", MIXTURES)
def test_a_wrong_expert_would_show(name: str, tiny: Tiny, batch: Batch) -> None:
    """The logits compared above depend on experts, biases included, far beyond the tolerance."""
    model = tiny(name)
    expected = logits(model, "hal", batch)
    for parameter in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        module = expert_modules(model)[-1]
        value = getattr(module, parameter, None)
        if value is None:
            continue
        kept = value.data
        value.data = kept.roll(1, 0)  # each expert with the weights of its neighbour
        assert (logits(model, "hal", batch) - expected).abs().max() > 1e-2 * expected.abs().max(), parameter
        value.data = kept


@pytest.mark.parametrize("name", MIXTURES)
def test_generate_with_attention_and_experts_by_hal(name: str, tiny: Tiny, batch: Batch) -> None:
    """Greedy tokens of a left-padded batch equal those of transformers' own attention and eager experts; every call was served."""
    model = tiny(name)
    ids, mask = batch
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    model.set_attn_implementation(MIXTURES[name][2])
    model.set_experts_implementation("eager")
    expected = model.generate(**options)
    assert expected[:, ids.shape[1] :].unique().numel() > 2, "a constant answer proves nothing"
    model.set_attn_implementation("hal")
    model.set_experts_implementation("hal")
    with counted() as seen:
        found = model.generate(**options, **PagedCache.for_model(model).as_kwargs())
    assert torch.equal(found, expected)
    assert seen["fused_moe"] == len(expert_modules(model)) * 12
    assert seen["flash_prefill"] + seen["flash_decode"] == seen["write_kv"] == model.config.num_hidden_layers * 12


def test_alone_as_in_a_batch(tiny: Tiny, batch: Batch) -> None:
    """A prompt's own tokens get the same logits, whatever stands beside it."""
    model = tiny("qwen3-moe")
    ids, mask = batch
    together = logits(model, "hal", batch)
    for row in range(ids.shape[0]):
        prompt = ids[row, mask[row].bool()][None]
        alone = logits(model, "hal", (prompt, torch.ones_like(prompt)))
        torch.testing.assert_close(together[row, mask[row].bool()], alone[0], rtol=0, atol=2e-5 * float(together.abs().max()))


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_are_served_as_they_lie(name: str, tiny: Tiny, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    calls: list[tuple[Any, ...]] = []

    class Spy:
        def fused_moe(self, *args: Any, **kwargs: Any) -> Tensor:
            calls.append((args, kwargs))
            return hal.get_backend("reference").fused_moe(*args, **kwargs)

    spy = Spy()
    monkeypatch.setattr("hal.integrations.experts.hal.get_backend", lambda name=None, real=hal.get_backend: real(name) if name else spy)
    logits(model, "hal", batch)
    for module, (args, kwargs) in zip(expert_modules(model), calls, strict=True):
        given = {"gate_up_proj": args[1], "down_proj": args[2], "gate_up_proj_bias": kwargs.get("b_gate_up"), "down_proj_bias": kwargs.get("b_down")}
        for parameter, tensor in given.items():
            assert (tensor is None) == (getattr(module, parameter, None) is None), parameter
            assert tensor is None or tensor.data_ptr() == getattr(module, parameter).data_ptr(), parameter


def test_offloaded_by_accelerate(tiny: Tiny, batch: Batch) -> None:
    """Weights that come to the device for the call and leave after it."""
    accelerate = pytest.importorskip("accelerate")
    for name in ("mixtral", "gpt-oss"):
        model = tiny(name)
        expected = logits(model, "hal", batch)
        accelerate.cpu_offload(model, execution_device=batch[0].device)
        assert expert_modules(model)[0].gate_up_proj.device.type == "meta"
        with counted() as seen:
            found = logits(model, "hal", batch)
        assert seen["fused_moe"] == 3
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("trainable", "argument"),
    [("embed_tokens", "x"), ("gate_up_proj", "w_gate_up"), ("down_proj", "w_down"), ("proj_bias", "b_gate_up"), ("router.weight", "weights")],
)
def test_refuses_gradients(trainable: str, argument: str, tiny: Tiny, batch: Batch) -> None:
    """Whatever alone is to be trained: the op has no backward, and says so."""
    model = tiny("gpt-oss")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable in name and (trainable == "proj_bias") == name.endswith("bias"))
    model.set_experts_implementation("hal")
    with pytest.raises(ArgumentError, match=rf"fused_moe: `{argument}` requires grad.*torch.no_grad"):
        model(input_ids=batch[0], use_cache=False)


def test_experts_held_elsewhere_are_skipped(tiny: Tiny, device: torch.device) -> None:
    """As under expert parallelism, where the ids of other ranks' experts are E."""
    module = expert_modules(tiny("mixtral"))[0]
    x = torch.randn(6, 64, device=device)
    ids = torch.tensor([[0, 1], [2, 3], [4, 1], [3, 4], [4, 4], [1, 0]], device=device)
    weights = torch.rand(6, 2, device=device)
    with torch.no_grad():
        found = experts(module, x, ids, weights)
        expected = experts(module, x, ids.clamp(max=3), weights.masked_fill(ids == 4, 0))
    torch.testing.assert_close(found, expected)
    assert not found[4].any()


class Experts(torch.nn.Module):
    """What transformers' decorator wraps."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(2, 12, 4), requires_grad=False)
        self.down_proj = torch.nn.Parameter(torch.randn(2, 4, 6), requires_grad=False)
        self.act_fn = config.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError


class Config:
    _experts_implementation = "hal"

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def build(act: str, gate: Callable[..., Tensor] | None = None, marks: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """Experts with this activation, gate function and attributes."""
    from transformers.activations import ACT2FN

    members = {} if gate is None else {"_apply_gate": gate}
    own = moe.use_experts_implementation(**marks or {})(
        type("OwnExperts", (Experts,), members | {"__init__": Experts.__init__, "forward": Experts.forward})
    )
    module = own(Config(hidden_act=act, act_fn=ACT2FN[act]))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def clamped(self: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def oai(self: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate = gate.clamp(max=self.swiglu_limit)
    return gate * torch.sigmoid(self.swiglu_alpha * gate) * (up.clamp(-self.swiglu_limit, self.swiglu_limit) + 1)


KNOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "silu": (lambda: build("silu"), {"activation": "silu"}),
    "swish": (lambda: build("swish"), {"activation": "silu"}),
    "gelu": (lambda: build("gelu"), {"activation": "gelu"}),
    "gelu_new": (lambda: build("gelu_new"), {"activation": "gelu_tanh"}),
    "gelu_pytorch_tanh": (lambda: build("gelu_pytorch_tanh"), {"activation": "gelu_tanh"}),
    "limit-not-applied": (lambda: build("silu", limit=7.0), {"activation": "silu"}),
    "clamped-silu": (lambda: build("silu", clamped, limit=10.0), {"activation": "silu", "limit": 10.0}),
    "oai-concat": (lambda: build("silu", oai, swiglu_limit=5, swiglu_alpha=1.5), {"activation": "swiglu_oai", "alpha": 1.5, "limit": 5.0}),
}


@pytest.mark.parametrize("case", KNOWN)
def test_activations_are_recognised(case: str) -> None:
    make, expected = KNOWN[case]
    assert gate_options(make()) == {"gate_up": "concat"} | expected


@pytest.mark.parametrize("case", KNOWN)
def test_recognised_activations_are_computed(case: str) -> None:
    module = KNOWN[case][0]()
    x, ids, weights = 9 * torch.randn(5, 4), torch.tensor([[0, 1]]).expand(5, 2), torch.rand(5, 2)
    expected = torch.zeros(5, 4)
    for expert in (0, 1):
        hidden = module._apply_gate(x @ module.gate_up_proj[expert].T)
        expected += weights[:, expert, None] * (hidden @ module.down_proj[expert].T)
    torch.testing.assert_close(module(x, ids, weights), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def softcapped(self: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return 30 * torch.tanh(torch.nn.functional.silu(gate) * up / 30)


class Learned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: build("relu"), r"`activation` of OwnExperts \(Config\) is 'relu', ReLU; accepted: silu, gelu, gelu_tanh, swiglu_oai"),
        (lambda: build("quick_gelu"), r"is 'quick_gelu', QuickGELUActivation; .*experts_implementation='eager'"),
        (lambda: build("silu", softcapped), r"is 'silu', SiLUActivation, in a gate function of its own"),
        (lambda: build("silu", clamped, limit=-1.0), "in a gate function of its own"),
        (lambda: build("silu", act_fn=Learned()), "is 'silu', Learned"),
        (lambda: build("silu", marks={"has_gate": False}), "OwnExperts has no gate"),
        (lambda: build("silu", has_post_expert_norm=True), "OwnExperts normalises"),
    ],
    ids=["relu", "quick-gelu", "softcap", "odd-limit", "learned", "no-gate", "post-norm"],
)
def test_refuses_what_fused_moe_does_not_do(make: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        make()(torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))


def test_recognition_does_not_depend_on_ambient_settings() -> None:
    """Neither autocast nor a default device nor grad mode may make a known gate unknown."""
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert gate_options(KNOWN["oai-concat"][0]())["activation"] == "swiglu_oai"
        assert gate_options(KNOWN["gelu"][0]())["activation"] == "gelu"
