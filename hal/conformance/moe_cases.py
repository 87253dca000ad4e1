"""The tables of expert-pipeline cases, edges first. Ids begin with the kind of public bug that they come from:

| B3          | ids of no expert                                            |
| B4          | capacities on both sides of block sizes                     |
| B6          | experts on several ranks                                    |
| B7          | rows that nobody wrote                                      |
| B8          | zero tokens                                                 |
| B10         | sizes that are no multiple of a tile                        |
| B13         | padding tokens                                              |
| A12         | a row that repeats an id                                    |
"""

from __future__ import annotations

from typing import Any

from hal.conformance.moe_inputs import Moe

__all__ = ["FUSED", "FUSED_LARGE", "GEMM", "QUANTISED", "TOGGLES"]

C = Moe
_DTYPES = ("fp32", "fp16", "bf16")
#: (activation, gate_up, further arguments)
_ACTIVATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("silu", {}),
    ("gelu", {}),
    ("gelu_tanh", {}),
    ("swiglu_oai", {}),
    ("swiglu_oai", {"alpha": 0.7, "limit": 0.6}),
    ("silu", {"limit": 0.5}),
)

_IDS = (
    C("B3-garbage", tokens=20, top_k=3, routing="garbage"),
    C("B3-garbage-one-token", tokens=1, top_k=4, routing="garbage"),
    C("B3-garbage-many", tokens=70, top_k=3, routing="garbage", dtype="bf16"),
    C("B7-nobody", tokens=9, routing="nobody"),
    C("B7-nobody-one-token", tokens=1, routing="nobody"),
    C("B7-nobody-many", tokens=80, routing="nobody"),
    C("A12-repeats", tokens=20, top_k=4, experts=3, routing="repeats"),
    C("A12-all-slots-on-one", tokens=5, top_k=3, routing="one"),
    C("one-expert-many-tokens", tokens=130, top_k=1, routing="one", dtype="bf16"),
    C("two-experts-of-many", tokens=20, top_k=2, experts=40, routing="few"),
    C("balanced", tokens=32, top_k=2, experts=8, routing="balanced"),
    C("E-1", tokens=20, top_k=1, experts=1),
    C("E-1-k-3", tokens=20, top_k=3, experts=1, routing="one"),
    C("k-E", tokens=5, top_k=7, experts=7),
    C("k-above-E", tokens=5, top_k=9, experts=3, routing="repeats"),
)
_TOKENS = tuple(
    C(f"B8-T-{t}" if t == 0 else f"B4-T-{t}", tokens=t, experts=8, top_k=2, dtype="bf16" if t % 2 else "fp32")
    for t in (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70, 128, 129, 256, 257)
)
_CAPACITY = tuple(C(f"B4-E-{e}-T-{t}", tokens=t, experts=e, top_k=min(e, 2), hidden=16, inter=8) for e in (1, 2, 60) for t in (1, 17, 33, 65))
_SIZES = (
    *(C(f"B10-H-{h}-I-{i}", hidden=h, inter=i) for h, i in ((1, 1), (8, 24), (24, 8), (96, 96), (100, 136), (136, 100), (1, 96), (96, 1))),
    *(C(f"B10-H-{h}-I-{i}-bf16", hidden=h, inter=i, dtype="bf16", tokens=33) for h, i in ((1, 1), (96, 96), (100, 136), (260, 72))),
    C("B10-strided-out", hidden=96, inter=40, out="strided", dtype="bf16"),
    *(C(f"A4-E-{e}", experts=e, top_k=min(e, 3), tokens=6, hidden=16, inter=8) for e in (2, 3, 7, 13, 60, 64, 72, 96, 128, 144)),
    *(C(f"A6-k-{k}", experts=70, top_k=k, tokens=3, hidden=16, inter=8) for k in (8, 9, 10, 16, 17, 33, 64)),
)
_MEMORY = (
    *(
        C(f"{storage}-{dtype}-T-{t}", storage=storage, dtype=dtype, hidden=40, inter=24, tokens=t, out="strided", x_storage="padded")
        for storage in ("compact", "transposed", "padded", "transposed_padded")
        for dtype, t in (("fp32", 5), ("bf16", 40))
    ),
    C("out-new", out="new", dtype="bf16"),
    C("out-new-no-expert", out="new", routing="nobody"),
)
_NUMERICS = (
    *(C(f"{d}-T-{t}", dtype=d, tokens=t, hidden=136, inter=72) for d in _DTYPES for t in (1, 9, 40)),
    *(
        C(f"{name}-{gate_up}-{'-'.join(numbers)}-T-{t}", activation=name, gate_up=gate_up, tokens=t, dtype="bf16" if t > 9 else "fp32", **numbers)
        for name, numbers in _ACTIVATIONS
        for gate_up in ("concat", "interleaved")
        for t in (3, 40)
    ),
    *(C(f"biases-{d}", biases=True, dtype=d, tokens=t) for d, t in zip(_DTYPES, (3, 20, 40), strict=True)),
    C("biases-fp32-beside-bf16", biases=True, bias_dtype="fp32", dtype="bf16"),
    C("biases-garbage", biases=True, routing="garbage", tokens=20),
    *(C(f"weight-on-input-T-{t}", weight_on_input=True, tokens=t, biases=True) for t in (1, 7, 40)),
    C("weight-on-input-swiglu-oai", weight_on_input=True, activation="swiglu_oai", dtype="bf16", routing="garbage"),
    C("gpt-oss", activation="swiglu_oai", gate_up="interleaved", biases=True, storage="transposed", dtype="bf16", tokens=20, experts=8, top_k=4),
    C("gpt-oss-one-token", activation="swiglu_oai", gate_up="interleaved", biases=True, storage="transposed", dtype="bf16", tokens=1, top_k=4),
    C("fp32-not-tf32", tokens=40, hidden=256, inter=128),
)
_RANKS = (
    *(C(f"B6-{p}-T-{t}", placement=p, tokens=t, dtype="bf16" if t > 9 else "fp32") for p in ("range", "map", "nothing") for t in (1, 7, 40)),
    *(C(f"B6-{p}-garbage", placement=p, tokens=20, routing="garbage", biases=True) for p in ("range", "map", "nothing")),
    *(C(f"B6-{p}-foreign-T-{t}", placement=p, tokens=t, routing="foreign") for p in ("range", "map") for t in (1, 40)),
    C("B6-range-repeats", placement="range", tokens=9, top_k=4, routing="repeats"),
)
_PADDING = (
    *(C(f"B13-valid-{v}-of-{t}", tokens=t, valid=v) for t, v in ((8, 5), (8, 0), (8, 8), (8, 1), (1, 0), (1, 1), (40, 17), (40, 0), (130, 128))),
    *(C(f"B13-valid-{v}-clamped", tokens=8, valid=v) for v in (-3, 9, 2**31 - 1, -(2**31))),
    C("B13-valid-bf16-biases", tokens=40, valid=23, dtype="bf16", biases=True, out="strided"),
    C("B13-valid-range-garbage", tokens=20, valid=11, placement="range", routing="garbage"),
    C("B13-valid-on-input", tokens=8, valid=5, weight_on_input=True),
    C("B13-no-tokens", tokens=0, valid=0),
)

