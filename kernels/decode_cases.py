"""What the launcher of `flash_decode` may ask of its three kernels, for the ahead-of-time compiler."""

from __future__ import annotations

import torch

from hal.kernels.compile_case import CompileCase, pointer, refusals
from hal.kernels.decode_kernel import VARYING, decode_kernel
from hal.kernels.decode_reduce import REDUCE_ROWS, depth_kernel, reduce_kernel
from hal.kernels.flash_decode import split_dim
from hal.kernels.tuning import INVARIANT_CHUNK, decode_config

__all__ = ["compile_cases"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CLASSES = {"hopper": ("sm_90",), "other": ("sm_80", "gfx942")}
_VARYING = (*(name for name in VARYING if name != "window"),)
_ROW_STRIDES = tuple(f"stride_{name}" for name in ("qt", "qh", "kp", "kt", "kh", "kx", "vp", "vt", "vh", "ot", "oh"))
_LOOSE_STRIDES = ("stride_lt", "stride_ksp", "stride_kst", "stride_ksh", "stride_vsp", "stride_vst", "stride_vsh")
_OPTIONAL = {
    "lse_ptr": "*fp32:16", "cu_ptr": "*i32:16", "slopes_ptr": "*fp32:16", "sinks_ptr": "*fp32:16", "tree_ptr": "*u8:16", "depth_ptr": "*i32:16",
    "k_scale_ptr": "*fp32:16", "v_scale_ptr": "*fp32:16", "softcap": "fp32", "window": "i32",
}  # fmt: skip
_EVERYTHING = ("lse_ptr", "cu_ptr", "slopes_ptr", "sinks_ptr", "tree_ptr", "depth_ptr", "softcap", "window")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _main(
    dtype: torch.dtype,
    dim: int,
    dim_v: int | None = None,
    kv: torch.dtype | None = None,
    rows: int = 16,
    features: tuple[str, ...] = (),
    token_scale: bool = False,
    invariant: bool = False,
    split_layout: bool = False,
    main_path: bool = False,
) -> list[CompileCase]:
    """One variant of the main kernel in the config of each device class."""
    dim_v, kv = dim_v or dim, kv or dtype
    out = torch.float32 if "lse_ptr" in features else dtype
    types = {"q_ptr": pointer(dtype), "k_ptr": pointer(kv), "v_ptr": pointer(kv), "out_ptr": pointer(out), "part_ptr": "*fp32:16"}
    types |= dict.fromkeys(("plan_ptr", "seq_lens_ptr", "tables_ptr"), "*i32:16") | {"score_scale": "fp32", "value_scale": "fp32"}
    types |= dict.fromkeys(_VARYING, "i32") | dict.fromkeys(_ROW_STRIDES, "i32:16") | dict.fromkeys(_LOOSE_STRIDES, "i32")
    types |= {name: kind for name, kind in _OPTIONAL.items() if name in features}
    constants: dict[str, object] = {name: None for name in _OPTIONAL if name not in features}
    (d0, d1), (dv0, dv1) = split_dim(dim), split_dim(dim_v)
    constants |= {
        "D": dim,
        "D0": d0,
        "D1": d1,
        "DV": dim_v,
        "DV0": dv0,
        "DV1": dv1,
        "G": 4,
        "TOKEN_ROWS": rows if invariant else 4,
        "P": 16,
        "BLOCK_M": rows,
        "UPCAST": False,
    }
    constants |= {"CHUNK": INVARIANT_CHUNK if invariant else 0, "K_TOKEN_SCALE": token_scale, "V_TOKEN_SCALE": token_scale}
    constants["SPLIT_X"] = 16 // kv.itemsize if split_layout else 0
    if split_layout:
        types["stride_vd"] = "i32:16"
        types.pop("stride_vt")
        constants["stride_vt"] = 1
    else:
        constants["stride_vd"] = 1
    tags = [f"D{dim}" if dim == dim_v else f"D{dim}-{dim_v}", f"M{rows}"]
    tags += ["all" if set(_EVERYTHING) <= set(features) else "", "scale" if "k_scale_ptr" in features and not token_scale else ""]
    tags += ["token" if token_scale else "", "invariant" if invariant else "", "split-v0" if split_layout else ""]
    name = f"decode/{_short(dtype)}{'' if kv is dtype else '+' + _short(kv)}/" + "-".join(t for t in tags if t)
    refused, unserved = refusals(kv)
    cases = []
    for kind, targets in _CLASSES.items():
        config = decode_config(kind, dim, dim_v, kv.itemsize, dtype.itemsize, heavy=rows > 16 or invariant or "tree_ptr" in features)
        cases.append(
            CompileCase(
                name, decode_kernel, types, constants | {"TILE": config.tile}, config.warps, config.stages,
                fp_fusion=not invariant, refused=refused, unserved=unserved, no_spills=main_path, targets=targets,
            )
        )  # fmt: skip
    return cases


def _reduce(dtype: torch.dtype, dim_v: int, rows: int, everything: bool) -> CompileCase:
    types = {"out_ptr": pointer(torch.float32 if everything else dtype), "part_ptr": "*fp32:16", "plan_ptr": "*i32:16", "value_scale": "fp32"}
    types |= dict.fromkeys(("tokens", "sequences", "q_len", "max_items", "max_slots", "num_kv_heads", "stride_lt", "stride_vsh"), "i32")
    types |= {"stride_ot": "i32:16", "stride_oh": "i32:16"}
    optional = {"lse_ptr": "*fp32:16", "cu_ptr": "*i32:16", "sinks_ptr": "*fp32:16", "v_scale_ptr": "*fp32:16"}
    constants: dict[str, object] = {
        "DV": dim_v,
        "DV_PAD": 1 << (dim_v - 1).bit_length(),
        "G": 4,
        "TOKEN_ROWS": 4,
        "BLOCK_M": rows,
        "ROWS": REDUCE_ROWS,
    }
    constants["V_TOKEN_SCALE"] = False
    if everything:
        types |= optional
    else:
        constants |= dict.fromkeys(optional)
    name = f"reduce/{_short(dtype)}/D{dim_v}-M{rows}{'-all' if everything else ''}"
    return CompileCase(name, reduce_kernel, types, constants, 2, 2, not everything, no_spills=True)


def compile_cases() -> list[CompileCase]:
    """Every pair of dtypes; head dims, tiles of rows, features and layouts on bf16."""
    bf16 = torch.bfloat16
    cases = [c for dim in (64, 128) for dtype in _FLOATS for c in _main(dtype, dim, main_path=dtype is bf16)]
    cases += [c for dim in (64, 128) for c in _main(bf16, dim, rows=64)]
    cases += [c for dims in ((80, 80), (192, 128), (256, 256), (576, 512)) for c in _main(bf16, *dims)]
    cases += _main(torch.float32, 256) + _main(torch.float32, 576, 512)
    for dtype in _FLOATS:
        for kv in (*_FP8, torch.int8):
            cases += _main(dtype, 128, kv=kv, features=("k_scale_ptr", "v_scale_ptr"))
            cases += _main(dtype, 128, kv=kv, features=("k_scale_ptr", "v_scale_ptr"), token_scale=True)
    cases += [c for dtype in _FLOATS for c in _main(dtype, 128, features=_EVERYTHING)]
    cases += _main(bf16, 120, rows=32, features=_EVERYTHING) + _main(bf16, 128, split_layout=True)
    cases += _main(bf16, 128, invariant=True) + _main(bf16, 576, 512, invariant=True, rows=32)
    cases += [_reduce(dtype, 128, 16, everything) for dtype in _FLOATS for everything in (False, True)]
    cases.append(_reduce(bf16, 512, 32, False))
    integers = dict.fromkeys(("tokens", "q_len", "stride_tree", "tree_cols"), "i32")
    types = {"depth_ptr": "*i32:16", "tree_ptr": "*u8:16"} | integers
    cases.append(CompileCase("depth/uniform", depth_kernel, types, {"cu_ptr": None}, 1, 1))
    cases.append(CompileCase("depth/variable", depth_kernel, types | {"cu_ptr": "*i32:16"}, {}, 1, 1))
    return cases
