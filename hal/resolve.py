"""From a config and a registry to decisions: static answers once per (op, device), gates once per call signature."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hal.candidates import Static, judge
from hal.config import Choice, Config
from hal.device import DeviceInfo
from hal.errors import FallbackError, PluginError, ResolutionError
from hal.ops import Op
from hal.reasons import Reason, ReasonCode
from hal.registry import REFERENCE, Registry
from hal.report import Candidate, Report
from hal.spec import BackendSpec

__all__ = ["Decision", "Resolver"]

log = logging.getLogger("hal")


@dataclass(frozen=True)
class Decision:
    """A decision that can be called.

    Attributes:
        report: the trail.
        function: the implementation.
    """

    report: Report
    function: Callable[..., Any]


class Resolver:
    """Decides for one config. Thread-safe; holds what has been learnt and what has been said."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self.config, self.registry = config, registry
        text = f"it must not stand in: the config says `fallback: error` ({config.source})"
        self._no_stand_in = (Reason(ReasonCode.DISABLED_BY_CONFIG, text, "Say `fallback: warn` to permit it."),)
        self._lock = threading.RLock()
        self._answers: dict[tuple[str, str, DeviceInfo], Static] = {}
        self._said: set[tuple[Any, ...]] = set()
        self._decided: dict[Report, Report] = {}
        self._tuned: set[str] = set()

    def decide(self, op: Op, device: DeviceInfo, call: Any) -> Decision:
        """Choose for one call, or raise ResolutionError with the whole trail. Fallbacks are announced once."""
        with self._lock:
            report = self.explain(op, device, call)
            if report.chosen is None:
                barred = any(c.reasons == self._no_stand_in for c in report.candidates)
                raise (FallbackError if barred else ResolutionError)(_refusal(report), report) from self._cause(report)
            self._announce(report)
            self._decided.setdefault(report, report)
            function = self._answer(report.chosen, op, device).function
            assert function is not None
            return Decision(report, function)

    def explain(self, op: Op, device: DeviceInfo, call: Any = None) -> Report:
        """Report what would run; without a call, gates are not asked."""
        with self._lock:
            choice = self.config.choice(op.name)
            candidates = [self._candidate(name, op, device, call) for name in choice.backends]
            if self.config.fallback == "error" and candidates[0].reasons:
                candidates = [replace(c, reasons=c.reasons or self._no_stand_in) if c.backend == REFERENCE else c for c in candidates]
            chosen = next((c.backend for c in candidates if not c.reasons), None)
            for name in self.registry.backends:
                if name not in choice.backends:
                    text = f"{choice.source} asks for {', '.join(choice.backends)} only"
                    candidates.append(Candidate(name, (Reason(ReasonCode.DISABLED_BY_CONFIG, text),), listed=False))
            return Report(op.name, device, chosen, tuple(candidates), choice, self.config.fallback, call)

    def gated(self, op: Op) -> bool:
        """Whether any backend of the op's chain judges its calls one by one."""
        specs = [self.registry.backends[name].spec for name in self.config.choice(op.name).backends if name in self.registry.backends]
        return any(op.name in s.implementations and s.implementations[op.name].gate is not None for s in specs)

    def decided(self) -> list[Report]:
        """The distinct decisions taken so far, oldest first."""
        with self._lock:
            return list(self._decided)

    def _candidate(self, name: str, op: Op, device: DeviceInfo, call: Any) -> Candidate:
        answer = self._answer(name, op, device)
        reasons = answer.reasons
        if not reasons and call is not None and answer.gate is not None:
            try:
                reasons = tuple(answer.gate(call, device))
                for reason in reasons:
                    if not isinstance(reason, Reason):
                        raise TypeError(f"it returned {type(reason).__name__} {reason!r}, not hal.Reason")
            except Exception as error:
                # A bug in a gate is not "unsupported": it must not look like a choice.
                raise PluginError(f"the gate of backend {name!r} for {op.name} raised {type(error).__name__}: {error}") from error
        implementation = answer.implementation
        return Candidate(
            name,
            reasons,
            gated=answer.gate is not None,
            target=implementation.target if implementation else "",
            host_sync=implementation.host_sync if implementation else False,
            packages=answer.packages,
        )

    def _answer(self, name: str, op: Op, device: DeviceInfo) -> Static:
        key = (name, op.name, device)
        if key not in self._answers:
            self._answers[key] = self._judge(name, op, device)
        return self._answers[key]

    def _judge(self, name: str, op: Op, device: DeviceInfo) -> Static:
        for entry in self.config.disabled:
            if entry.backend == name and entry.op in (None, op.name):
                because = f": {entry.reason}" if entry.reason else ""
                return Static(name, (Reason(ReasonCode.DISABLED_BY_CONFIG, f"disabled by {entry.source}{because}"),))
        for plugin in self.registry.broken:
            if plugin.name == name and name not in self.registry.backends:
                return Static(name, (Reason(ReasonCode.LOAD_ERROR, str(plugin), "Repair or uninstall that distribution."),))
        spec = self.registry.backends[name].spec
        answer = judge(spec, op, device, self.config.versions)
        if answer.function is not None and not answer.reasons:
            self._tune(spec)
        return answer

    def _tune(self, spec: BackendSpec) -> None:
        """Hand the config's measured choices to a backend that can serve, until it has taken them once."""
        if self.config.tuning is None or not spec.tuning or spec.name in self._tuned:
            return
        module, _, function = spec.tuning.partition(":")
        try:
            getattr(importlib.import_module(module), function)(self.config.tuning)
        except Exception as error:
            raise PluginError(f"backend {spec.name!r} refused the tuning of {self.config.source}: {type(error).__name__}: {error}") from error
        self._tuned.add(spec.name)  # after success only: every call of a refused file fails alike

    def _cause(self, report: Report) -> BaseException | None:
        return next((p.error for p in self.registry.broken if p.name in report.choice.backends), None)

    def _announce(self, report: Report) -> None:
        if not report.fell_back:
            return
        passed = [c for c in report.candidates if c.listed and c.reasons]
        trail = "; ".join(f"{c.backend} was rejected: {' / '.join(map(str, c.reasons))}" for c in passed)
        text = f"{report.op} on {report.device} is served by {report.chosen!r}, not by {report.choice.backends[0]!r}. {trail}"
        said = (report.op, report.device, report.chosen, trail)
        if said not in self._said:
            self._said.add(said)
            quiet = report.chosen == REFERENCE and self.config.fallback == "allow"
            log.log(logging.DEBUG if quiet else logging.WARNING, "%s", text)


def _refusal(report: Report) -> str:
    wish: Choice = report.choice
    kind = "was asked for explicitly and cannot serve" if wish.explicit else "cannot serve"
    lines = [f"{', '.join(wish.backends)} {kind} {report.op} on {report.device} (decided by {wish.source}):"]
    lines += [f"  {c.backend}: {reason}" for c in report.candidates if c.listed for reason in c.reasons]
    if wish.explicit:
        lines.append(f"  To let another backend serve it, ask for a chain such as `[{wish.backends[0]}, reference]` in a config.")
    lines.append(f"  `hal explain {report.op}` shows all candidates.")
    return "\n".join(lines)