#: Cases of `fused_moe`.
FUSED = (*_IDS, *_TOKENS, *_CAPACITY, *_SIZES, *_MEMORY, *_NUMERICS, *_RANKS, *_PADDING)

#: Cases of `fused_moe` that only a GPU is fast enough for.
FUSED_LARGE = (
    *(C(f"B4-T-{t}-E-{e}", tokens=t, experts=e, top_k=min(e, 2), dtype="bf16") for e in (1, 2, 8, 60) for t in range(1, 71)),
    *(
        C(f"A4-E-{e}-T-{t}", experts=e, top_k=8, tokens=t, dtype="bf16")
        for e in (160, 200, 256, 257, 384, 512, 1000, 1025)
        for t in (1, 16, 17, 64, 257)
    ),
    *(
        C(f"B10-H-{h}-I-{i}-T-{t}", hidden=h, inter=i, dtype="bf16", tokens=t)
        for h, i in ((2816, 704), (704, 2816), (2048, 768))
        for t in (1, 16, 100)
    ),
    *(C(f"T-{t}-{d}", tokens=t, experts=32, top_k=4, hidden=512, inter=256, dtype=d) for t in (255, 1000, 1024, 4097) for d in ("fp16", "bf16")),
    *(C(f"one-expert-T-{t}", tokens=t, experts=32, top_k=4, hidden=512, inter=256, dtype="bf16", routing="one") for t in (16, 300, 2000)),
    *(
        C(f"{s}-T-{t}", tokens=t, experts=16, top_k=4, hidden=264, inter=136, dtype="bf16", storage=s)
        for s in ("transposed", "padded")
        for t in (3, 500)
    ),
    C(
        "gpt-oss",
        tokens=100,
        experts=32,
        top_k=4,
        hidden=2880,
        inter=2880,
        dtype="bf16",
        activation="swiglu_oai",
        gate_up="interleaved",
        biases=True,
        storage="transposed",
    ),
    C("fp32-not-tf32", tokens=600, experts=8, hidden=1024, inter=512),
)

