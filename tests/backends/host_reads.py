"""What must not happen on the path that an accelerator takes, shown on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoHostReads(TorchDispatchMode):
    """Raises where an accelerator would wait for the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), func
        if str(func).startswith(("aten.index.", "aten.index_put")):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))
