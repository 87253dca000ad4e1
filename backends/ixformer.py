"""Iluvatar CoreX cards through the vendor's `ixformer`.

Version 0.1 declares the backend, so that configs may name it and reports tell what the machine has; it serves no op
yet, and every op says so with NOT_IMPLEMENTED.
"""

from __future__ import annotations

from hal.spec import BackendSpec, KVCachePreference, Package, Requires

__all__ = ["backend"]


def backend() -> BackendSpec:
    """Declare the backend."""
    return BackendSpec(
        name="ixformer",
        api_version=1,
        implementations={},
        requires=Requires(
            devices=("cuda",),
            vendors=("iluvatar",),
            packages=(Package("ixformer", install="ixformer ships with Iluvatar's CoreX SDK image; it is not in the package index."),),
        ),
        # ixformer's paged kernels read pages of [kv_heads, slots, head_dim].
        kv_cache=KVCachePreference(layout="HND", page_size=16),
        description="Iluvatar CoreX cards (BI-V100, BI-V150) through ixformer; no op served yet",
    )
