"""Work memory of the launchers, and counters that are always zero between kernels.

A buffer belongs to (device, stream, host thread): two streams or two threads never share one, so no kernel of theirs
can race through it. It keeps its address and is never freed, because a captured CUDA graph or a queued kernel may
still use it; when a larger one is needed the old one stays alive (it at least doubles, so that at most half is idle). Under
capture the memory comes from the capture's own pool instead. Counters differ: captured ones come from a reserve, and
outgrown ones go back to the allocator, in the order of their stream.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["buffers", "counters", "current_device", "current_stream", "scratch"]

_Key = tuple[str, torch.dtype, torch.device, int, int]

_CURRENT: dict[_Key, Tensor] = {}
_COUNTERS: dict[tuple[torch.device, int, int], Tensor] = {}
#: Zeros for captured calls: (tensor, elements handed out). What a graph was given belongs to it for good.
_RESERVE: dict[torch.device, tuple[Tensor, int]] = {}
_RESERVED = 1 << 20
_RESERVE_LOCK = threading.Lock()
_RETIRED: list[Tensor] = []
_LEAST = 1024


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which `device` is current: kernels launch on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Handle of the current stream of `device`; 0 on the CPU. The raw query costs a fortieth of the public one."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def scratch(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a one-dimensional buffer of at least `size` elements with undefined content.

    Args:
        name: buffers of different names are in use at the same time.
        size: elements needed.
        dtype: of the elements.
        device: where.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=dtype, device=device)
    key = (name, dtype, device, current_stream(device), threading.get_ident())
    buffer = _CURRENT.get(key)
    if buffer is not None and buffer.shape[0] >= size:
        return buffer
    grown = max(_LEAST, size)
    if buffer is not None:
        _RETIRED.append(buffer)
        grown = max(grown, 2 * buffer.shape[0])
    _CURRENT[key] = torch.empty(grown, dtype=dtype, device=device)
    return _CURRENT[key]


def counters(size: int, device: torch.device) -> Tensor:
    """Return at least `size` int32 that are zero when a kernel begins; the kernel must leave them zero.

    Captured calls each get their own, because graphs captured on one stream may be replayed on two at once. They come
    from a reserve that eager calls fill (zeroing in the graph would cost each replay a node); if it is used up before
    such a call, they are zeroed in the graph.

    Args:
        size: elements needed.
        device: where.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        with _RESERVE_LOCK:
            reserve, used = _RESERVE.get(device, (None, 0))
            if reserve is None or used + size > reserve.shape[0]:
                return torch.zeros(size, dtype=torch.int32, device=device)
            # Whole 128 bytes: an address of another alignment would be another variant of the kernel.
            _RESERVE[device] = reserve, used + -(-size // 32) * 32
        return reserve[used : used + size]
    key = (device, current_stream(device), threading.get_ident())
    found = _COUNTERS.get(key)
    if found is None or found.shape[0] < size:
        found = _COUNTERS[key] = torch.zeros(max(_LEAST, 1 << (size - 1).bit_length()), dtype=torch.int32, device=device)
    if device.type == "cuda":
        with _RESERVE_LOCK:
            reserve, used = _RESERVE.get(device, (None, 0))
            if reserve is None or used > reserve.shape[0] // 2:
                if reserve is not None:
                    _RETIRED.append(reserve)  # graphs hold parts of it
                _RESERVE[device] = torch.zeros(_RESERVED, dtype=torch.int32, device=device), 0
    return found


def buffers() -> list[Tensor]:
    """Every buffer that a later call may reuse; tests fill them with NaN."""
    return list(_CURRENT.values())
