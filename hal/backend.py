"""The object that callers hold: one per (backend, config), immutable, its ops plain bound functions."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch

from hal import environment
from hal.config import Choice, Config, Source
from hal.detect import default_device, detect
from hal.device import probe
from hal.dispatch import Observer, bind, facts_of
from hal.errors import ArgumentError, ConfigError, ResolutionError, UnknownBackendError, nearest
from hal.kv_cache import KVCacheSpec, kv_cache_spec
from hal.ops import OPS, find_op
from hal.ops.attention import FlashDecode, FlashPrefill, MergeStates, PlanDecode
from hal.ops.kv_cache import WriteKV
from hal.ops.moe_activations import GeluAndMul, SiluAndMul, SwigluOaiAndMul
from hal.ops.moe_fused import FusedMoe
from hal.ops.moe_gemm import GroupGemm
from hal.ops.moe_permute import MoeCombine, MoeExpand, MoeIndexOp
from hal.ops.moe_routing import Route, TopkSoftmax
from hal.registry import Registry, discover
from hal.report import Report
from hal.resolve import Resolver
from hal.spec import KVCachePreference
from hal.warmup import warmup

__all__ = ["Backend", "build_backend", "get_backend", "registry", "reset", "use_backend"]


class Backend:
    """All ops under one config. Get it from `hal.get_backend`; its attributes are the ops of `hal.ops`.

    Attributes:
        name: the backend asked for by name, else the name of the config.
        config: the effective config.
    """

    name: str
    config: Config
    flash_decode: FlashDecode
    flash_prefill: FlashPrefill
    merge_states: MergeStates
    plan_decode: PlanDecode
    write_kv: WriteKV
    topk_softmax: TopkSoftmax
    route: Route
    moe_index: MoeIndexOp
    moe_expand: MoeExpand
    group_gemm: GroupGemm
    silu_and_mul: SiluAndMul
    gelu_and_mul: GeluAndMul
    swiglu_oai_and_mul: SwigluOaiAndMul
    moe_combine: MoeCombine
    fused_moe: FusedMoe
    _resolver: Resolver

    def __init__(self, name: str, config: Config, registry: Registry, observe: Observer | None = None) -> None:
        resolver = Resolver(config, registry)
        state = {"name": name, "config": config, "_resolver": resolver}
        ops = {op.name: bind(op, resolver, config.validate, observe) for op in OPS.values()}
        self.__dict__.update(state | ops)

    def explain(self, op: str, *args: Any, device: torch.device | str | None = None, **kwargs: Any) -> Report:
        """Report what would serve `op`: with call arguments for that call, without them for `device` in general.

        Args:
            op: name of the op.
            *args: the arguments of a call, as they would be passed to the op.
            device: without call arguments, the device asked about; default the first accelerator, else the CPU.
            **kwargs: keyword arguments of the call.

        Returns:
            The report: winner, every rejected candidate with its reasons, and who decided. Nothing is run.

        Raises:
            ArgumentError: the op is unknown, or the arguments are outside its contract.
        """
        contract = find_op(op, "explain")
        if not args and not kwargs:
            return self._resolver.explain(contract, default_device() if device is None else probe(device))
        tensor, facts = facts_of(contract, args, kwargs)
        return self._resolver.explain(contract, probe(tensor.device), facts)

    def decisions(self) -> list[Report]:
        """Return the distinct decisions taken by calls so far, oldest first."""
        return self._resolver.decided()

    def kv_cache_spec(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, head_dim_v: int | None = None, device: torch.device | str | None = None
    ) -> KVCacheSpec:
        """Return the paged cache that an engine should allocate so that `flash_decode` is served natively.

        Args:
            num_kv_heads: Hkv.
            head_dim: D.
            dtype: dtype of the cache; fp8 and int8 caches come with scales per token and head.
            head_dim_v: Dv; default D.
            device: where; default the first accelerator, else the CPU.

        Returns:
            Layout, page size, and shapes for a number of pages.

        Raises:
            ArgumentError: a size or the dtype is not one of a KV cache, or there is no such device.
            ResolutionError: no permitted backend serves `flash_decode` there.
        """
        report = self.explain("flash_decode", device=device)
        if report.chosen is None:
            raise ResolutionError(f"kv_cache_spec: no permitted backend serves flash_decode\n{report}", report)
        preference: KVCachePreference = self._resolver.registry.backends[report.chosen].spec.kv_cache
        return kv_cache_spec(report.chosen, preference, num_kv_heads, head_dim, dtype, head_dim_v)

    def warmup(self, op: str, specs: Sequence[Mapping[str, Any]], *, device: torch.device | str | None = None) -> list[Report]:
        """Call `op` once for each spec, so that kernels are compiled and CUDA graph capture of that signature may follow.

        Args:
            op: name of the op.
            specs: one mapping of argument names to values each; `hal.TensorSpec` stands for a tensor to be made up.
                Real tensors (caches, say) are passed as they are and keep their contents.
            device: where to make tensors up; default the first accelerator, else the CPU.

        Returns:
            One report for each spec.

        Raises:
            ArgumentError: a spec names an argument that the op does not have, or is outside the contract.
            ResolutionError: no permitted backend serves it.
        """
        contract = find_op(op, "warmup")
        where = default_device() if device is None else probe(device)
        return warmup(contract, getattr(self, contract.name), self.explain, specs, where)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a backend has no op {name!r};{nearest(name, OPS)} Ops are: {', '.join(OPS)}")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a backend is immutable; {name!r} cannot be set. Use a config or hal.use_backend")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a backend is immutable")

    def __repr__(self) -> str:
        return f"<hal.Backend {self.name!r} by {self.config.default.source if self.config.default.explicit else self.config.source}>"


_lock = threading.RLock()
_registry: Registry | None = None
_backends: dict[Any, tuple[Backend, object]] = {}  # with the config asked for, whose id is part of the key
_default: Backend | None = None
_active: ContextVar[Backend | None] = ContextVar("hal_backend", default=None)


def registry() -> Registry:
    """Return all backends, discovering plug-ins on the first call. HAL_PLUGINS limits which of them load."""
    global _registry
    with _lock:
        if _registry is None:
            _registry = discover(environment.read().plugins)
        return _registry


def get_backend(backend: str | os.PathLike[str] | None = None, *, config: str | os.PathLike[str] | Config | None = None) -> Backend:
    """Return the object whose attributes are the ops.

    Without arguments it is the one of the enclosing `use_backend`, else the default, which HAL_BACKEND, HAL_CONFIG and
    the machine decide on the first such call. The same arguments give the same object.

    Args:
        backend: a backend's name: an explicit request that runs or raises, for every op. A path to a YAML file is
            taken as `config`.
        config: a config file, the name of a shipped config, or a `hal.Config`. An argument precedes HAL_* variables,
            those precede files, and files precede detection.

    Raises:
        UnknownBackendError: nobody registered that name.
        ConfigError: a config or a HAL_* variable is wrong.
    """
    global _default
    if backend is None and config is None:
        active = _active.get()
        if active is not None:
            return active
        if _default is None:
            with _lock:
                _default = _default or _build(None, None)
        return _default
    if isinstance(backend, (str, os.PathLike)) and config is None and _is_path(backend):
        backend, config = None, backend
    for argument, value in (("backend", backend), ("config", config)):
        if not (value is None or isinstance(value, (str, os.PathLike)) or (argument == "config" and isinstance(value, Config))):
            accepted = "a backend's name" if argument == "backend" else "a config file, the name of a shipped config, or a hal.Config"
            raise ArgumentError("get_backend", argument, f"is {type(value).__name__} {value!r}", accepted)
    key = (backend, id(config) if isinstance(config, Config) else os.path.abspath(config) if config is not None and _is_path(config) else config)
    with _lock:
        if key not in _backends:
            _backends[key] = _build(None if backend is None else os.fspath(backend), config), config
        return _backends[key][0]


def build_backend(name: str | None, *, config: str | os.PathLike[str] | Config | None = None, observe: Observer | None = None) -> Backend:
    """Return a new, unshared backend; `observe` is called with (op, backend, target) as each implementation is entered."""
    with _lock:
        return _build(name, config, observe)


@contextmanager
def use_backend(backend: str | os.PathLike[str] | Config | Backend) -> Iterator[Backend]:
    """Make `get_backend()` return another backend inside a `with` block, in this thread or task only.

    Args:
        backend: a backend's name, the path of a config file, a `hal.Config`, or a `Backend`.
    """
    if isinstance(backend, Backend):
        chosen = backend
    elif isinstance(backend, Config):
        chosen = get_backend(config=backend)
    else:
        chosen = get_backend(backend)
    token = _active.set(chosen)
    try:
        yield chosen
    finally:
        _active.reset(token)


def reset() -> None:
    """Forget every backend, plug-in and the default. For tests: objects handed out before live on unchanged."""
    global _registry, _default
    with _lock:
        _registry, _default = None, None
        _backends.clear()


def _is_path(backend: str | os.PathLike[str]) -> bool:
    text = os.fspath(backend)
    return isinstance(backend, os.PathLike) or os.sep in text or text.endswith((".yaml", ".yml"))


def _build(name: str | None, config: str | os.PathLike[str] | Config | None, observe: Observer | None = None) -> Backend:
    env = environment.read()
    known = registry()
    source = Source("argument", "backend=" + repr(name))
    if name is None and env.backend is not None and config is None:
        name, source = env.backend, Source("environment", f"HAL_BACKEND={env.backend}")
    elif name is None and env.backend is not None:
        environment.warn_once("HAL_BACKEND", f"HAL_BACKEND={env.backend} is ignored here: a config was given as an argument, which precedes it")
    effective = _effective(config, env, known)
    if name is None:
        return Backend(effective.name, effective, known, observe)
    if name not in known.backends and name not in {p.name for p in known.broken}:
        raise _unknown(name, source, known)
    explicit = replace(effective, default=Choice((name,), True, source), ops={}, disabled=())
    return Backend(name, explicit, known, observe)


def _effective(config: str | os.PathLike[str] | Config | None, env: environment.Environment, known: Registry) -> Config:
    names = sorted({*known.backends, *(p.name for p in known.broken)})
    if isinstance(config, Config):
        for choice in (config.default, *config.ops.values()):
            if not choice.backends:
                raise ConfigError("a choice names no backend; give one or more", str(choice.source))
            for backend in choice.backends:
                if backend not in names:
                    raise _unknown(backend, choice.source, known)
        for op in config.ops:
            find_op(op, "Config")
        return config
    path = env.config if config is None else config
    if path is None:
        return detect(default_device(), backends=names, ops=list(OPS))
    from hal.config_file import load, vocabulary  # pydantic and yaml are only for those who read files

    kind: Literal["argument", "environment"] = "environment" if config is None else "argument"
    return load(path, backends=names, ops=list(OPS), packages=vocabulary(known).packages, source_kind=kind)


def _unknown(name: str, source: Source, known: Registry) -> UnknownBackendError:
    broken = "".join(f"\n  broken {plugin}" for plugin in known.broken)
    left_out = f" HAL_PLUGINS leaves out: {', '.join(known.left_out)}." if known.left_out else ""
    return UnknownBackendError(
        f"unknown backend {name!r} ({source});{nearest(name, known.backends)} Registered are: {', '.join(sorted(known.backends))}.{left_out}{broken}"
    )
