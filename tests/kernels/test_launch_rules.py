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
    "experts-again": {},  # other numbers of tokens, routings, factors and limits
    "hopper-plain": HOPPER,
    "hopper-windows": HOPPER,
    "hopper-variable": HOPPER,
    "hopper-block": {"decode_hopper_kernel": 1},  # its units have more rows to merge
    "hopper-planned": {"decode_hopper_kernel": 1},
    "hopper-tree": {"decode_kernel": 1, "depth_kernel": 1, "reduce_kernel": 1},
    "hopper-invariant": PORTABLE,
    "hopper-short": {},
    "hopper-short-variable": {},
    "hopper-experts-again": {},
}
#: Cases that compile whatever the tables of configs name, and kernels that are among it.
WARM_UPS = {"experts", "hopper-experts"}
EXPERT_KERNELS = {"route_kernel", "moe_gemm_kernel", "combine_kernel", "expand_kernel", "activation_kernel", "tiles_kernel", "slot_down_kernel"}
EXPERT_KERNELS |= {"quantise_kernel", "quantised_slot_gate_up_kernel", "quantised_slot_down_kernel"}


@pytest.mark.parametrize("case", ADDED)
def test_variants_depend_on_few_facts(counted: dict[str, dict[str, int]], case: str) -> None:
    assert counted[case] == ADDED[case]


def test_all_counted_cases_are_expected(counted: dict[str, dict[str, int]]) -> None:
    assert set(counted) == set(ADDED) | WARM_UPS


@pytest.mark.parametrize("case", sorted(WARM_UPS))
def test_warm_ups_reach_every_path(counted: dict[str, dict[str, int]], case: str) -> None:
    assert set(counted[case]) >= EXPERT_KERNELS


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

    from hal.backends import triton_moe, triton_ops
    from hal.backends.triton import backend
    from hal.ops import OPS

    functions = {name: getattr(module, name) for module in (triton_ops, triton_moe) for name in module.__all__}
    assert set(functions) == set(backend().implementations)
    for name, function in functions.items():
        ours = inspect.signature(function).parameters
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


def test_expert_gates() -> None:
    from types import SimpleNamespace

    from hal.backends.triton import backend
    from hal.device import DeviceInfo

    def codes(op: str, facts: dict[str, object], arch: tuple[int, int] = (9, 0), **more: object) -> list[str]:
        gate = backend().implementations[op].gate
        assert gate is not None
        return [r.code.value for r in gate(SimpleNamespace(**facts, **more), DeviceInfo("cuda", 0, "nvidia", "card", arch))]

    fused: dict[str, object] = {
        "dtype": torch.bfloat16,
        "weight_dtype": torch.bfloat16,
        "out_dtype": torch.bfloat16,
        "w_scales": None,
        "num_experts": 10**6,
    }
    product: dict[str, object] = {
        "dtype": torch.float16,
        "weight_dtype": torch.float16,
        "out_dtype": torch.float16,
        "w_scales": None,
        "num_experts": 8,
    }
    assert codes("fused_moe", fused, num_local_experts=1025) == []
    assert codes("fused_moe", fused, num_local_experts=8192) == ["SHAPE"]
    assert codes("fused_moe", fused, (7, 5), num_local_experts=8) == ["ARCH"]
    assert codes("fused_moe", fused | {"weight_dtype": torch.int8, "w_scales": "channel"}, (8, 0), num_local_experts=8) == []
    assert codes("fused_moe", fused | {"weight_dtype": torch.float8_e4m3fn, "w_scales": "block"}, (8, 0), num_local_experts=8) == ["ARCH"]
    assert codes("fused_moe", fused | {"weight_dtype": torch.float8_e4m3fn, "w_scales": "block"}, (8, 9), num_local_experts=8) == []
    assert codes("group_gemm", product, rows=2**31 - 2**16) == []
    assert codes("group_gemm", product, rows=2**31) == ["SHAPE"]
    assert codes("group_gemm", product | {"out_dtype": torch.bfloat16}, (7, 5), rows=5) == ["ARCH"]
    assert codes("moe_index", {"num_experts": 10**6}, num_local_experts=8191) == []
    assert codes("moe_index", {"num_experts": 10**6}, num_local_experts=10**6) == ["SHAPE"]
    assert codes("silu_and_mul", {"dtype": torch.bfloat16}, (7, 5)) == ["ARCH"]


def test_declaring_the_backend_imports_no_triton() -> None:
    code = "import sys; from hal.backends.triton import backend; backend(); assert 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=".")
