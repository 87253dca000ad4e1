"""hal: a hardware-abstraction layer for LLM inference kernels.

    import hal
    backend = hal.get_backend()
    out = backend.flash_decode(q, k_cache, v_cache, seq_lens, block_tables)
    print(backend.explain("flash_decode"))

The ops and what they mean: `hal.ops`. Writing a backend: `hal.spec`. Errors: `hal.errors`.
"""

from __future__ import annotations

from pathlib import Path as _Path

if not (_Path(__file__).parent / "kernels").is_dir():  # source checkout: sub-packages sit beside hal/
    __path__.append(str(_Path(__file__).resolve().parents[1]))

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
from hal.ops.plan import DecodePlan
from hal.reasons import Reason, ReasonCode
from hal.registry import hookimpl
from hal.report import Report
from hal.spec import BackendSpec, Implementation, KVCachePreference, Package, Requires
from hal.version import API_VERSION, CONTRACT_VERSION, __version__
from hal.warmup import TensorSpec

__all__ = [
    "API_VERSION",
    "CONTRACT_VERSION",
    "ArgumentError",
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
    "HalError",
    "Implementation",
    "KVCachePreference",
    "KVCacheSpec",
    "ModelError",
    "Package",
    "PluginError",
    "Reason",
    "ReasonCode",
    "Report",
    "Requires",
    "ResolutionError",
    "Source",
    "TensorSpec",
    "UnknownBackendError",
    "__version__",
    "get_backend",
    "hookimpl",
    "probe",
    "use_backend",
]
