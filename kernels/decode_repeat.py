"""`flash_decode` calls of a form that was launched before: their arguments differ in addresses only.

A form is everything that a launch depends on but addresses: shapes, strides, dtypes and numbers. The first call of a
form goes through Triton and is remembered here if its main kernel does all the work; later ones look up the form and
launch directly (`hal.kernels.direct`). Forms belong to a host thread, because a remembered launch is changed in place.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from hal.kernels.decode_partition import Partition, PlanBuffer
from hal.kernels.direct import DirectKernel, can_launch_directly
from hal.kernels.scratch import counters, scratch

__all__ = ["REPEATS", "Repeat", "form_of", "remember"]

#: form -> launch. Emptied when it has grown beyond any use.
REPEATS: dict[Hashable, Repeat] = {}
_MOST_FORMS = 4096
_capturing = torch.cuda.is_current_stream_capturing
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # without the look whether CUDA is set up
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_thread = threading.get_ident


def form_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
    lse: Tensor | None,
    q_len: int,
    kv_layout: str,
    scale: float,
    softcap: float,
    window: int | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> Hashable | None:
    """The form of a call without optional tensors, None if a scale is one."""
    if isinstance(k_scale, Tensor) or isinstance(v_scale, Tensor):
        return None
    return (
        _thread(), q.get_device(), q.dtype, q.shape, q.stride(), k_cache.dtype, k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride(),
        seq_lens.shape, block_tables.shape, block_tables.stride(), out.dtype, out.stride(), None if lse is None else lse.stride(),
        q_len, kv_layout, scale, softcap, window, k_scale, v_scale, k_cache.data_ptr() == v_cache.data_ptr(),
    )  # fmt: skip


class Repeat:
    """A remembered launch, of the planner too for calls without a plan.

    Args:
        main: the main kernel with the first call's parameters.
        planner: the planner, once a call without a plan has launched it.
        partition: of the call.
        sizes: elements of scratch: partials (fp32), counters (int32), plan (int32).
        device: where.
    """

    def __init__(
        self, main: DirectKernel, planner: DirectKernel | None, partition: Partition, sizes: tuple[int, int, int], device: torch.device
    ) -> None:
        self.planner = planner
        self._main, self._partition, self._sizes, self._device, self._index = main, partition, sizes, device, device.index
        self._slots = main.slots
        at = main.places
        self._q, self._k, self._v, self._out = at["q_ptr"], at["k_ptr"], at["v_ptr"], at["out_ptr"]
        self._lens, self._tables, self._plan = at["seq_lens_ptr"], at["tables_ptr"], at["plan_ptr"]
        self._parts, self._counts, self._lse = at["part_ptr"], at["counter_ptr"], at.get("lse_ptr", -1)
        self._work: dict[int, tuple[Tensor, ...]] = {}

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        out: Tensor,
        lse: Tensor | None,
        plan: PlanBuffer | None,
    ) -> bool:
        """Launch, and return whether that was done: not for another partition, alignment or current device."""
        index = self._index
        if _current_device() != index:
            return False
        stream = _current_stream(index)
        work = self._work.get(stream)
        if work is None or _capturing():
            work = self._buffers(stream)
        slots = self._slots
        # One after the other, without a loop: this is most of what a call costs.
        slots[self._q] = a = q.data_ptr()
        slots[self._k] = b = k_cache.data_ptr()
        slots[self._v] = c = v_cache.data_ptr()
        slots[self._out] = d = out.data_ptr()
        slots[self._lens] = e = seq_lens.data_ptr()
        slots[self._tables] = f = block_tables.data_ptr()
        aligned = a | b | c | d | e | f
        if lse is not None:
            slots[self._lse] = g = lse.data_ptr()
            aligned |= g
        if aligned & 15:
            return False
        if plan is not None and plan.words is not None and (plan.partition is self._partition or plan.partition == self._partition):
            words = plan.words.data_ptr()
        elif self.planner is not None:
            planner = self.planner
            words = work[2].data_ptr()
            planner.slots[planner.places["plan_ptr"]] = words
            planner.slots[planner.places["seq_lens_ptr"]] = e
            planner.launch(stream)
        else:
            return False
        slots[self._plan] = words
        slots[self._parts] = work[0].data_ptr()
        slots[self._counts] = work[1].data_ptr()
        self._main.launch(stream)
        return True

    def _buffers(self, stream: int) -> tuple[Tensor, ...]:
        """Scratch of the current stream; of the capture, which keeps its own, if one is under way."""
        partials, counts, words = self._sizes
        device = self._device
        work = scratch("partials", partials, torch.float32, device), counters(counts, device), scratch("plan", words, torch.int32, device)
        if not _capturing():
            self._work[stream] = work
        return work


def remember(
    key: Hashable,
    main: tuple[Any, tuple[Any, ...]],
    planner: tuple[Any, tuple[Any, ...]] | None,
    partition: Partition,
    *,
    pdl: bool,
) -> None:
    """Keep a launch of the Hopper kernel for calls of the form `key`; nothing where it cannot be repeated directly.

    Args:
        key: from `form_of`.
        main: what the launch of the main kernel returned, and its arguments in the kernel's order.
        planner: the same of the planner, None if the call had a plan.
        partition: of the call.
        pdl: whether they took part in programmatic dependent launch.
    """
    compiled, arguments = main
    q, out, seq_lens, heads = arguments[0], arguments[3], arguments[8], arguments[26]
    if not can_launch_directly(compiled) or any(a.data_ptr() & 15 for a in arguments if isinstance(a, Tensor)):
        return
    before = REPEATS.get(key)
    if len(REPEATS) >= _MOST_FORMS:
        REPEATS.clear()
    plan_launch = before.planner if before is not None else None
    if planner is not None:
        plan_launch = DirectKernel(*planner, partition.pieces + 1, pdl=pdl)
    sizes = partition.slots * heads * partition.block_m * (out.shape[2] + 1), 3 * partition.pieces * heads, partition.words(seq_lens.shape[0])
    REPEATS[key] = Repeat(DirectKernel(compiled, arguments, partition.pieces * heads, pdl=pdl), plan_launch, partition, sizes, q.device)
