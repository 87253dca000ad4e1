"""The backend under test: every call to it is explained, observed, checked and compared."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hal.conformance import oracle
from hal.conformance.compare import LSE, OUTPUT, assert_same_bits, close
from hal.conformance.inputs import Built
from hal.conformance.moe_judge import JUDGES
from hal.conformance.outcomes import Refused
from hal.conformance.tensors import mapped, tensors
from hal.errors import ResolutionError
from hal.ops import OPS
from hal.report import Report

__all__ = ["WRITTEN", "Subject"]

_ROUTED = ("weights", "ids")
#: Arguments that an op writes, in the order of its results; `out` alone where it is not listed.
WRITTEN = {
    "flash_decode": ("out", "lse"),
    "flash_prefill": ("out", "lse"),
    "merge_states": ("out", "lse"),
    "write_kv": ("k_cache", "v_cache"),
    "topk_softmax": _ROUTED,
    "route": _ROUTED,
    "moe_index": ("out.0", "out.1", "out.2"),
}
_ORACLES = {"flash_decode": oracle.flash_decode, "flash_prefill": oracle.flash_prefill, "merge_states": oracle.merge_states}
_QUERY = {"flash_decode": "q", "flash_prefill": "q", "merge_states": "out_a"}
_RESULT = "the result"
_PER_CALL_CODES = {"DTYPE", "SHAPE", "LAYOUT", "FEATURE"}


@dataclass
class _Record:
    """What one case did."""

    case: str = ""
    entered: int = 0
    max_error: float = 0.0
    warnings: tuple[str, ...] = ()


def _nearby(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments on the CPU, where thousands of tiny steps are cheap, unless they are too large to move."""
    if sum(t.numel() for t in tensors(args).values()) > 2**24:
        return args
    return mapped(args, Tensor.cpu)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The oracle's thousands of tiny steps only lose by threads that wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Subject:
    """A backend under test.

    Args:
        name: its name.
        device: where the tensors of all cases live.
        seed: seed of the suite; every case derives its own generator from it and its id.
        build: makes the backend object: (validate, observer) -> backend.
        declared: the ops that the backend declares.
    """

    def __init__(self, name: str, device: torch.device, seed: int, build: Callable[..., Any], declared: frozenset[str]) -> None:
        self.name, self.device, self.seed, self.declared = name, device, seed, declared
        self._build = build
        self._entries: list[tuple[str, str]] = []
        self._backends: dict[str, Any] = {}
        self.record = _Record()
        self.direct = False

    def backend(self, validate: str = "first") -> Any:
        """Return the observed backend object under one `validate` setting."""
        if validate not in self._backends:
            self._backends[validate] = self._build(validate, self._observe)
        return self._backends[validate]

    def fresh_backend(self) -> Any:
        """Return a new backend object, which has seen no call yet."""
        return self._build("first", self._observe)

    def host_sync(self, op: str, args: dict[str, Any]) -> bool:
        """Whether the backend under test declares that it waits for the device."""
        return bool(self._under_test(self.backend().explain(op, **args)).host_sync)

    def _observe(self, op: str, backend: str, target: str) -> None:
        self._entries.append((op, backend))

    @property
    def entries(self) -> int:
        """How often any implementation was entered since the case began."""
        return len(self._entries)

    def start(self, case: str) -> None:
        """Begin a case."""
        self.record = _Record(case)
        self.direct = False
        self._entries.clear()

    @contextmanager
    def bypassing_gates(self) -> Iterator[None]:
        """Call targets directly, whatever their gates say: shows claims that are narrower than the kernel."""
        self.direct = True
        try:
            yield
        finally:
            self.direct = False

    def case_seed(self) -> int:
        """Return the seed of the running case."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{self.record.case}".encode()).digest()[:6], "big")

    def generator(self) -> torch.Generator:
        """Return a CPU generator for the running case."""
        return torch.Generator().manual_seed(self.case_seed())

    def require(self, op: str) -> None:
        """End the case as refused if the backend does not declare `op`, or cannot serve it here."""
        report = self.backend().explain(op, device=self.device)
        if self._under_test(report).reasons:
            raise self._refused(report)

    def require_call(self, op: str, args: dict[str, Any]) -> None:
        """End the case as refused if a call with these facts would be refused; nothing is run."""
        report = self.backend().explain(op, **args)
        if report.chosen is None:
            raise self._refused(report)

    def call(self, op: str, args: dict[str, Any], validate: str = "first", frozen: bool = True) -> Any:
        """Make one call and check all but the numbers.

        Checks that `explain` foretells the outcome; that a refusal has reasons and wrote nothing; that the backend
        under test, and no other, was entered; that inputs are unchanged (`frozen`) and outputs are those of `Op.meta`.

        Raises:
            Refused: the call was refused properly.
            AssertionError: one of these checks failed.
        """
        if self.direct:
            return self._call_target(op, args, validate)
        backend, before = self.backend(validate), len(self._entries)
        foretold: Report = backend.explain(op, **args)
        given = tensors(args)
        snapshot = {n: t.clone() for n, t in given.items()} if frozen else {}
        try:
            result = getattr(backend, op)(**args)
        except ResolutionError as error:
            self._check_refusal(op, args, foretold, error, snapshot, before)
            raise self._refused(foretold) from error
        entries = self._entries[before:]
        if foretold.chosen != self.name:
            raise AssertionError(f"{op} ran, but explain had foretold: {foretold}")
        if (op, self.name) not in entries or any(who != self.name for _, who in entries):
            raise AssertionError(f"{op}: the implementations entered were {entries}, not those of {self.name!r} alone")
        self.record.entered += 1
        written = WRITTEN.get(op, ("out",))
        for name in snapshot:
            if name not in written and not (op == "write_kv" and name in ("k_scale", "v_scale")):
                assert_same_bits(f"{op}: input `{name}` after the call", given[name], snapshot[name])
        self._check_outputs(op, args, result)
        return result

    def _call_target(self, op: str, args: dict[str, Any], validate: str) -> Any:
        target = self._under_test(self.backend(validate).explain(op, **args)).target
        module, _, function = target.partition(":")
        implementation: Any = importlib.import_module(module)
        for part in function.split("."):
            implementation = getattr(implementation, part)
        result = implementation(**args)
        self._check_outputs(op, args, result)
        return result

    def _under_test(self, report: Report) -> Any:
        return next(c for c in report.candidates if c.backend == self.name)

    def _refused(self, report: Report) -> Refused:
        reasons = self._under_test(report).reasons
        return Refused(report.op, tuple(str(r) for r in reasons), tuple(r.code.value for r in reasons))

    def _check_refusal(
        self, op: str, args: dict[str, Any], foretold: Report, error: ResolutionError, snapshot: dict[str, Tensor], before: int
    ) -> None:
        if self._entries[before:]:
            raise AssertionError(f"{op} was refused after launch: {self._entries[before:]} had been entered") from error
        if foretold.chosen is not None:
            raise AssertionError(f"{op} was refused, but explain had foretold {foretold.chosen!r}") from error
        reasons = self._under_test(foretold).reasons
        if not reasons or not all(r.text.strip() for r in reasons):
            raise AssertionError(f"{op} was refused without a reason: {foretold}") from error
        if error.report is None or self._under_test(error.report).reasons != reasons:
            raise AssertionError(f"{op}: the error gives other reasons than explain gave before: {error} / {foretold}") from error
        given = tensors(args)
        for name, kept in snapshot.items():
            assert_same_bits(f"{op}: `{name}` after a refusal", given[name], kept)

    def _check_outputs(self, op: str, args: dict[str, Any], result: Any) -> None:
        bound = OPS[op].bind((), args)
        expected = OPS[op].meta(bound)
        if not expected:
            return
        outputs = result if isinstance(result, tuple) else (result,)
        passed, written = tensors(vars(bound)), WRITTEN.get(op, ("out",))
        if len(outputs) != len(expected):
            raise AssertionError(f"{op}: {len(outputs)} outputs, the contract has {len(expected)}")
        for index, (got, meta) in enumerate(zip(outputs, expected, strict=True)):
            if tuple(got.shape) != meta.shape or got.dtype != meta.dtype or got.device != self._device_of(args):
                raise AssertionError(f"{op}: output {index} is {tuple(got.shape)} {got.dtype} on {got.device}, the contract has {meta}")
            given = passed.get(written[index])
            if given is not None and (got.data_ptr() != given.data_ptr() or got.stride() != given.stride()):
                raise AssertionError(f"{op}: output {index} is not the tensor that was passed in")

    def _device_of(self, args: dict[str, Any]) -> torch.device:
        return next(t.device for t in args.values() if isinstance(t, Tensor))

    def verify(self, op: str, built: Built | dict[str, Any], validate: str = "first", frozen: bool = True) -> Any:
        """Make one call and compare its results with the oracle; returns them, those of attention as (out, lse or None)."""
        built = built if isinstance(built, Built) else Built(built)
        around = {name: (buffer, buffer.clone()) for name, buffer in built.buffers.items()}
        result = self.call(op, built.args, validate, frozen)
        for name, (buffer, kept) in around.items():
            inside = torch.zeros(buffer.numel(), dtype=torch.bool, device=buffer.device)
            view = built.args[name]
            inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
            outside = ~inside.view(buffer.shape)
            assert_same_bits(f"{op}: memory around `{name}`", buffer[outside], kept[outside])
        if op in JUDGES:
            self.expect_moe(op, built.args, result)
            return result
        bound = vars(OPS[op].bind((), built.args))
        out, lse = (*result, None)[:2] if isinstance(result, tuple) else (result, bound["lse"])
        self.expect(op, built.args, out, lse)
        return out, lse

    def expect(self, op: str, args: dict[str, Any], out: Tensor, lse: Tensor | None) -> None:
        """Compare results that were made otherwise, by a graph replay for instance, with the oracle."""
        bound = vars(OPS[op].bind((), args))
        with _one_thread():
            expected_out, expected_lse = _ORACLES[op](_nearby(bound))
        self.compare(bound[_QUERY[op]].dtype, out, expected_out, lse, expected_lse)

    def expect_moe(self, op: str, args: dict[str, Any], result: Any) -> None:
        """Compare the result of a routing or expert op, made by a call or otherwise, with the oracle."""
        near = _nearby({_RESULT: result, **vars(OPS[op].bind((), args))})
        result = near.pop(_RESULT)
        with _one_thread():
            self.note_error(JUDGES[op](near, result))

    def compare(self, dtype: torch.dtype, out: Tensor, expected_out: Tensor, lse: Tensor | None = None, expected_lse: Tensor | None = None) -> None:
        """Compare results with float64 ones at the tolerances of `dtype`."""
        self.note_error(close("out", out, expected_out, OUTPUT[dtype]))
        if lse is not None and expected_lse is not None:
            self.note_error(close("lse", lse, expected_lse, LSE[dtype], least=1.0))

    def note_error(self, error: float) -> None:
        """Keep the largest error of the case for the report."""
        self.record.max_error = max(self.record.max_error, error)

    def warn(self, text: str) -> None:
        """Add a warning to the report of the case."""
        self.record = replace(self.record, warnings=(*self.record.warnings, text))

    def narrower(self, refusal: Refused) -> bool:
        """Whether a refusal rests on the facts of the call alone, so that the target can be tried directly."""
        return bool(refusal.codes) and set(refusal.codes) <= _PER_CALL_CODES
