"""Remembered launches: what tells two forms of a call apart, and how parameters are laid out."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def call(**changes: Any) -> dict[str, Any]:
    """Arguments of `form_of`, with changes."""
    cache = torch.zeros(2, 4, 16, 2, 64, dtype=torch.bfloat16)
    q = torch.zeros(3, 8, 64, dtype=torch.bfloat16)
    arguments = {"q": q, "k_cache": cache[0], "v_cache": cache[1], "out": torch.zeros_like(q), "lse": None, "q_len": 1, "kv_layout": "NHD"}
    arguments |= {"seq_lens": torch.zeros(3, dtype=torch.int32), "block_tables": torch.zeros(3, 5, dtype=torch.int32)}
    return arguments | {"scale": 0.1, "softcap": 0.0, "window": None, "k_scale": None, "v_scale": None} | changes


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"q": torch.zeros(3, 8, 64, dtype=torch.float16)},
    "strides": {"q": torch.zeros(3, 16, 64, dtype=torch.bfloat16)[:, ::2]},
    "batch": {"seq_lens": torch.zeros(2, dtype=torch.int32)},
    "width": {"block_tables": torch.zeros(3, 6, dtype=torch.int32)},
    "table-stride": {"block_tables": torch.zeros(3, 8, dtype=torch.int32)[:, :5]},
    "pages": {"k_cache": torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16)},
    "out-dtype": {"out": torch.zeros(3, 8, 64)},
    "lse": {"lse": torch.zeros(3, 8)},
    "q_len": {"q_len": 3},
    "layout": {"kv_layout": "HND"},
    "scale": {"scale": 0.2},
    "softcap": {"softcap": 3.0},
    "window": {"window": 7},
    "k_scale": {"k_scale": 0.5},
    "v_scale": {"v_scale": 0.5},
}


def test_addresses_are_no_part_of_a_form() -> None:
    from hal.kernels.decode_repeat import form_of

    assert form_of(**call()) == form_of(**call())


@pytest.mark.parametrize("name", CHANGES)
def test_every_fact_makes_another_form(name: str) -> None:
    from hal.kernels.decode_repeat import form_of

    assert form_of(**call(**CHANGES[name])) != form_of(**call())


def test_values_inside_the_keys_are_another_form() -> None:
    from hal.kernels.decode_repeat import form_of

    cache = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    assert form_of(**call(k_cache=cache, v_cache=cache)) != form_of(**call(k_cache=cache, v_cache=cache.clone()))


def test_scales_in_tensors_have_no_form() -> None:
    from hal.kernels.decode_repeat import form_of

    assert form_of(**call(k_scale=torch.ones(2))) is None


def test_parameters_are_laid_out_as_bytes() -> None:
    from hal.kernels.direct import _bits

    tensor = torch.zeros(4)
    assert _bits("*fp32", tensor) == tensor.data_ptr()
    assert struct.pack("<Q", _bits("i32", -5))[:4] == struct.pack("<i", -5)
    assert struct.pack("<Q", _bits("i64", -(2**40))) == struct.pack("<q", -(2**40))
    assert struct.pack("<Q", _bits("fp32", 0.3))[:4] == struct.pack("<f", 0.3)
    with pytest.raises(ValueError, match="fp64"):
        _bits("fp64", 1.0)


def test_only_known_versions_without_hooks_or_scratch_launch_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.kernels import direct

    compiled = SimpleNamespace(metadata=SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, num_ctas=1))
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)

    def verdict(version: str) -> bool:
        monkeypatch.setattr(direct, "triton", SimpleNamespace(__version__=version, knobs=SimpleNamespace(runtime=runtime)))
        return direct.can_launch_directly(compiled)

    assert verdict("3.6.0")
    assert not verdict("3.9.0")
    runtime.launch_enter_hook = lambda metadata: None
    assert not verdict("3.6.0")
    runtime.launch_enter_hook = SimpleNamespace(calls=[])
    assert verdict("3.6.0")
    compiled.metadata.global_scratch_size = 128
    assert not verdict("3.6.0")


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 32, 33, 64])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("registers", [16, 32, 64])
def test_merges_that_fit_into_a_program(rows: int, dim: int, registers: int) -> None:
    from hal.kernels.decode_hopper_merge import merge_shape

    padded = 1 << (rows - 1).bit_length()
    held = max(padded, 4) * max(128, dim)
    assert merge_shape(rows, dim, registers) == ((padded, registers * 128 // held) if held <= registers * 128 else (0, 0))
