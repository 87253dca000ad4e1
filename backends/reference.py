"""The reference backend: PyTorch on any device. It is the living specification of the ops and the default on a CPU."""

from __future__ import annotations

from hal.spec import BackendSpec, Implementation, KVCachePreference

__all__ = ["backend"]


def backend() -> BackendSpec:
    """Declare the reference backend: every op, no requirement, no gate."""
    return BackendSpec(
        name="reference",
        api_version=1,
        implementations={
            "flash_decode": Implementation("hal.backends.reference_attention:flash_decode"),
            "flash_prefill": Implementation("hal.backends.reference_attention:flash_prefill"),
            "merge_states": Implementation("hal.backends.reference_states:merge_states"),
            "plan_decode": Implementation("hal.backends.reference_states:plan_decode"),
            "write_kv": Implementation("hal.backends.reference_kv:write_kv"),
        },
        kv_cache=KVCachePreference(layout="NHD", page_size=16),
        description="PyTorch on any device: the living specification, and the default on a CPU",
    )
