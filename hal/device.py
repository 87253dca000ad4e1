"""What machine is this: one frozen record per device, read once, without initialising what is not asked for."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from hal.errors import ArgumentError

__all__ = ["DeviceInfo", "local_devices", "probe"]


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one device that gates and configs may rely on.

    Attributes:
        type: torch device type, `cpu` or `cuda` (AMD and Iluvatar cards present themselves as `cuda`).
        index: device index; 0 for the CPU.
        vendor: `cpu`, `nvidia`, `iluvatar`, `amd` or `unknown`.
        name: what the driver calls it.
        arch: (major, minor) compute capability, None on the CPU.
        multiprocessors: streaming multiprocessors; torch's threads on the CPU.
        memory_bytes: device memory in bytes, 0 if unknown.
    """

    type: str
    index: int = 0
    vendor: str = "unknown"
    name: str = ""
    arch: tuple[int, int] | None = None
    multiprocessors: int = 1
    memory_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data for JSON reports."""
        return asdict(self)

    def __str__(self) -> str:
        arch = f", sm_{self.arch[0]}{self.arch[1]}" if self.arch and self.vendor == "nvidia" else ""
        return f"{self.type}:{self.index} {self.name}{arch}" if self.type != "cpu" else f"cpu {self.name}".rstrip()


def probe(device: torch.device | str) -> DeviceInfo:
    """Return the facts about `device`, such as `cpu` or `cuda:1`; `cuda` without an index means the current one.

    Raises:
        ArgumentError: it is no device, or this machine does not have it.
    """
    if not isinstance(device, torch.device):
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ArgumentError("probe", "device", f"is {device!r}", _local_names()) from None
    if device.type != "cuda":
        return _probe(device.type, device.index or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count or (device.index or 0) >= count:
        raise ArgumentError("probe", "device", f"is {device}, which this machine does not have", _local_names())
    return _probe("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _local_names() -> str:
    return ", ".join(f"{d.type}:{d.index}" if d.type != "cpu" else "cpu" for d in local_devices())


@cache
def _probe(kind: str, index: int) -> DeviceInfo:
    if kind == "cpu":
        return DeviceInfo("cpu", 0, "cpu", platform.machine(), None, torch.get_num_threads())
    if kind != "cuda":
        return DeviceInfo(kind, index, "unknown", kind)
    facts = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        type="cuda",
        index=index,
        vendor=_cuda_vendor(facts.name),
        name=facts.name,
        arch=(facts.major, facts.minor),
        multiprocessors=facts.multi_processor_count,
        memory_bytes=facts.total_memory,
    )


def _cuda_vendor(name: str) -> str:
    # A CoreX card presents itself as CUDA everywhere; its name is the most robust sign, the torch build the next.
    if name.startswith("Iluvatar") or "+corex" in torch.__version__:
        return "iluvatar"
    return "amd" if torch.version.hip else "nvidia"


def local_devices() -> list[DeviceInfo]:
    """Return the accelerators of this machine in index order, then the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_probe("cuda", index) for index in range(count)] + [_probe("cpu", 0)]
