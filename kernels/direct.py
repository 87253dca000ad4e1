"""Launch a compiled kernel again with other pointers, past Triton's launcher.

Triton's own way to a launch binds, specialises and unpacks every argument in Python: 10 to 20 us on a server's CPU. A
kernel that is launched many times with arguments of one form differs only in some pointers, so its parameters are laid
out once and the driver's `cuLaunchKernelEx` is called on them. The layout (arguments that are not constants, in order,
then two unused scratch pointers) is Triton's, checked against the versions named in `SUPPORTED`; others, and processes
in which somebody hooks Triton's launches, keep to Triton's launcher (hooks set later do not see direct launches).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import triton
from torch import Tensor

__all__ = ["SUPPORTED", "DirectKernel", "can_launch_directly"]

#: Triton versions (major.minor) whose parameter layout is known.
SUPPORTED = ("3.6",)
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


def can_launch_directly(compiled: Any) -> bool:
    """Whether a kernel that Triton has just launched can be launched again by `DirectKernel`."""
    if ".".join(triton.__version__.split(".")[:2]) not in SUPPORTED:
        return False
    hooked = any(getattr(hook, "calls", hook) for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook))
    metadata = compiled.metadata
    return not hooked and metadata.global_scratch_size == 0 and metadata.profile_scratch_size == 0 and metadata.num_ctas == 1


class DirectKernel:
    """A kernel with the parameters of one launch, of which pointers can be exchanged.

    Args:
        compiled: what the launch through Triton returned.
        arguments: those of that launch, in the order of the kernel's parameters; constants at the end may be left out.
        grid: programs.
        pdl: launched with programmatic dependent launch.
    """

    def __init__(self, compiled: Any, arguments: Sequence[Any], grid: int, *, pdl: bool) -> None:
        given = dict(zip(compiled.src.fn.arg_names, arguments, strict=False))
        kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        #: The parameters, 8 bytes each.
        self.slots = (ctypes.c_uint64 * (len(kinds) + 2))()
        #: Argument -> its place among the parameters.
        self.places = {name: place for place, name in enumerate(kinds)}
        for place, (name, kind) in enumerate(kinds.items()):
            self.slots[place] = _bits(kind, given[name])
        base = ctypes.addressof(self.slots)
        self._parameters = (ctypes.c_void_p * len(self.slots))(*(base + 8 * i for i in range(len(self.slots))))
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        block = 32 * compiled.metadata.num_warps
        self._config = _Config((grid, 1, 1), (block, 1, 1), compiled.metadata.shared, None, ctypes.addressof(self._attribute), int(pdl))
        self._arguments = (ctypes.byref(self._config), ctypes.c_void_p(compiled.function), self._parameters, None)
        self._compiled = compiled  # keeps the module loaded
        self._driver = _driver()

    def launch(self, stream: int) -> None:
        """Launch on `stream` with the addresses that `slots` holds; not by two threads at once."""
        self._config.stream = stream
        status = self._driver(*self._arguments)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {status}")


def _bits(kind: str, value: Any) -> int:
    """A parameter's bytes, as an unsigned number."""
    if kind.startswith("*"):
        return int(value.data_ptr()) if isinstance(value, Tensor) else int(value)
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    if kind not in ("i32", "i64"):
        raise ValueError(f"a parameter of type {kind} cannot be laid out")
    return int(value) & (2**64 - 1)
