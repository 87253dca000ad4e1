"""What the launcher of `route` may ask of its kernels, for the ahead-of-time compiler."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hal.kernels.compile_case import EVERYWHERE, FLOATS, CompileCase, pointer
from hal.kernels.route import LARGE_WARPS, large_constants, route_constants, sorts_rows
from hal.kernels.route_kernel import route_kernel
from hal.kernels.route_large import route_large_kernel
from hal.kernels.route_tuning import SORT_CONFIG, route_config, sort_warps

__all__ = ["compile_cases"]

_TYPES = {"weights_ptr": "*fp32:16", "ids_ptr": "*i32:16", "scale": "fp32"}
_NUMBERS = ("tokens", "stride_w", "stride_i")


@dataclass(frozen=True)
class _Call:
    """What a call asks of the kernels; see the contract."""

    experts: int
    top_k: int
    tokens: int = 64
    groups: tuple[int, int] = (1, 1)
    sigmoid: bool = False
    renormalize: bool = False
    top2: bool = False
    bias: bool = False

    @property
    def name(self) -> str:
        """Sizes, and after them all that is not as usual."""
        marks = {"sigmoid": self.sigmoid, "renormalize": self.renormalize, "top2": self.top2, "bias": self.bias, "many-rows": self.tokens > 2048}
        grouped = [f"{self.groups[1]}of{self.groups[0]}"] if self.groups[0] > 1 else []
        return "-".join([f"E{self.experts}", f"k{self.top_k}", *grouped, *(mark for mark, holds in marks.items() if holds)])

    @property
    def modes(self) -> dict[str, object]:
        """Constants that both kernels have."""
        modes: dict[str, object] = {"GROUPS": self.groups[0], "TOP_GROUPS": self.groups[1], "SIGMOID": self.sigmoid}
        return modes | {"RENORMALIZE": self.renormalize, "TOP2": self.top2} | ({} if self.bias else {"bias_ptr": None})

    def types(self, dtype: torch.dtype, numbers: tuple[str, ...]) -> dict[str, str]:
        """Types of the arguments."""
        types = {"logits_ptr": pointer(dtype)} | _TYPES | dict.fromkeys((*_NUMBERS, *numbers), "i32")
        return types | ({"bias_ptr": "*fp32:16"} if self.bias else {})


_V3 = _Call(256, 8, groups=(8, 4), sigmoid=True, renormalize=True, top2=True, bias=True)
_V2 = _Call(160, 6, groups=(8, 3))
_FEW = (
    *(_Call(8, 2), _Call(60, 4), _Call(128, 8), _Call(128, 8, renormalize=True), _Call(128, 8, tokens=8192), _Call(256, 8), _Call(512, 10)),
    *(_Call(512, 10, tokens=8192), _Call(1024, 256), _Call(384, 8, sigmoid=True, renormalize=True, bias=True), _V2, _V3),
)
_SORTED = (
    *(_Call(512, 512), _Call(1024, 512, sigmoid=True, bias=True), _Call(4096, 100)),
    _Call(512, 260, groups=(8, 6), top2=True),
)
_MANY = (_Call(2048, 8), _Call(2048, 8, sigmoid=True, bias=True), _Call(4096, 8, groups=(8, 4), top2=True), _Call(8192, 512))


def compile_cases() -> list[CompileCase]:
    """Each call with each dtype of logits."""
    calls = [(call, dtype, *place) for dtype in FLOATS for place in EVERYWHERE for call in (*_FEW, *_SORTED, *_MANY)]
    return [(_many if call in _MANY else _few)(call, dtype, pdl, targets) for call, dtype, pdl, targets in calls]


def _name(kind: str, call: _Call, dtype: torch.dtype, pdl: bool) -> str:
    return f"{kind}/{str(dtype).removeprefix('torch.')}/{call.name}{'+pdl' if pdl else ''}"


def _few(call: _Call, dtype: torch.dtype, pdl: bool, targets: tuple[str, ...]) -> CompileCase:
    groups = call.groups[0]
    padded = groups * (1 << (call.experts // groups - 1).bit_length())
    sorts = sorts_rows(padded, call.top_k)
    config = SORT_CONFIG if sorts else route_config(padded, groups > 1, call.tokens)
    sizes = route_constants(call.experts, call.top_k, groups, call.experts, dtype.itemsize, call.bias, config)
    constants = {"EXPERTS": call.experts, "TOP_K": call.top_k, "PDL": pdl} | call.modes | sizes._asdict()
    types = call.types(dtype, ("steps",))
    if sorts:
        name, warps = _name("route-sorted", call, dtype, pdl), sort_warps(padded)
    else:
        name, warps = _name("route", call, dtype, pdl), 1
    return CompileCase(name, route_kernel, types, constants, warps=warps, stages=1, fp_fusion=False, no_spills=not sorts, targets=targets)


def _many(call: _Call, dtype: torch.dtype, pdl: bool, targets: tuple[str, ...]) -> CompileCase:
    groups_pad, block = large_constants(call.experts, call.groups[0])
    constants = {"GROUPS_PAD": groups_pad, "BLOCK": block, "PDL": pdl} | call.modes
    types = call.types(dtype, ("size", "top_k", "stride_l"))
    name = _name("route-many", call, dtype, pdl)
    return CompileCase(name, route_large_kernel, types, constants, warps=LARGE_WARPS, stages=1, fp_fusion=False, targets=targets)
