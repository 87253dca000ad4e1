"""What compiled variants may depend on, and what the backend declares."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    """Compiled variants that each case of `count_variants.py` adds."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("count_variants.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


#: Variants that each case adds: one a kernel, whatever the batch, lengths, table, cache, scale, window and longest length.
PORTABLE = {"decode_kernel": 1, "plan_kernel": 1, "reduce_kernel": 1}
HOPPER = {"decode_hopper_kernel": 1, "plan_kernel": 1}
ADDED = {
    "plain": PORTABLE,
    "windows": {"decode_kernel": 1, "plan_kernel": 1},
    "variable": PORTABLE,
    "block": {},  # of 3 tokens: as of 1
    "planned": {},
    "tree": {"decode_kernel": 1, "depth_kernel": 1},
    "invariant": PORTABLE,
    "short": {},
    "short-variable": {},
    "write": {"write_kernel": 1},
    "write-many": {"write_kernel": 1, "last_row_kernel": 2},  # a pass that empties, one that fills
    "merge": {"merge_kernel": 1},
    "hopper-plain": HOPPER,
    "hopper-windows": HOPPER,
    "hopper-variable": HOPPER,
    "hopper-block": {"decode_hopper_kernel": 1},  # its units have more rows to merge
    "hopper-planned": {"decode_hopper_kernel": 1},
    "hopper-tree": {"decode_kernel": 1, "depth_kernel": 1, "reduce_kernel": 1},
    "hopper-invariant": PORTABLE,
    "hopper-short": {},
    "hopper-short-variable": {},
}


@pytest.mark.parametrize("case", ADDED)
def test_variants_depend_on_few_facts(counted: dict[str, dict[str, int]], case: str) -> None:
    assert counted[case] == ADDED[case]


def test_all_counted_cases_are_expected(counted: dict[str, dict[str, int]]) -> None:
    assert set(counted) == set(ADDED)


ROUNDING = """
import tests.aot.compile_kernels as aot
import triton
case = next(c for c in aot.all_cases() if c.name == "write_kv/float32->int8")
print(triton.compile(aot.source_of(case), target=aot.gpu_target("sm_90"), options={"num_warps": 4, "enable_fp_fusion": False}).asm["ptx"])
"""


def test_rounding_constant_is_not_folded_away() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ptx = subprocess.run([sys.executable, "-c", ROUNDING], capture_output=True, text=True, check=True, env=environment).stdout
    added, removed = (len(re.findall(rf"add\S*\.f32.*{bits}", ptx)) for bits in ("0f4B400000", "0fCB400000"))
    assert added == removed > 0


def test_sizes_are_a_function_of_few_facts(device: torch.device) -> None:
    from hal.kernels.flash_decode import _partition

    def rows(b: int, q: int, n: int, invariant: bool) -> tuple[int, int]:
        partition, _ = _partition(False, b, b * q, q, 4, 8, 128, 128, n, 2, 2, invariant, device)
        return partition.block_m, partition.token_rows

    lengths = (1, 300, 5000, 10**6)
    for q, wanted in ((1, 16), (4, 16), (5, 32), (9, 64), (100, 64)):
        assert {rows(b, q, n, False) for b in range(1, 34) for n in lengths} == {(wanted, 4)}
    assert {rows(b, q, n, True) for b in (1, 33) for q in (1, 4, 9) for n in lengths} == {(16, 16)}


@pytest.mark.parametrize(
    ("dim", "parts"), [(16, (16, 0)), (24, (16, 16)), (40, (32, 16)), (80, (64, 16)), (96, (64, 32)), (248, (128, 128)), (576, (512, 64))]
)
def test_head_dims_are_cut_without_waste(dim: int, parts: tuple[int, int]) -> None:
    from hal.kernels.flash_decode import split_dim

    assert split_dim(dim) == parts


def test_signatures_are_the_contracts() -> None:
    import inspect

    from hal.backends import triton_ops
    from hal.ops import OPS

    for name in triton_ops.__all__:
        ours = inspect.signature(getattr(triton_ops, name)).parameters
        theirs = OPS[name].parameters.parameters
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


def test_gates_name_the_generation() -> None:
    from types import SimpleNamespace

    from hal.backends.triton import backend
    from hal.device import DeviceInfo

    gate = backend().implementations["flash_decode"].gate
    assert gate is not None

    def codes(dtype: torch.dtype, kv: torch.dtype, vendor: str, arch: tuple[int, int]) -> list[str]:
        return [r.code.value for r in gate(SimpleNamespace(dtype=dtype, kv_dtype=kv), DeviceInfo("cuda", 0, vendor, "card", arch))]

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert codes(torch.bfloat16, e4m3, "nvidia", (8, 0)) == ["ARCH"]
    assert codes(torch.float16, e5m2, "nvidia", (8, 6)) == ["ARCH"]
    assert codes(torch.bfloat16, torch.bfloat16, "nvidia", (7, 5)) == ["ARCH"]
    assert codes(torch.bfloat16, e5m2, "nvidia", (9, 0)) == []
    assert codes(torch.float16, torch.int8, "nvidia", (8, 0)) == []
    assert codes(torch.bfloat16, e4m3, "amd", (9, 4)) == []
    assert "flash_prefill" not in backend().implementations


def test_declaring_the_backend_imports_no_triton() -> None:
    code = "import sys; from hal.backends.triton import backend; backend(); assert 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=".")
