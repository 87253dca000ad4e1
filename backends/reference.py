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
            "topk_softmax": Implementation("hal.backends.reference_routing:topk_softmax"),
            "route": Implementation("hal.backends.reference_routing:route"),
            "moe_index": Implementation("hal.backends.reference_moe_rows:moe_index"),
            "moe_expand": Implementation("hal.backends.reference_moe_rows:moe_expand"),
            "group_gemm": Implementation("hal.backends.reference_moe_gemm:group_gemm"),
            "silu_and_mul": Implementation("hal.backends.reference_moe_activations:silu_and_mul"),
            "gelu_and_mul": Implementation("hal.backends.reference_moe_activations:gelu_and_mul"),
            "swiglu_oai_and_mul": Implementation("hal.backends.reference_moe_activations:swiglu_oai_and_mul"),
            "moe_combine": Implementation("hal.backends.reference_moe_rows:moe_combine"),
            "fused_moe": Implementation("hal.backends.reference_moe:fused_moe"),
        },
        kv_cache=KVCachePreference(layout="NHD", page_size=16),
        description="PyTorch on any device: the living specification, and the default on a CPU",
    )
