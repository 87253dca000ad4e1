"""Which config a device gets. The golden table is to be changed on purpose only."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from hal import detect as module
from hal.config_file import read, shipped
from hal.config_schema import Known, MatchModel
from hal.detect import default_device, detect, specificity
from hal.device import DeviceInfo

BACKENDS = ("ixformer", "reference", "triton")
OPS = ("flash_decode", "flash_prefill", "merge_states", "plan_decode", "write_kv")
H200 = DeviceInfo("cuda", 0, "nvidia", "NVIDIA H200", (9, 0), 132, 150 << 30)
CPU = DeviceInfo("cpu", 0, "cpu", "x86_64")
TRITON = ("triton", "reference")
VENDOR = ("ixformer", "triton", "reference")

#: device -> config, chain of every op. Users see a change here as another kernel: say so in the changelog.
GOLDEN = [
    (CPU, "cpu", ("reference",)),
    (DeviceInfo("cpu", 0, "cpu", "aarch64"), "cpu", ("reference",)),
    (H200, "nvidia-hopper", TRITON),
    (DeviceInfo("cuda", 3, "nvidia", "NVIDIA H100 80GB HBM3", (9, 0)), "nvidia-hopper", TRITON),
    (DeviceInfo("cuda", 0, "nvidia", "NVIDIA A100-SXM4-80GB", (8, 0)), "nvidia-ampere", TRITON),
    (DeviceInfo("cuda", 0, "nvidia", "NVIDIA L40S", (8, 9)), "nvidia-ampere", TRITON),
    (DeviceInfo("cuda", 0, "nvidia", "NVIDIA B200", (10, 0)), "nvidia", TRITON),
    (DeviceInfo("cuda", 0, "nvidia", "NVIDIA GeForce RTX 5090", (12, 0)), "nvidia", TRITON),
    (DeviceInfo("cuda", 0, "nvidia", "Tesla T4", (7, 5)), "nvidia", TRITON),
    (DeviceInfo("cuda", 0, "iluvatar", "Iluvatar BI-V100", (7, 0)), "iluvatar-bi-v100", VENDOR),
    (DeviceInfo("cuda", 0, "iluvatar", "Iluvatar BI-V150", (7, 1)), "iluvatar-bi-v150", VENDOR),
    (DeviceInfo("cuda", 1, "iluvatar", "Iluvatar BI-V150 OAM", (7, 1)), "iluvatar-bi-v150", VENDOR),
    (DeviceInfo("cuda", 0, "iluvatar", "Iluvatar MR-V100", (7, 1)), "iluvatar", VENDOR),
    # The vendor's vLLM reports (9, 0) for its cards: the vendor decides, not the number.
    (DeviceInfo("cuda", 0, "iluvatar", "Iluvatar TG-V200 OAM", (9, 0)), "iluvatar", VENDOR),
    (DeviceInfo("cuda", 0, "amd", "AMD Instinct MI300X", (9, 4)), "generic", TRITON),
    (DeviceInfo("xpu", 0, "unknown", "xpu"), "generic", TRITON),
]


@pytest.mark.parametrize(("device", "name", "chain"), GOLDEN, ids=lambda value: value.name if isinstance(value, DeviceInfo) else None)
def test_default_selection_per_device_class(device: DeviceInfo, name: str, chain: tuple[str, ...]) -> None:
    config = detect(device, backends=BACKENDS, ops=OPS)
    assert config.name == name
    assert {op: config.choice(op).backends for op in OPS} == dict.fromkeys(OPS, chain)
    assert not any(config.choice(op).explicit for op in OPS)
    assert (config.fallback, config.validate, dict(config.versions), config.disabled) == ("warn", "first", {}, ())


def test_the_source_says_what_was_detected() -> None:
    config = detect(H200, backends=BACKENDS, ops=OPS)
    assert (config.source.kind, config.source.where) == ("detection", "cuda:0 NVIDIA H200, sm_90 takes configs/nvidia-hopper.yaml")
    assert config.default.source.where.startswith("configs/nvidia-hopper.yaml:")


def test_an_unknown_device_is_told_so() -> None:
    config = detect(DeviceInfo("xpu", 0, "unknown", "Ponte"), backends=BACKENDS, ops=OPS)
    assert config.source.where == "no shipped config matches xpu:0 Ponte, which takes configs/generic.yaml"


@pytest.mark.parametrize("device", [device for device, *_ in GOLDEN], ids=lambda device: device.name)
def test_no_two_configs_are_equally_specific(device: DeviceInfo) -> None:
    known = Known(BACKENDS, OPS)
    matches = [(read(name, known).match, name) for name in shipped()]
    ranks = [rank for match, _ in matches if match is not None and (rank := specificity(match, device)) is not None]
    assert ranks
    assert all(a != b for a, b in itertools.combinations(ranks, 2))


def test_answers_are_cached() -> None:
    again = DeviceInfo("cuda", 0, "nvidia", "NVIDIA H200", (9, 0), 132, 150 << 30)
    assert detect(H200, backends=BACKENDS, ops=OPS) is detect(again, backends=list(reversed(BACKENDS)), ops=OPS)


@pytest.mark.parametrize(
    ("match", "device", "rank"),
    [
        ({}, CPU, (False, False, False, False)),
        ({"type": "cpu"}, CPU, (False, False, False, True)),
        ({"type": "cuda"}, CPU, None),
        ({"vendor": "amd"}, H200, None),
        ({"arch": ">=9.0"}, CPU, None),
        ({"arch": ">=9.0,<9.1"}, H200, (False, True, False, False)),
        ({"arch": "==9.*"}, H200, (False, True, False, False)),
        ({"arch": ">=9.1"}, H200, None),
        ({"arch": ">=9.0"}, DeviceInfo("cuda", 0, "nvidia", "x", (10, 0)), (False, True, False, False)),
        ({"name": ("NVIDIA H1*", "NVIDIA H2*")}, H200, (True, False, False, False)),
        ({"name": ("nvidia*",)}, H200, None),
    ],
)
def test_specificity(match: dict[str, object], device: DeviceInfo, rank: tuple[bool, ...] | None) -> None:
    assert specificity(MatchModel(**match), device) == rank  # type: ignore[arg-type]


def test_the_default_device_is_the_first_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "local_devices", lambda: [H200, CPU])
    assert default_device() is H200
    monkeypatch.setattr(module, "local_devices", lambda: [CPU])
    assert default_device() is CPU


def test_importing_initialises_no_cuda() -> None:
    code = "import hal.detect, torch; print(torch.cuda.is_initialized())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert run.stdout.strip() == "False"
