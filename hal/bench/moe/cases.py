"""The shapes that `hal bench moe` measures, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hal.bench.fill import DTYPES

__all__ = ["CPU_CASES", "CUDA_CASES", "GROUPS", "ExpertsCase", "MoeCase", "RoutingCase"]

#: Rows and columns that share a scale.
_BLOCK = 128
GROUPS = ("experts", "routing", "quant", "host")


@dataclass(frozen=True)
class ExpertsCase:
    """One call of `fused_moe`: the whole expert layer without its router.

    Attributes:
        group: which table it belongs to.
        model: whose shape it is.
        experts: E, all held here.
        hidden: H.
        inter: I.
        top_k: k.
        tokens: T.
        dtype: of x and of the result.
        quantised: dtype of quantised weights, empty for `dtype`.
        scales: `channel` or `block`, what one of their scales is for.
    """

    group: str
    model: str
    experts: int
    hidden: int
    inter: int
    top_k: int
    tokens: int
    dtype: str = "bf16"
    quantised: str = ""
    scales: str = ""

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.model} T{self.tokens}{_dtype(self.dtype)}{f' {self.quantised} {self.scales}' if self.quantised else ''}"

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert and their scales."""
        size = 3 * self.hidden * self.inter * DTYPES[self.quantised or self.dtype].itemsize
        return size + 4 * sum(rows * columns for rows, columns in self.scale_shapes)

    @property
    def scale_shapes(self) -> tuple[tuple[int, int], ...]:
        """Scales of an expert's `w_gate_up` and `w_down`: outputs by 1, or blocks; nothing if it has none."""
        if not self.quantised:
            return ()
        shapes = ((2 * self.inter, self.hidden), (self.hidden, self.inter))
        return tuple((n, 1) if self.scales == "channel" else (-(-n // _BLOCK), -(-k // _BLOCK)) for n, k in shapes)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products."""
        return 2 * self.tokens * self.top_k * 3 * self.hidden * self.inter

    @property
    def activation_bytes(self) -> int:
        """Bytes that the results of both products take, in x's dtype: (T * k, I) behind the activation and (T * k, H) before the sum."""
        return self.tokens * self.top_k * (self.inter + self.hidden) * DTYPES[self.dtype].itemsize

    @property
    def bytes_expected(self) -> int:
        """Bytes of the experts that T * k uniform choices touch on average."""
        return int(self.experts * (1 - (1 - self.top_k / self.experts) ** self.tokens) * self.expert_bytes)


@dataclass(frozen=True)
class RoutingCase:
    """One call of `topk_softmax`: E experts, k, T tokens, dtype of the logits."""

    group: str
    experts: int
    top_k: int
    tokens: int
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"E{self.experts} k{self.top_k} T{self.tokens}{_dtype(self.dtype)}"

    @property
    def bytes_expected(self) -> int:
        """Bytes of logits, weights and ids."""
        return self.tokens * (self.experts * DTYPES[self.dtype].itemsize + self.top_k * 8)


MoeCase: TypeAlias = "ExpertsCase | RoutingCase"


def _dtype(name: str) -> str:
    """A dtype as a part of a name: the usual one is not said."""
    return "" if name == "bf16" else f" {name}"


#: model -> E, H, I, k.
_MODELS = {
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen3-next-80b": (512, 2048, 512, 10),
    "qwen3.5-35b/tp4": (256, 2048, 128, 8),
}
_TOKENS = {
    "qwen3-30b-a3b": (1, 16, 64, 256, 1024, 8192),
    "mixtral-8x7b": (1, 16, 256, 4096),
    "qwen3-next-80b": (1, 16, 256, 4096),
    "qwen3.5-35b/tp4": (64,),
}
_QUANTISED = (("int8", "channel"), ("e4m3", "channel"), ("e4m3", "block"))
_QUANTISED_TOKENS = {"qwen3-30b-a3b": (1, 16, 64, 256, 1024, 8192), "mixtral-8x7b": (16, 4096)}
#: E, k.
_ROUTERS = ((8, 2), (128, 8), (256, 8), (512, 10))
_ROUTED_TOKENS = (1, 16, 64, 256, 1024, 8192)
#: E, k, T: ends of what the op takes.
_ODD_ROUTERS = ((512, 512, 1), (512, 512, 256), (1024, 8, 64), (2048, 8, 1), (2048, 8, 1024), (4096, 8, 64))

CUDA_CASES: tuple[MoeCase, ...] = (
    *(ExpertsCase("experts", model, *_MODELS[model], tokens) for model, counts in _TOKENS.items() for tokens in counts),
    *(RoutingCase("routing", experts, k, tokens) for experts, k in _ROUTERS for tokens in _ROUTED_TOKENS),
    *(RoutingCase("routing", *router) for router in _ODD_ROUTERS),
    *(
        ExpertsCase("quant", model, *_MODELS[model], tokens, quantised=dtype, scales=scales)
        for dtype, scales in _QUANTISED
        for model, counts in _QUANTISED_TOKENS.items()
        for tokens in counts
    ),
)
#: Sizes that a CPU computes at once: they show that everything works.
CPU_CASES: tuple[MoeCase, ...] = (
    *(ExpertsCase("experts", "tiny", 8, 64, 32, 2, tokens, "fp32") for tokens in (1, 16)),
    *(RoutingCase("routing", 8, 2, tokens, "fp32") for tokens in (1, 64)),
    *(ExpertsCase("quant", "tiny", 8, 160, 32, 2, 16, "fp32", dtype, scales) for dtype, scales in _QUANTISED),
)
