"""hal: a hardware-abstraction layer for LLM inference kernels.

    import hal
    backend = hal.get_backend()
    out = backend.flash_decode(q, k_cache, v_cache, seq_lens, block_tables)
    print(backend.explain("flash_decode"))

The ops and what they mean: `hal.ops`. Writing a backend: `hal.spec`. Errors: `hal.errors`.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING
from typing import Any as _Any

if not (_Path(__file__).parent / "kernels").is_dir():  # source checkout: sub-packages sit beside hal/
    __path__.append(str(_Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from hal.backend import Backend, get_backend, use_backend
    from hal.config import Choice, Config, Disabled, Source
    from hal.device import DeviceInfo, probe
    from hal.errors import (
        ArgumentError,
        CaptureError,
        ConfigError,
        FallbackError,
        HalError,
        ModelError,
        PluginError,
        ResolutionError,
        UnknownBackendError,
    )
    from hal.kv_cache import KVCacheSpec
    from hal.ops.attention_checks import AttentionCall, MergeCall, PlanCall
    from hal.ops.kv_cache import WriteKVCall
    from hal.ops.moe_activations import ActivationCall
    from hal.ops.moe_checks import MoeIndex
    from hal.ops.moe_fused import FusedMoeCall
    from hal.ops.moe_gemm import GroupGemmCall
    from hal.ops.moe_permute import MoeIndexCall, MoeRowsCall
    from hal.ops.moe_routing import RouteCall
    from hal.ops.plan import DecodePlan, PlanFacts
    from hal.reasons import Reason, ReasonCode
    from hal.registry import hookimpl
    from hal.report import Report
    from hal.spec import BackendSpec, Implementation, KVCachePreference, Package, Requires, Symbol
    from hal.version import API_VERSION, CONTRACT_VERSION, __version__
    from hal.warmup import TensorSpec

#: Public name -> module. Loaded on first use: the pytest plug-in of the conformance suite, which every pytest run of an
#: environment loads, must not bring torch along.
_EXPORTS = {
    name: module
    for module, names in {
        "hal.backend": "Backend get_backend use_backend",
        "hal.config": "Choice Config Disabled Source",
        "hal.device": "DeviceInfo probe",
        "hal.errors": "ArgumentError CaptureError ConfigError FallbackError HalError ModelError PluginError ResolutionError UnknownBackendError",
        "hal.kv_cache": "KVCacheSpec",
        "hal.ops.attention_checks": "AttentionCall MergeCall PlanCall",
        "hal.ops.kv_cache": "WriteKVCall",
        "hal.ops.moe_activations": "ActivationCall",
        "hal.ops.moe_checks": "MoeIndex",
        "hal.ops.moe_fused": "FusedMoeCall",
        "hal.ops.moe_gemm": "GroupGemmCall",
        "hal.ops.moe_permute": "MoeIndexCall MoeRowsCall",
        "hal.ops.moe_routing": "RouteCall",
        "hal.ops.plan": "DecodePlan PlanFacts",
        "hal.reasons": "Reason ReasonCode",
        "hal.registry": "hookimpl",
        "hal.report": "Report",
        "hal.spec": "BackendSpec Implementation KVCachePreference Package Requires Symbol",
        "hal.version": "API_VERSION CONTRACT_VERSION __version__",
        "hal.warmup": "TensorSpec",
    }.items()
    for name in names.split()
}

__all__ = [
    "API_VERSION",
    "CONTRACT_VERSION",
    "ActivationCall",
    "ArgumentError",
    "AttentionCall",
    "Backend",
    "BackendSpec",
    "CaptureError",
    "Choice",
    "Config",
    "ConfigError",
    "DecodePlan",
    "DeviceInfo",
    "Disabled",
    "FallbackError",
    "FusedMoeCall",
    "GroupGemmCall",
    "HalError",
    "Implementation",
    "KVCachePreference",
    "KVCacheSpec",
    "MergeCall",
    "ModelError",
    "MoeIndex",
    "MoeIndexCall",
    "MoeRowsCall",
    "Package",
    "PlanCall",
    "PlanFacts",
    "PluginError",
    "Reason",
    "ReasonCode",
    "Report",
    "Requires",
    "ResolutionError",
    "RouteCall",
    "Source",
    "Symbol",
    "TensorSpec",
    "UnknownBackendError",
    "WriteKVCall",
    "__version__",
    "get_backend",
    "hookimpl",
    "probe",
    "use_backend",
]


def __getattr__(name: str) -> _Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hal' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
