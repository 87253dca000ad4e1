"""Which shipped config is for which device. The facts to match are data: the `match:` blocks of the YAML files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from hal.config import Config, Source
from hal.device import DeviceInfo, local_devices

if TYPE_CHECKING:
    from hal.config_schema import MatchModel

__all__ = ["default_device", "detect", "specificity"]


def default_device() -> DeviceInfo:
    """Return the first accelerator of this machine, or the CPU if it has none."""
    return local_devices()[0]


def detect(device: DeviceInfo, *, backends: Collection[str], ops: Collection[str]) -> Config:
    """Return the shipped config whose `match:` block fits `device` most specifically.

    A block with a name pattern is more specific than one with an arch window, that than one with a vendor, and that
    than one with a device type. The empty block of `generic.yaml` fits any device.

    Args:
        device: the device to serve.
        backends: names of the registered backends.
        ops: names of the ops.

    Returns:
        The config; its source says what was detected and which file was taken. Cached.
    """
    return _detect(device, tuple(sorted(backends)), tuple(sorted(ops)))


@cache
def _detect(device: DeviceInfo, backends: tuple[str, ...], ops: tuple[str, ...]) -> Config:
    from hal.config_file import read, shipped  # yaml and pydantic load only when a config is really read
    from hal.config_schema import Known

    known = Known(backends, ops)
    fitting = []
    for name in shipped():
        parsed = read(name, known, "detection")
        rank = specificity(parsed.match, device) if parsed.match else None
        if rank is not None:
            fitting.append((rank, parsed.config))
    rank, config = max(fitting, key=lambda entry: entry[0])
    why = f"{device} takes" if any(rank) else f"no shipped config matches {device}, which takes"
    return replace(config, source=Source("detection", f"{why} configs/{config.name}.yaml"))


def specificity(match: MatchModel, device: DeviceInfo) -> tuple[bool, bool, bool, bool] | None:
    """Return how specifically a `match:` block fits a device, greater being more specific; None if it does not fit.

    The tuple says whether it constrains the name, the arch, the vendor and the device type.
    """
    if match.type is not None and match.type != device.type:
        return None
    if match.vendor is not None and match.vendor != device.vendor:
        return None
    if match.name is not None and not any(fnmatchcase(device.name, pattern) for pattern in match.name):
        return None
    if match.arch is not None and not (device.arch and SpecifierSet(match.arch).contains(f"{device.arch[0]}.{device.arch[1]}")):
        return None
    return match.name is not None, match.arch is not None, match.vendor is not None, match.type is not None
