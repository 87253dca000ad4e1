"""Launches of a kernel that is all that a call does, by the form of the call.

A form is everything that a launch depends on but addresses. The first call of a form goes through Triton; later ones
differ in their pointers only and are launched directly (`hal.kernels.direct`). A form must name the host thread,
because a remembered launch is changed in place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.kernels.direct import DirectKernel, can_launch_directly

__all__ = ["Repeats"]

_MOST_FORMS = 4096
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # without the look whether CUDA is set up
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Repeats:
    """Remembered launches of one op.

    Args:
        names: the kernel's pointers that differ between calls; those that are None in the first call of a form stay None.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._known: dict[Hashable, tuple[DirectKernel, int, tuple[int, ...]]] = {}

    def launch(self, form: Hashable, pointers: Sequence[Tensor]) -> bool:
        """Launch if a call of this form is known; return whether that was done: not for another alignment or current device.

        Args:
            form: of the call.
            pointers: in the order of the names, without those that are None.
        """
        known = self._known.get(form)
        if known is None:
            return False
        kernel, index, places = known
        if _current_device() != index:
            return False
        slots, together = kernel.slots, 0
        for place, tensor in zip(places, pointers, strict=True):
            slots[place] = address = tensor.data_ptr()
            together |= address
        if together & 15:
            return False
        kernel.launch(_current_stream(index))
        return True

    def remember(self, form: Hashable, compiled: Any, arguments: Sequence[Any], programs: int, *, pdl: bool) -> None:
        """Keep a launch; nothing where it cannot be repeated directly, as on AMD.

        Args:
            form: of the call.
            compiled: what the launch through Triton returned.
            arguments: of that launch, in the kernel's order.
            programs: of that launch.
            pdl: whether it took part in programmatic dependent launch.
        """
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        if torch.version.hip is not None or not can_launch_directly(compiled) or any(t.data_ptr() & 15 for t in tensors):
            return
        if len(self._known) >= _MOST_FORMS:
            self._known.clear()
        kernel = DirectKernel(compiled, arguments, programs, pdl=pdl)
        places = tuple(kernel.places[name] for name in self._names if name in kernel.places)
        self._known[form] = kernel, tensors[0].device.index, places
