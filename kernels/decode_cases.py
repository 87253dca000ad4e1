"""What the launcher of `flash_decode` may ask of its kernels, for the ahead-of-time compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from hal.kernels.compile_case import EVERYWHERE, FLOATS, CompileCase, pointer, refusals
from hal.kernels.decode_hopper import VARYING as HOPPER_VARYING
from hal.kernels.decode_hopper import decode_hopper_kernel
from hal.kernels.decode_hopper_merge import merge_shape
from hal.kernels.decode_kernel import VARYING, decode_kernel
from hal.kernels.decode_reduce import depth_kernel, reduce_kernel, reduce_shape
from hal.kernels.flash_decode import split_dim
from hal.kernels.tuning import INVARIANT_CHUNK, STEP, decode_config, packed_rows

__all__ = ["compile_cases"]

_BF16, _FP16, _FP32, _INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_QUANTISED = (_E4M3, _E5M2, _INT8)

_INPUTS = dict.fromkeys(("plan_ptr", "seq_lens_ptr", "tables_ptr"), "*i32:16") | {
    "part_ptr": "*fp32:16",
    "score_scale": "fp32",
    "value_scale": "fp32",
}
_STRIDES = dict.fromkeys((f"stride_{name}" for name in ("qt", "qh", "kp", "kt", "kh", "vp", "vt", "vh", "ot", "oh")), "i32:16")
_LOOSE = dict.fromkeys(("stride_lt", "stride_ksh", "stride_vsh"), "i32")
_PORTABLE = {"stride_kx": "i32:16"} | dict.fromkeys(("stride_ksp", "stride_kst", "stride_vsp", "stride_vst"), "i32")
_OPTIONAL = {
    "lse_ptr": "*fp32:16", "cu_ptr": "*i32:16", "slopes_ptr": "*fp32:16", "sinks_ptr": "*fp32:16",
    "k_scale_ptr": "*fp32:16", "v_scale_ptr": "*fp32:16", "softcap": "fp32", "window": "i32",
}  # fmt: skip
_TREE = {"tree_ptr": "*u8:16", "depth_ptr": "*i32:16"}
_SCALES = frozenset({"k_scale_ptr", "v_scale_ptr"})
_EVERYTHING = frozenset(_OPTIONAL) - _SCALES


@dataclass(frozen=True)
class _Call:
    """What a call asks of the main kernel.

    Attributes:
        dtype: of the queries.
        dims: (D, Dv).
        rows: of a unit.
        kv: dtype of the caches, None for that of the queries.
        features: optional arguments that are present.
        group: query heads of a kv head.
        page: keys of a page.
        token_scale: scales per token and head.
        invariant: batch-invariant call.
        split_layout: K in groups of 16 bytes, V by columns.
        latent: the values lie in the keys (MLA).
        main_path: must not spill.
    """

    dtype: torch.dtype = _BF16
    dims: tuple[int, int] = (128, 128)
    rows: int = 16
    kv: torch.dtype | None = None
    features: frozenset[str] = frozenset()
    group: int = 4
    page: int = 16
    token_scale: bool = False
    invariant: bool = False
    split_layout: bool = False
    latent: bool = False
    main_path: bool = False

    @property
    def cache(self) -> torch.dtype:
        """dtype of the caches."""
        return self.kv or self.dtype

    @property
    def name(self) -> str:
        """The dtypes, and after them all that is not as usual."""
        dim, dim_v = self.dims
        tags = [f"D{dim}" if dim == dim_v else f"D{dim}-{dim_v}", f"M{self.rows}"]
        tags += [f"G{self.group}"] * (self.group != 4) + [f"P{self.page}"] * (self.page != 16)
        tags += [name.removesuffix("_ptr") for name in sorted(self.features) if len(self.features) == 1]
        marks = {
            "all": self.features >= _EVERYTHING, "scale": self.features >= _SCALES and not self.token_scale, "token": self.token_scale,
            "invariant": self.invariant, "split-v0": self.split_layout, "latent": self.latent, "tree": self.features >= set(_TREE),
        }  # fmt: skip
        names = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((self.dtype, self.cache))]
        return "+".join(names) + "/" + "-".join(tags + [mark for mark, holds in marks.items() if holds])

    def types(self, varying: list[str]) -> dict[str, str]:
        """Types of the arguments that both main kernels have, the optional ones where they are present."""
        out = _FP32 if "lse_ptr" in self.features else self.dtype
        pointers = {"q_ptr": self.dtype, "k_ptr": self.cache, "v_ptr": self.cache, "out_ptr": out}
        types = {name: pointer(dtype) for name, dtype in pointers.items()} | _INPUTS | _STRIDES | _LOOSE
        types |= {name: "i32" for name in varying if name != "window"}
        return types | {name: kind for name, kind in (_OPTIONAL | _TREE).items() if name in self.features}

    def constants(self) -> dict[str, object]:
        """Constants that both main kernels have, the absent arguments among them."""
        (d0, d1), (dv0, dv1) = (split_dim(dim) for dim in self.dims)
        constants: dict[str, object] = {name: None for name in _OPTIONAL if name not in self.features}
        constants |= {"D": self.dims[0], "D0": d0, "D1": d1, "DV": self.dims[1], "DV0": dv0, "DV1": dv1, "G": self.group, "P": self.page}
        return constants | {"TOKEN_ROWS": self.rows if self.invariant else self.group, "BLOCK_M": self.rows, "V_IN_K": self.latent}


def _portable(call: _Call) -> list[CompileCase]:
    """A variant of the main kernel that runs on all targets."""
    types, constants = call.types(VARYING) | _PORTABLE, call.constants()
    constants |= {name: None for name in _TREE if name not in call.features}
    constants |= {"K_TOKEN_SCALE": call.token_scale, "V_TOKEN_SCALE": call.token_scale, "UPCAST": False, "INVARIANT": call.invariant}
    constants["AHEAD"] = call.cache.itemsize == 2 and not call.split_layout and "tree_ptr" not in call.features
    constants |= {"STEP": INVARIANT_CHUNK if call.invariant else STEP, "SPLIT_X": 16 // call.cache.itemsize if call.split_layout else 0}
    if call.split_layout:
        types["stride_vd"] = types.pop("stride_vt")
        constants["stride_vt"] = 1
    else:
        constants["stride_vd"] = 1
    config = decode_config("portable", *call.dims, call.cache.itemsize, call.dtype.itemsize, call.rows)
    refused, unserved = refusals(call.cache)
    return [
        CompileCase(
            f"decode/{call.name}", decode_kernel, types, constants | {"TILE": config.tile, "PDL": pdl},
            config.warps, 1 if call.split_layout else config.stages,
            fp_fusion=not call.invariant, refused=refused, unserved=unserved, no_spills=call.main_path, targets=targets,
        )
        for pdl, targets in EVERYWHERE
    ]  # fmt: skip


def _hopper(call: _Call) -> CompileCase:
    """A variant of the main kernel for Hopper; a unit of 16 rows holds one token, a larger one is full."""
    config = decode_config("hopper", *call.dims, call.cache.itemsize, call.dtype.itemsize, call.rows)
    constants = call.constants()
    rest = split_dim(call.dims[1])[1]
    merge_rows, merge_batch = merge_shape(call.group if call.rows == 16 else call.rows, call.dims[1], config.merge_registers)
    key_rest = split_dim(call.dims[0])[1]
    constants |= {
        "D1": max(key_rest, 32) if key_rest else 0,
        "DV1": max(rest, 64) if rest else 0,
        "STAGES": config.stages,
        "MERGE_ROWS": merge_rows,
        "MERGE_BATCH": merge_batch,
    }
    constants |= {
        "COPY_WARPS": config.copy_warps,
        "COPY_REGISTERS": config.copy_registers,
        "WIDE": config.wide,
        "PDL": True,
        "num_warps": config.warps,
    }
    types = call.types(HOPPER_VARYING) | {"counter_ptr": "*i32:16"}
    return CompileCase(
        f"hopper/{call.name}", decode_hopper_kernel, types, constants, config.warps, registers=config.registers,
        no_spills=call.main_path, targets=("sm_90",),
    )  # fmt: skip


def _portable_calls() -> list[_Call]:
    """Every pair of dtypes; head dims, tiles of rows, features and layouts on bf16."""
    calls = [_Call(dtype, (dim, dim), main_path=dtype is _BF16) for dim in (64, 128) for dtype in FLOATS]
    calls += [_Call(dims=(dim, dim), rows=64) for dim in (64, 128)]
    calls += [_Call(dims=dims) for dims in ((80, 80), (192, 128), (256, 256), (576, 512))] + [_Call(dims=(576, 512), latent=True)]
    calls += [_Call(_FP32, dims) for dims in ((256, 256), (576, 512))] + [_Call(dtype, (256, 256), rows=32) for dtype in (_BF16, _FP32)]
    calls += [_Call(kv=kv, dims=dims, features=_SCALES) for kv in (_E4M3, _INT8) for dims in ((64, 64), (256, 256), (576, 512))]
    for dtype, kv, token_scale in product(FLOATS, _QUANTISED, (False, True)):
        calls.append(_Call(dtype, kv=kv, features=_SCALES, token_scale=token_scale))
    calls += [_Call(dtype, features=_EVERYTHING | set(_TREE)) for dtype in FLOATS]
    calls += [_Call(dims=(120, 120), rows=32, features=_EVERYTHING | set(_TREE)), _Call(split_layout=True)]
    return [*calls, _Call(invariant=True), _Call(dims=(576, 512), rows=16, invariant=True)]


def _hopper_calls() -> list[_Call]:
    """Every config at each number of rows that it serves; dtypes, features, groups, pages and other dims on one of them."""
    calls = []
    for dim, kv, rows in product((64, 128, 192, 256), (None, _E4M3), (16, 32, 64)):
        if packed_rows("hopper", rows, dim, 64) == rows:
            calls.append(_Call(dims=(dim, dim), kv=kv, rows=rows, main_path=rows == 16 and kv is None and dim != 192))
    calls += [_Call(dims=(576, 512), rows=rows, latent=True, main_path=rows == 16, group=rows) for rows in (16, 32, 64)]
    calls += [_Call(_FP16)] + [_Call(dtype, kv=kv, features=_SCALES) for dtype in (_FP16, _BF16) for kv in _QUANTISED]
    plain = _Call()
    calls += [replace(plain, features=frozenset(some)) for some in (_EVERYTHING, {"lse_ptr"}, {"window"})]
    calls += [_Call(kv=_INT8, features=_EVERYTHING | _SCALES), _Call(dims=(256, 256), rows=32, features=_EVERYTHING)]
    calls += [_Call(dims=(dim, dim), group=group) for dim, group in ((64, 16), (128, 1), (128, 16), (256, 16))]
    calls += [replace(plain, page=page) for page in (1, 48, 128)]
    return calls + [_Call(dims=dims, kv=kv) for dims in ((80, 80), (64, 128), (192, 128)) for kv in (None, _E4M3)]


def _reduce(dtype: torch.dtype, dim_v: int, rows: int, everything: bool, invariant: bool = False) -> list[CompileCase]:
    """The merge of cut units, with all its optional arguments or none."""
    types = {"out_ptr": pointer(_FP32 if everything else dtype), "part_ptr": "*fp32:16", "plan_ptr": "*i32:16", "value_scale": "fp32"}
    types |= dict.fromkeys(("tokens", "sequences", "q_len", "pieces", "slots", "num_kv_heads", "rows", "slices", "stride_lt", "stride_vsh"), "i32")
    types |= {"stride_ot": "i32:16", "stride_oh": "i32:16"}
    optional = {name: _OPTIONAL[name] for name in ("lse_ptr", "cu_ptr", "sinks_ptr", "v_scale_ptr")}
    width = 1 << (dim_v - 1).bit_length()
    _, together, parts = reduce_shape(rows, rows, dim_v, 1, invariant=invariant)
    constants: dict[str, object] = {"DV": dim_v, "DV_PAD": width, "ROWS": together, "PARTS": parts, "G": 4, "BLOCK_M": rows}
    constants |= {"TOKEN_ROWS": rows if invariant else 4, "INVARIANT": invariant, "V_TOKEN_SCALE": False}
    if everything:
        types |= optional
    else:
        constants |= dict.fromkeys(optional)
    name = f"reduce/{str(dtype).removeprefix('torch.')}/D{dim_v}-M{rows}{'-all' if everything else ''}{'-invariant' if invariant else ''}"
    return [
        CompileCase(name, reduce_kernel, types, constants | {"PDL": pdl}, 4, 1, fp_fusion=not invariant, no_spills=True, targets=targets)
        for pdl, targets in EVERYWHERE
    ]


def _depth(variable: bool) -> list[CompileCase]:
    """The depths of a draft tree."""
    types = {"depth_ptr": "*i32:16", "tree_ptr": "*u8:16"} | dict.fromkeys(("tokens", "q_len", "stride_tree", "tree_cols"), "i32")
    constants: dict[str, object] = {} if variable else {"cu_ptr": None}
    if variable:
        types["cu_ptr"] = "*i32:16"
    name = f"depth/{'variable' if variable else 'uniform'}"
    return [CompileCase(name, depth_kernel, types, constants | {"PDL": pdl}, 1, 1, targets=targets) for pdl, targets in EVERYWHERE]


def compile_cases() -> list[CompileCase]:
    """The main kernel for all targets, that for Hopper, and the small ones beside them."""
    cases = [case for call in _portable_calls() for case in _portable(call)] + [_hopper(call) for call in _hopper_calls()]
    cases += [case for dtype in FLOATS for everything in (False, True) for case in _reduce(dtype, 128, 16, everything)]
    cases += _reduce(_BF16, 512, 64, False) + _reduce(_BF16, 256, 32, False) + _reduce(_BF16, 128, 16, False, invariant=True)
    return cases + _depth(False) + _depth(True)
