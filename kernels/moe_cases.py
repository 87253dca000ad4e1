"""What the launchers of the experts may ask of their kernels, for the ahead-of-time compiler."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from hal.kernels.compile_case import EVERYWHERE, FLOATS, TYPE_NAMES, CompileCase, pointer, refusals
from hal.kernels.moe_activation import ACTIVATIONS, activation_kernel
from hal.kernels.moe_activation import BLOCK as ACTIVATION_BLOCK
from hal.kernels.moe_activation import WARPS as ACTIVATION_WARPS
from hal.kernels.moe_combine import combine_kernel, expand_kernel, unrolled
from hal.kernels.moe_configs import GemmConfig, MoeConfig, SlotConfig, SlotPath
from hal.kernels.moe_gemm import moe_gemm_kernel
from hal.kernels.moe_index import BLOCK, BLOCKS, COLUMNS, COUNTED, FEW_SLOTS, PLACED, TINY_SLOTS, WARPS, few_warps, slot_warps
from hal.kernels.moe_index_kernels import block_kernel, few_kernel, place_kernel, prefix_kernel, tiny_kernel
from hal.kernels.moe_measured import HOPPER
from hal.kernels.moe_quantise import GROUP, QMAX, quantise_kernel, quantise_shape
from hal.kernels.moe_quantised_tuning import QUANTISED_CONFIGS, QUANTISED_SLOT_CONFIGS, sums
from hal.kernels.moe_slots import slot_down_kernel, slot_gate_up_kernel
from hal.kernels.moe_slots_quantised import quantised_slot_down_kernel, quantised_slot_gate_up_kernel
from hal.kernels.moe_tiles import FILL, bins, tiles_kernel, tiles_warps
from hal.kernels.moe_tuning import EXPERT_CONFIGS, ROW_BLOCKS, SLOT_CONFIGS, fitted

__all__ = ["compile_cases"]

#: Kind of device -> (takes part in programmatic dependent launch, targets).
_TARGETS = {"hopper": EVERYWHERE[:1], "other": EVERYWHERE}
#: Choices that are handled at a time, of the usual k.
_UNROLLS = tuple(unrolled(top_k) for top_k in (1, 2, 4, 6, 8, 10))
#: Arguments of `local_expert`, with a map and a number of valid tokens or without.
_ROUTING = {"ids_ptr": "*i32:16"} | dict.fromkeys(("slots", "top_k", "num_experts", "start", "local"), "i32")
_OPTIONAL = {"map_ptr": "*i32:16", "valid_ptr": "*i32:16", "stride_it": "i32"}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _routing(everything: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """(types, constants) of what `local_expert` is given."""
    if everything:
        return _ROUTING | _OPTIONAL, {}
    return dict(_ROUTING), dict.fromkeys(_OPTIONAL)


def _index(experts: int, everything: bool) -> list[CompileCase]:
    """The kernels of the sort; `everything`: all optional arguments."""
    width = bins(experts)
    routing, absent = _routing(everything)
    lists = {"sorted_ptr": "*i32:16", "places_ptr": "*i32:16"}
    tiles = {"tiles_ptr": "*i32:16", "bound": "i32"}
    counts = {"ranks_ptr": "*i32:16", "counts_ptr": "*i32:16", "columns": "i32"}
    sizes = {"sizes_ptr": "*i32:16"}
    every = {"BLOCK_M": 64, "FILL": FILL}
    placed = {"BINS": width, "PLACED": PLACED, "BLOCK": BLOCK} | every
    tag = f"E{experts}{'-all' if everything else ''}"
    cases: list[tuple[str, Any, dict[str, str], dict[str, Any], int]] = [
        ("prefix", prefix_kernel, sizes | {n: "*i32:16" if n == "counts_ptr" else "i32" for n in ("counts_ptr", "blocks", "columns", "local")},
         {"COLUMNS": COLUMNS, "ROWS": BLOCKS}, WARPS),
        ("place", place_kernel, lists | tiles | counts | sizes | dict.fromkeys(("writers", "slots", "local"), "i32"), placed, WARPS),
        ("place-only", place_kernel, lists | counts | sizes | dict.fromkeys(("bound", "writers", "slots", "local"), "i32"),
         placed | {"tiles_ptr": None}, WARPS),
        ("tiles", tiles_kernel, sizes | tiles | dict.fromkeys(("rows", "local"), "i32"), {"BINS": width, "WIDE": everything} | every,
         tiles_warps(width)),
        ("block", block_kernel, routing | counts, absent | {"BLOCK": BLOCK, "FILL": FILL, "ZERO": not everything}, slot_warps(BLOCK)),
    ]  # fmt: skip
    for slots in TINY_SLOTS:
        cases.append((f"tiny-{slots}", tiny_kernel, routing | lists | tiles, absent | {"BLOCK_M": 64, "N": slots}, slot_warps(slots)))
    for slots in FEW_SLOTS:
        types = routing | lists | sizes | {"placers": "i32"}
        cases.append((f"few-{slots}", few_kernel, types, absent | {"PLACED": COUNTED, "N": slots}, few_warps(slots)))
    return [
        CompileCase(f"moe_index/{name}/{tag}", kernel, types, constants | {"PDL": pdl}, warps, 1, no_spills=True, targets=targets)
        for name, kernel, types, constants, warps in cases
        for pdl, targets in EVERYWHERE
    ]


#: Arguments of the grouped product that only quantised weights have.
_SCALE_NAMES = (
    "x_scales_ptr", "w_scales_ptr", "y_scales_ptr", "stride_xsm", "stride_xsk", "stride_wse", "stride_wsn", "stride_wsk", "stride_ysm",
)  # fmt: skip


def _scale_types(scales: str, out_dtype: torch.dtype) -> dict[str, str]:
    """Types of the scales of a product."""
    if not scales:
        return {}
    types = {"x_scales_ptr": "*fp32:16", "w_scales_ptr": "*fp32:16", "stride_xsm": "i32", "stride_wse": "i32", "stride_wsn": "i32"}
    if scales == "block":
        types |= {"stride_xsk": "i32", "stride_wsk": "i32"}
    if out_dtype in QMAX:
        types |= {"y_scales_ptr": "*fp32:16", "stride_ysm": "i32"}
    return types


def _gemm(
    kind: str, dtype: torch.dtype, block_m: int, config: GemmConfig, *, activation: str, k_inner: bool = True, even: bool = True,
    interleaved: bool = False, everything: bool = False, scales: str = "", out_dtype: torch.dtype | None = None,
) -> list[CompileCase]:  # fmt: skip
    """The grouped product of `dtype`: with an activation rows are gathered, without they are sorted; `scales` as the kernel knows them."""
    paired, name, out_dtype = activation != "" and not interleaved, TYPE_NAMES[dtype], out_dtype or dtype
    types = {"y_ptr": pointer(out_dtype), "tiles_ptr": "*i32:16", "columns": "i32:16", "depth": "i32:16", "top_k": "i32"}
    types |= dict.fromkeys(("stride_xm", "stride_we", "stride_ym", "stride_wn" if k_inner else "stride_wk"), "i32:16")
    types |= {"alpha": "fp32", "x_ptr": pointer(dtype), "w_ptr": pointer(dtype), "early": "i32"}
    constants: dict[str, Any] = {"stride_wk" if k_inner else "stride_wn": 1, "stride_be": 0, "stride_ft": 0}
    optional = {"bias_ptr": pointer(dtype), "factors_ptr": "*fp32:16", "limit": "fp32"}
    if everything:
        types |= optional | {"stride_be": "i32:16", "stride_ft": "i32"}
        constants = {key: value for key, value in constants.items() if key not in types}
    else:
        constants |= dict.fromkeys(optional)
    if activation:
        types["src_ptr"] = "*i32:16"
    else:
        constants["src_ptr"] = None
    types |= _scale_types(scales, out_dtype)
    constants |= {name: None if name.endswith("ptr") else 0 for name in _SCALE_NAMES if name not in types}
    ahead = 0 if activation or not k_inner else config.ahead
    n_block = f"2, {config.block_n // 2}" if paired else f"{config.block_n}"
    if config.w_tma:
        types["w_tma"] = f"tensordesc<{name}[1, {n_block}, {config.block_k}]>" if k_inner else f"tensordesc<{name}[1, {config.block_k}, {n_block}]>"
    if config.x_tma and not activation:
        types["x_tma"] = f"tensordesc<{name}[{block_m}, {config.block_k}]>"
    constants |= {
        "ACTIVATION": activation, "INTERLEAVED": interleaved, "BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m, "SWAP": config.swap, "K_INNER": k_inner, "EVEN_N": even, "EVEN_K": even,
        "PERSISTENT": config.programs > 0, "UPCAST": False,
        "SCALES": scales, "HALVES": scales == "block" and even, "QMAX": QMAX.get(out_dtype, 0.0),
    } | {name: None for name in ("x_tma", "w_tma") if name not in types}  # fmt: skip
    marks = ["swap"] * config.swap + ["tma"] * config.w_tma + [f"p{config.programs}"] * bool(config.programs) + [f"a{ahead}"] * bool(ahead)
    marks += [activation] * bool(activation) + ["interleaved"] * interleaved + ["n-inner"] * (not k_inner)
    marks += ["odd"] * (not even) + ["all"] * everything + [scales] * bool(scales) + ["quantised"] * (out_dtype in QMAX)
    tag = "-".join([f"M{block_m}", f"N{config.block_n}", f"K{config.block_k}", f"w{config.warps}", f"s{config.stages}", *marks])
    return [
        CompileCase(
            f"moe_gemm/{kind}/{_name(dtype)}/{tag}", moe_gemm_kernel, types, constants | {"AHEAD": ahead if pdl else 0, "PDL": pdl},
            config.warps, config.stages, refused=refusals(dtype)[0],
            no_spills=kind == "hopper" and even and not everything, targets=targets,
        )
        for pdl, targets in _TARGETS[kind]
    ]  # fmt: skip


def _gemms() -> list[CompileCase]:
    """Every config of the tables on both products; activations, layouts and odd sizes on some of them."""
    cases: list[CompileCase] = []
    for entry in HOPPER:
        if isinstance(entry.config, MoeConfig):
            cases += _gemm("hopper", torch.bfloat16, entry.config.block_m, entry.config.up, activation="silu")
            cases += _gemm("hopper", torch.bfloat16, entry.config.block_m, entry.config.down, activation="")
    for (kind, size), rows in EXPERT_CONFIGS.items():
        for dtype in (torch.float32,) if size == 4 else (torch.bfloat16,) if kind == "hopper" else (torch.bfloat16, torch.float16):
            for _, config in rows:
                cases += _gemm(kind, dtype, config.block_m, config.up, activation="silu")
                cases += _gemm(kind, dtype, config.block_m, config.down, activation="")
                cases += _gemm(kind, dtype, config.block_m, fitted(config.down, 96, 96), activation="")
                cases += _gemm(kind, dtype, config.block_m, config.up, activation="swiglu_oai", k_inner=False, interleaved=True, everything=True)
                cases += _gemm(kind, dtype, config.block_m, config.down, activation="", k_inner=False, even=False)
        first = rows[0][1]
        for activation in ACTIVATIONS[1:]:
            cases += _gemm(kind, dtype, first.block_m, first.up, activation=activation)
        cases += _gemm(kind, dtype, first.block_m, first.up, activation="silu", even=False, everything=True)
    return cases


def _quantised_gemms() -> list[CompileCase]:
    """Every config of the quantised table; blocks so wide that they leave quantised do; layouts and odd sizes on the down projection."""
    cases, half = [], torch.bfloat16
    for (kind, how), rows in QUANTISED_CONFIGS.items():
        scales = "block" if how == "blocks" else "row"
        for dtype in (dtype for dtype in QMAX if sums(dtype, scales == "block") == how):
            for _, config in rows:
                fused = scales == "block" and config.up.block_n == 2 * GROUP
                cases += _gemm(kind, dtype, config.block_m, config.up, activation="silu", scales=scales, out_dtype=dtype if fused else half)
                cases += _gemm(kind, dtype, config.block_m, config.down, activation="", scales=scales, out_dtype=half)
                cases += _gemm(kind, dtype, config.block_m, config.down, activation="", k_inner=False, even=False, scales=scales, out_dtype=half)
            cases += _gemm(
                kind, dtype, config.block_m, config.up, activation="swiglu_oai", interleaved=True, even=False, everything=True, scales=scales,
                out_dtype=torch.float32,
            )  # fmt: skip
    return list({case.name + str(case.targets): case for case in cases}.values())


def _quantise() -> list[CompileCase]:
    """The rounding of rows: of those of a whole width, and of groups."""
    cases = []
    for codes in QMAX:
        for source in FLOATS:
            for tag in ("rows", "groups"):
                height, block, warps = quantise_shape(2048, tag == "groups")
                types = {"x_ptr": pointer(source), "codes_ptr": pointer(codes), "scales_ptr": "*fp32:16", "valid_ptr": "*i32:16"}
                types |= dict.fromkeys(("rows", "groups", "stride_sm"), "i32")
                types |= dict.fromkeys(("columns", "stride_xm", "stride_cm"), "i32:16")
                constants = {"QMAX": QMAX[codes], "GROUPED": tag == "groups", "ROWS": height, "BLOCK": block}
                name = f"moe_quantise/{tag}/{_name(source)}/{_name(codes)}"
                cases += [
                    CompileCase(
                        name, quantise_kernel, types, constants | {"PDL": pdl}, warps, 1, refused=refusals(codes)[0], targets=targets,
                        no_spills=True,
                    )
                    for pdl, targets in EVERYWHERE
                ]  # fmt: skip
    return cases


def _quantised_slots(dtype: torch.dtype, blocks: bool, everything: bool) -> list[CompileCase]:
    """The two kernels for few tokens on quantised experts."""
    routing, absent = _routing(everything)
    up, down = QUANTISED_SLOT_CONFIGS.up, QUANTISED_SLOT_CONFIGS.down
    codes, scale_strides = pointer(dtype), dict.fromkeys(("stride_xst", "stride_wse", "stride_wsn"), "i32")
    common = (
        routing | scale_strides | {"x_scales_ptr": "*fp32:16", "w_scales_ptr": "*fp32:16", "w_ptr": codes, "columns": "i32:16", "depth": "i32:16"}
    )
    common |= dict.fromkeys(("stride_we", "stride_wn", "stride_im"), "i32:16")
    optional = {"bias_ptr": "*bf16:16", "stride_be": "i32:16", "stride_ft": "i32"}
    up_types = common | {"x_ptr": codes, "inter_ptr": "*fp32:16", "alpha": "fp32", "stride_xt": "i32:16"}
    down_types = common | {"inter_ptr": codes, "out_ptr": "*bf16:16", "weights_ptr": "*fp32:16", "stride_ft": "i32", "stride_ot": "i32:16"}
    constants: dict[str, Any] = dict(absent)
    if blocks:
        up_types |= {"stride_xsk": "i32", "stride_wsk": "i32"}
        down_types |= {"stride_xsk": "i32", "stride_wsk": "i32"}
    else:
        constants |= {"stride_xsk": 0, "stride_wsk": 0}
    up_absent: dict[str, Any] = {} if everything else {"bias_ptr": None, "stride_be": 0, "stride_ft": 0, "factors_ptr": None, "limit": None}
    down_absent: dict[str, Any] = {} if everything else {"bias_ptr": None, "stride_be": 0}
    if everything:
        up_types |= optional | {"factors_ptr": "*fp32:16", "limit": "fp32"}
        down_types |= optional
    cases = []
    for pdl, targets in EVERYWHERE:
        tag = f"{_name(dtype)}-{'block' if blocks else 'row'}{'-all' if everything else ''}"
        for name, kernel, types, config, extra in (
            ("up", quantised_slot_gate_up_kernel, up_types, up, up_absent | {"ACTIVATION": "silu", "INTERLEAVED": everything}),
            ("down", quantised_slot_down_kernel, down_types, down, down_absent | {"TOP_K": 4 if everything else 8, "WHOLE": not everything}),
        ):
            shape = (config.block_k // GROUP, GROUP, GROUP) if blocks else (1, config.block_k, 1)
            tile = dict(zip(("GROUPS", "K_GROUP", "N_GROUP"), shape, strict=True)) | {"ROWS": config.rows, "STAGES": config.stages}
            bound = constants | extra | tile | {"PREFETCH": config.prefetch and pdl, "PDL": pdl}
            cases.append(
                CompileCase(f"moe_slots/quantised-{name}/{tag}", kernel, types, bound, config.warps, 1, refused=refusals(dtype)[0], targets=targets)
            )
    return cases


def _slots(dtype: torch.dtype, k_inner: bool, up: SlotConfig, down: SlotConfig, everything: bool) -> list[CompileCase]:
    """The two kernels for few tokens."""
    routing, absent = _routing(everything)
    value = pointer(dtype)
    strides = dict.fromkeys(("stride_we", "stride_wn" if k_inner else "stride_wk", "stride_im", "stride_xt", "stride_ot"), "i32:16")
    one: dict[str, Any] = {"stride_wk" if k_inner else "stride_wn": 1}
    sizes = {"columns": "i32:16", "depth": "i32:16"}
    optional = {"bias_ptr": value, "stride_be": "i32:16", "stride_ft": "i32"}
    tag = f"{_name(dtype)}{'' if k_inner else '-n-inner'}{'-all' if everything else ''}"
    up_types = routing | strides | sizes | {"x_ptr": value, "w_ptr": value, "inter_ptr": value, "alpha": "fp32"}
    down_types = routing | strides | sizes | {"inter_ptr": value, "w_ptr": value, "out_ptr": value, "weights_ptr": "*fp32:16", "stride_ft": "i32"}
    up_types.pop("stride_ot")
    down_types.pop("stride_xt")
    up_absent: dict[str, Any] = {} if everything else {"bias_ptr": None, "stride_be": 0, "stride_ft": 0, "factors_ptr": None, "limit": None}
    down_absent: dict[str, Any] = {} if everything else {"bias_ptr": None, "stride_be": 0}
    if everything:
        up_types |= optional | {"factors_ptr": "*fp32:16", "limit": "fp32"}
        down_types |= optional
    cases = []
    for pdl, targets in EVERYWHERE:
        first = one | absent | up_absent | {"ACTIVATION": "swiglu_oai" if everything else "silu", "INTERLEAVED": everything}
        first |= {"ROWS": up.rows, "BLOCK_K": up.block_k, "STAGES": up.stages, "PDL": pdl}
        second = one | absent | down_absent | {"TOP_K": 4 if everything else 8, "ROWS": down.rows, "BLOCK_K": down.block_k, "STAGES": down.stages}
        second |= {"WHOLE": not everything, "PREFETCH": down.prefetch and pdl and k_inner, "PDL": pdl}
        cases.append(CompileCase(f"moe_slots/up/{tag}/{up.rows}x{up.block_k}", slot_gate_up_kernel, up_types, first, up.warps, 1, targets=targets))
        cases.append(
            CompileCase(f"moe_slots/down/{tag}/{down.rows}x{down.block_k}", slot_down_kernel, down_types, second, down.warps, 1, targets=targets)
        )
    return cases


def _rows(dtype: torch.dtype, everything: bool) -> list[CompileCase]:
    """The kernels that walk over rows; every unrolling on one dtype."""
    main = dtype is torch.bfloat16
    value, tag = pointer(dtype), f"{_name(dtype)}{'-all' if everything else ''}"
    combine = {"y_ptr": value, "places_ptr": "*i32:16", "out_ptr": value, "rows": "i32", "columns": "i32:16", "top_k": "i32", "scale": "fp32"}
    combine |= {"stride_ym": "i32:16", "stride_ot": "i32:16"}
    absent: dict[str, Any] = {} if everything else {"weights_ptr": None, "stride_wt": 0, "residual_ptr": None, "stride_rt": 0}
    if everything:
        combine |= {"weights_ptr": "*fp32:16", "stride_wt": "i32", "residual_ptr": value, "stride_rt": "i32:16"}
    act = {"x_ptr": value, "out_ptr": value, "alpha": "fp32", "columns": "i32", "stride_x": "i32:16", "stride_out": "i32:16"}
    limit: dict[str, Any] = {} if everything else {"limit": None}
    if everything:
        act["limit"] = "fp32"
    cases = []
    for pdl, targets in EVERYWHERE:
        for (block, warps), unroll in product(ROW_BLOCKS, _UNROLLS if main and everything else _UNROLLS[-2:-1]):
            tail = {"UNROLL": unroll, "BLOCK": block, "PDL": pdl}
            name = f"moe_combine/{tag}/{block}x{unroll}"
            cases.append(CompileCase(name, combine_kernel, combine, absent | tail, warps, 1, targets=targets, no_spills=main))
        for activation in ACTIVATIONS:
            constants = limit | {"ACTIVATION": activation, "INTERLEAVED": everything, "BLOCK": ACTIVATION_BLOCK, "PDL": pdl}
            cases.append(CompileCase(f"moe_activation/{activation}/{tag}", activation_kernel, act, constants, ACTIVATION_WARPS, 1, targets=targets))
    return cases


def _expand(bits: str) -> list[CompileCase]:
    """The copy of rows whose elements have the size of `bits`; every unrolling on one size."""
    types = {"x_ptr": f"*{bits}:16", "places_ptr": "*i32:16", "out_ptr": f"*{bits}:16", "rows": "i32", "columns": "i32:16", "top_k": "i32"}
    types |= {"stride_xt": "i32:16", "stride_om": "i32:16"}
    return [
        CompileCase(
            f"moe_expand/{bits}/{block}x{unroll}", expand_kernel, types, {"UNROLL": unroll, "BLOCK": block, "PDL": pdl}, warps, 1,
            targets=targets, no_spills=bits == "i16",
        )
        for pdl, targets in EVERYWHERE
        for (block, warps), unroll in product(ROW_BLOCKS, _UNROLLS if bits == "i16" else _UNROLLS[-2:-1])
    ]  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """All kernels of the experts, in the variants that their launchers ask for."""
    cases = [case for experts in (128, 1024) for everything in (False, True) for case in _index(experts, everything)] + _gemms()
    cases += _quantised_gemms() + _quantise()
    cases += [
        case for dtype in QMAX for blocks in (False, True) for everything in (False, True) for case in _quantised_slots(dtype, blocks, everything)
    ]
    paths = [(key, path) for key, table in SLOT_CONFIGS.items() for _, path in table]
    for (size, k_inner), path in paths + [((2, True), entry.config) for entry in HOPPER if isinstance(entry.config, SlotPath)]:
        for dtype in (torch.float32,) if size == 4 else (torch.bfloat16, torch.float16):
            for everything in (False, True):
                cases += _slots(dtype, k_inner, path.up, path.down, everything)
    cases += [case for bits in ("u8", "i16", "i32", "i64") for case in _expand(bits)]
    cases += [case for dtype in FLOATS for everything in (False, True) for case in _rows(dtype, everything)]
    return list({case.name + str(case.targets): case for case in cases}.values())
