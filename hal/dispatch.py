"""The call path: from a call's signature to the bound implementation, and nothing else.

A call costs one tuple of facts and one dictionary look-up. What lies behind a miss (checks, gates, announcements) is a
pure function of that tuple, so a hit may skip it. Pluggy, the environment and YAML are never touched here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from hal.config import Validate
from hal.device import probe
from hal.errors import ArgumentError, CaptureError, HalError
from hal.ops import Op
from hal.report import Report
from hal.resolve import Decision, Resolver

__all__ = ["Observer", "bind", "facts_of"]

#: Called with (op, backend, target) each time an implementation is entered.
Observer = Callable[[str, str, str], None]

#: Distinct signatures kept per op; the oldest goes first. Varying lengths of packed prefills would fill memory otherwise.
_MOST_SIGNATURES = 8192


def bind(op: Op, resolver: Resolver, validate: Validate, observe: Observer | None = None) -> Callable[..., Any]:
    """Return the function that serves `op` under this resolver."""
    keyed = _bind_keyed(op, resolver, validate, observe)
    if validate == "off" and observe is None and not resolver.gated(op):
        return _bind_direct(op, resolver, keyed)
    return keyed


def _bind_direct(op: Op, resolver: Resolver, keyed: Callable[..., Any]) -> Callable[..., Any]:
    """Without checks and gates, who serves depends on the device alone."""
    first = next(iter(op.parameters.parameters))
    table: dict[torch.device | None, Decision] = {}

    def direct(*args: Any, **kwargs: Any) -> Any:
        decision = table.get(getattr(args[0] if args else kwargs.get(first), "device", None))
        if decision is None:
            return start(args, kwargs)
        try:
            return decision.function(*args, **kwargs)
        except Exception as error:
            _annotate(error, decision.report)
            raise

    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = keyed(*args, **kwargs)  # the first call of a device goes the whole way, capture check included
        device = (args[0] if args else kwargs[first]).device
        decision = resolver.decide(op, probe(device), None)
        if not _waits(decision):  # else every call has to look for a capture
            table[device] = decision
        return result

    return _named(direct, op)


def _bind_keyed(op: Op, resolver: Resolver, validate: Validate, observe: Observer | None) -> Callable[..., Any]:
    signature = op.signature
    cache: dict[Hashable, tuple[Callable[..., Any], Report]] = {}
    lock = threading.Lock()

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            entry = cache.get(signature(*args, **kwargs))
        except (AttributeError, IndexError, TypeError, RuntimeError):
            entry = None  # something is no tensor, or of no rank: the checks will say so
        run, report = entry or prepare(args, kwargs)
        try:
            return run(*args, **kwargs)
        except Exception as error:
            _annotate(error, report)
            raise

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], Report]:
        tensor, facts = facts_of(op, args, kwargs)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{op.name}: first call of this signature inside CUDA graph capture. Make one eager call with the same shapes, strides, "
                f"dtypes and options first, or use backend.warmup({op.name!r}, specs)."
            )
        decision = resolver.decide(op, probe(tensor.device), facts)
        entry = _wrap(decision, op, validate, tensor.device, observe), decision.report
        with lock:  # threads may add signatures at the same time
            if len(cache) >= _MOST_SIGNATURES:
                del cache[next(iter(cache))]
            cache[signature(*args, **kwargs)] = entry
        return entry

    return _named(call, op)


def _wrap(decision: Decision, op: Op, validate: Validate, device: torch.device, observe: Observer | None) -> Callable[..., Any]:
    """Put around an implementation what must happen on every call of this signature, if anything."""
    run = decision.function
    winner = decision.report.winner
    assert winner is not None
    if observe is not None:
        run = _observed(run, observe, op.name, winner.backend, winner.target)
    if _waits(decision) and device.type == "cuda":
        run = _uncapturable(run, op.name, winner.backend)
    values = op.check_values
    if values is not None and (validate == "always" or (validate == "first" and device.type == "cpu")):
        run = _value_checked(run, values, device)
    return run


def _waits(decision: Decision) -> bool:
    return bool(decision.report.winner and decision.report.winner.host_sync)


def _observed(run: Callable[..., Any], observe: Observer, op: str, backend: str, target: str) -> Callable[..., Any]:
    def observed(*args: Any, **kwargs: Any) -> Any:
        observe(op, backend, target)
        return run(*args, **kwargs)

    return observed


def _uncapturable(run: Callable[..., Any], op: str, backend: str) -> Callable[..., Any]:
    def uncapturable(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"{op}: backend {backend!r} waits for the device and cannot be captured in a CUDA graph")
        return run(*args, **kwargs)

    return uncapturable


def _value_checked(run: Callable[..., Any], values: Callable[..., None], device: torch.device) -> Callable[..., Any]:
    on_cpu = device.type == "cpu"

    def checked(*args: Any, **kwargs: Any) -> Any:
        if on_cpu or not torch.cuda.is_current_stream_capturing():
            values(*args, **kwargs)
        return run(*args, **kwargs)

    return checked


def _annotate(error: Exception, report: Report) -> None:
    """Attach the resolution to a kernel's exception; errors of `hal` speak for themselves."""
    if isinstance(error, HalError):
        return
    note = f"hal: raised while serving {report}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def _named(function: Callable[..., Any], op: Op) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = op.doc
    function.__signature__ = op.parameters  # type: ignore[attr-defined]
    return function


def facts_of(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """Check a call, and return the tensor whose device decides where it runs and the facts that gates judge."""
    try:
        a = op.bind(args, kwargs)
    except TypeError as error:
        raise TypeError(f"{op.name}() {error}") from None
    name, tensor = next(iter(vars(a).items()))
    if not isinstance(tensor, Tensor):
        raise ArgumentError(op.name, name, f"is {type(tensor).__name__}", "a tensor")
    return tensor, op.check(a)