#: Cases of `fused_moe` with quantised experts, whose products `group_gemm` tests too.
QUANTISED = (
    *(
        C(f"{q}-{s}-{'x' if x else 'inside'}-T-{t}", quantised=q, scales=s, x_quantised=x, tokens=t, dtype=d, hidden=160, inter=136)
        for q in ("int8", "e4m3")
        for s in ("tensor", "channel", "block")
        for x in (False, True)
        for t, d in ((3, "bf16"), (33, "fp16"))
    ),
    *(C(f"{q}-transposed", quantised=q, scales="channel", storage="transposed", dtype="bf16", hidden=64, inter=48) for q in ("int8", "e4m3")),
    *(C(f"{q}-biases-interleaved", quantised=q, scales="channel", dtype="bf16", biases=True, gate_up="interleaved") for q in ("int8", "e4m3")),
    *(C(f"{q}-garbage", quantised=q, scales="block", dtype="bf16", routing="garbage", tokens=20, hidden=256, inter=128) for q in ("int8", "e4m3")),
    *(C(f"{q}-range", quantised=q, scales="channel", dtype="bf16", placement="range", x_quantised=True, tokens=20) for q in ("int8", "e4m3")),
    *(C(f"{q}-valid", quantised=q, scales="tensor", dtype="bf16", valid=5, tokens=8) for q in ("int8", "e4m3")),
    *(C(f"{q}-no-tokens", quantised=q, scales="block", dtype="bf16", tokens=0) for q in ("int8", "e4m3")),
)

#: `group_gemm` -> (rows of each expert, spare rows, the rest).
GEMM: tuple[tuple[tuple[int, ...], int, Moe], ...] = (
    ((3, 0, 5), 0, C("plain")),
    ((3, 0, 5), 4, C("B7-spare-rows")),
    ((0, 0, 0), 6, C("B7-only-spare-rows")),
    ((0, 0, 0), 0, C("B8-no-rows")),
    ((), 0, C("no-experts")),
    ((), 3, C("no-experts-spare-rows")),
    ((0, 40, 0, 0), 0, C("one-expert")),
    ((1, 1, 1, 1, 1, 1, 1), 9, C("one-row-each")),
    ((16, 17, 15, 1, 0, 33), 5, C("around-tiles", dtype="bf16")),
    ((130, 0, 64), 10, C("many-rows", dtype="bf16")),
    (tuple(int(i % 7 == 3) for i in range(300)), 0, C("few-of-300")),
    *(((3, 0, 5), 4, C(f"B10-K-{k}-N-{2 * n}", hidden=k, inter=n, out="strided")) for k, n in ((1, 1), (8, 12), (96, 48), (100, 68), (24, 50))),
    ((3, 0, 5), 4, C("K-0", hidden=0, inter=8)),
    ((3, 0, 5), 4, C("K-0-bias", hidden=0, inter=8, biases=True)),
    *(((3, 0, 25), 4, C(f"{d}", dtype=d, hidden=136)) for d in _DTYPES),
    *(((3, 0, 25), 4, C(f"bias-{d}", dtype=d, biases=True)) for d in _DTYPES),
    ((3, 0, 25), 4, C("bias-fp32-beside-bf16", dtype="bf16", biases=True, bias_dtype="fp32")),
    *(
        ((3, 0, 25), 4, C(f"{s}-{d}", storage=s, dtype=d, hidden=40, x_storage="padded", out="strided"))
        for s in ("compact", "transposed", "padded", "transposed_padded")
        for d in ("fp32", "bf16")
    ),
    ((3, 0, 25), 4, C("out-new", out="new", dtype="bf16")),
)

_BASE = C("base", tokens=9, experts=4)
#: Every optional argument of `fused_moe` that changes the result, with a call that uses it, and the value that means "without".
TOGGLES = (
    ("activation", C("activation", activation="gelu"), "silu"),
    ("activation", C("activation-tanh", activation="gelu_tanh", tokens=40, hidden=64), "silu"),
    ("gate_up", C("gate-up", gate_up="interleaved"), "concat"),
    ("b_gate_up", C("b-gate-up", biases=True), None),
    ("b_down", C("b-down", biases=True), None),
    ("alpha", C("alpha", activation="swiglu_oai", alpha=0.4), None),
    ("limit", C("limit", activation="swiglu_oai", limit=0.3), None),
    ("limit", C("limit-silu", limit=0.3), None),
    ("weight_on_input", C("weight-on-input", weight_on_input=True), False),
    ("num_valid_tokens", C("num-valid-tokens", valid=4), None),
)
