"""The tables of attention cases, edges first.

Most cases come from bugs that public decode kernels had. Their ids begin with the kind:

| B1 to B6    | rows with nothing to attend to, and the causal corner           |
| B7 to B13   | memory that must not be looked at                               |
| B15 to B19  | numerics: softcap, TF32, fp8 accumulation, split reduction      |
| B20 to B24  | LSE, merging, sinks                                             |
| B26 to B29  | strides and layouts                                             |
| B30 to B32  | offsets beyond 31 bits                                          |
| B34 to B40  | head groups, head dims, page sizes                              |
| B41 to B46  | splits, several query tokens, batch mates                       |
| B47 to B53  | graphs, streams, devices, empty batches, host synchronisation   |
| B54 to B60  | scales, windows, biases, writes, trees                          |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hal.conformance.caches import STORAGES

__all__ = ["DECODE", "DECODE_TOGGLES", "DTYPES", "PACKED_PREFILL", "PAGED_PREFILL", "PREFILL_TOGGLES", "Attention", "Toggle"]

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class Attention:
    """One attention call, as data. Names are those of the contract; the rest is how memory looks.

    Attributes:
        lengths: keys of each sequence. q_len: query tokens of each, or one number a sequence (packed).
        padding: padding rows behind the last block. heads: (H, Hkv). dims: (D, Dv). page: P.
        dtype, kv: of q, and of a quantised cache. k_scale, v_scale: float, 0d, 1, head, token, token_padded.
        storage: see `hal.conformance.caches.STORAGES`. spare_pages: pages that nobody references.
        table: what stands behind the last page: minus_one, huge, clean (page 0), or tight for no spare column.
        spare_columns: columns of the table behind the longest sequence's last page.
        poison: what stands in slots that nobody may look at: nan, large, zero.
        q_storage: compact, packed_qkv or heads_first. out: given, new, strided or fp32.
        probe: q = 0 and V = the kv head, the position or the page id. extreme: scores in thousands.
        tree: branches, random, wide (extra columns) or upper (the upper triangle). mla: V is a view of K.
        causal, packed: of flash_prefill.
    """

    id: str
    lengths: tuple[int, ...] = (5, 17)
    q_len: int | tuple[int, ...] = 1
    padding: int = 0
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    page: int = 8
    dtype: str = "fp32"
    kv: str = ""
    layout: str = "NHD"
    storage: str = "compact"
    spare_pages: int = 2
    table: str = "minus_one"
    spare_columns: int = 2
    poison: str = "nan"
    q_storage: str = "compact"
    out: str = "given"
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    alibi: bool = False
    sinks: bool = False
    tree: str = ""
    k_scale: str | None = None
    v_scale: str | None = None
    batch_invariant: bool = False
    probe: str = ""
    extreme: bool = False
    mla: bool = False
    causal: bool = True
    packed: bool = False


@dataclass(frozen=True)
class Toggle:
    """An optional argument, a case that moves it away from its default, and what stands for its absence."""

    argument: str
    case: Attention
    without: Any

    @property
    def id(self) -> str:
        """Name of the test."""
        return self.argument if self.case.id == "base" else f"{self.argument}-{self.case.id}"


C = Attention

_ROWS = (
    C("B1-empty-between", (0, 17, 33)),
    C("B2-empty-last", (9, 23, 11, 0), table="huge"),
    C("B3-empty-tail", (30, 30, 0, 0, 0), dtype="bf16"),
    C("B52-no-sequences", ()),
    C("B52-all-empty", (0, 0, 0)),
    C("B52-one-empty", (0,)),
    C("one-key", (1,)),
    C("page-edges", (7, 8, 9)),
    C("B5-more-queries-than-keys", (2, 0, 3), q_len=4),
    C("B6-causal-corner", (10,), q_len=3, probe="position"),
    C("B20-block-of-8", (19, 8, 40), q_len=8),
    C("block-of-11", (30, 12), q_len=11, heads=(2, 1)),
    C("block-of-17", (40,), q_len=17, heads=(2, 1), dims=(16, 16)),
    C("many-sequences", tuple(i * 7 % 23 for i in range(37)), heads=(2, 1), dims=(16, 16)),
    C("varlen", (9, 20, 5), q_len=(3, 1, 4)),
    C("varlen-empty-blocks", (9, 20, 0, 5), q_len=(0, 2, 0, 1)),
    C("varlen-padding", (9, 20), q_len=(2, 3), padding=4),
    C("varlen-only-padding", (0, 0), q_len=(0, 0), padding=3),
    C("varlen-longer-than-keys", (1, 12), q_len=(3, 2), padding=1),
)
_MEMORY = (
    C("B7-unused-slots", (1, 3), dims=(64, 64), heads=(1, 1), dtype="fp16"),
    C("B8-partial-page", (13,), page=4),
    C("B12-huge-entries", (40, 0), table="huge"),
    C("B13-tight-table", (33, 5), page=16, table="tight"),
    C("B13-tight-one-page", (3,), table="tight"),
    C("B16-large-stale-values", (5,), page=16, softcap=1.0, poison="large"),
    C("spare-cache", (9, 3), spare_pages=12),
    *(
        C(f"out-{kind}-{dtype}", (9, 20, 0), q_len=2, out=kind, dtype=dtype)
        for kind in ("new", "strided", "fp32")
        for dtype in ("fp32", "fp16", "bf16")
    ),
    C("B28-out-strided-varlen", (9, 20, 3), q_len=(4, 0, 3), padding=2, out="strided"),
)
_NUMERICS = (
    *(C(f"dtype-{d}", (33, 1, 16), dtype=d) for d in ("fp32", "fp16", "bf16")),
    C("B15-softcap-extreme", (9,), scale=1.0, softcap=50.0, extreme=True),
    C("scores-extreme", (9,), scale=1.0, extreme=True),
    *(C(f"softcap-{cap:g}-{d}", (25, 3), scale=s, softcap=cap, dtype=d) for cap, s in ((0.5, None), (30.0, 5.0)) for d in ("fp32", "bf16")),
    C("scale-custom", (25,), scale=0.3),
    C("scale-zero", (25,), scale=0.0),
    C("scale-negative", (25,), scale=-0.2),
    C("scale-zero-block", (25, 4), q_len=4, scale=0.0),
    C("scale-negative-block", (25, 4), q_len=4, scale=-0.2),
    C("softcap-long", (700,), heads=(2, 1), dims=(16, 16), page=16, softcap=1.0),
    C("alibi-sinks-long", (700,), heads=(2, 1), dims=(16, 16), page=16, alibi=True, sinks=True),
    C("B17-fp32-not-tf32", (300,), dims=(128, 128), heads=(2, 1), page=16),
)
_SINKS = (
    C("B24-sinks", (30, 0, 1), heads=(8, 2), sinks=True),
    C("B24-sinks-window", (60,), heads=(8, 2), sinks=True, window=5),
    C("B24-sinks-softcap", (30,), heads=(8, 2), sinks=True, softcap=1.0),
    C("B24-sinks-bf16", (30, 7), heads=(8, 2), sinks=True, dtype="bf16"),
    C("B24-sinks-block", (30, 2), heads=(8, 2), sinks=True, q_len=4),
)
_STORAGE = (
    *(
        C(f"{layout}-{storage}", (9, 20), layout=layout, storage=storage)
        for layout in ("NHD", "HND", "HND_SPLIT", "SPLIT_V0")
        for storage in STORAGES
    ),
    *(C(f"{layout}-bf16", (9, 20), layout=layout, dtype="bf16", dims=(32, 48), q_len=2) for layout in ("NHD", "HND", "HND_SPLIT", "SPLIT_V0")),
    C("B27-q-packed-qkv", (9, 20, 3), q_storage="packed_qkv"),
    C("B27-q-heads-first", (9, 20, 3), q_len=2, q_storage="heads_first"),
)
_SIZES = (
    # A group and a page together, because each pair is a kernel of its own on a GPU.
    *(
        C(f"B35-group-{g}-B39-page-{p}", (3072, 3), heads=(g, 1), page=p, dims=(16, 16))
        for g, p in zip(
            (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 71, 2),
            (48, 1, 96, 2, 544, 3, 256, 16, 1072, 8, 192, 64, 528, 128, 2048),
            strict=True,
        )
    ),
    *(C(f"B34-probe-head-{h}-{k}", (9,), heads=(h, k), dims=(16, 16), probe="head") for h, k in ((48, 2), (40, 2), (80, 4), (12, 3))),
    *(C(f"B37-dim-{d}", (11, 2), dims=(d, d), heads=(2, 1)) for d in (16, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256)),
    C("B37-dim-64-v-32", (11, 2), dims=(64, 32)),
    C("B37-dim-32-v-96", (11, 2), dims=(32, 96)),
    C("B37-dim-192-v-128", (11, 2), dims=(192, 128), heads=(2, 1), dtype="bf16"),
    C("mla-576-512", (11, 2), dims=(576, 512), heads=(4, 1)),
    C("mla-shared", (11, 2), dims=(576, 512), heads=(4, 1), mla=True, dtype="bf16"),
    C("mla-shared-heads-16", (20,), dims=(576, 512), heads=(16, 1), mla=True, q_len=2),
    *(C(f"B40-probe-page-{p}", (1000,), page=p, probe="page", heads=(2, 1), spare_pages=5) for p in (1, 3, 16, 32, 256)),
    C("B36-4096-keys", (4096,), heads=(12, 2), dims=(16, 16), page=16),
    C("long-and-short", (600, 1, 0, 17), heads=(2, 1), dims=(16, 16), page=16),
)
_WINDOWS = (
    *(C(f"B55-window-{w}", (10,), window=w, probe="position") for w in (1, 4, 10, 50)),
    C("B55-window-block", (10, 3), q_len=3, window=4, probe="position"),
    C("B9-window-stale-pages", (70, 9), window=12, table="huge"),
    C("B9-window-128", (300, 140), window=128, heads=(2, 1), dims=(16, 16), page=16, table="huge"),
    C("B9-window-straddle", (64,), window=13, page=16),
    C("B9-window-block", (70, 20), window=9, q_len=4, table="huge"),
    C("window-varlen", (40, 9), window=6, q_len=(3, 2), padding=1, dtype="bf16"),
    C("window-softcap", (40, 9), window=6, softcap=1.0),
)
_BIASES = (
    C("B56-alibi", (5, 20), alibi=True),
    C("B56-alibi-block", (5, 20), q_len=2, alibi=True),
    C("B56-alibi-sinks", (5, 20), alibi=True, sinks=True),
    C("B56-alibi-after-softcap", (20,), alibi=True, softcap=1.0),
    C("B56-alibi-window", (40,), q_len=3, alibi=True, window=7),
    C("B56-alibi-bf16", (300,), alibi=True, dtype="bf16", heads=(2, 1), page=16),
)
_SCALE_KINDS = ("float", "0d", "1", "head", "token", "token_padded")
_QUANTISED = (
    *(C(f"B54-{kv}-{kind}", (9, 20, 0), kv=kv, k_scale=kind, v_scale=kind) for kv in ("int8", "e4m3", "e5m2") for kind in _SCALE_KINDS),
    *(C(f"B54-{kv}-unscaled", (9, 20), kv=kv) for kv in ("e4m3", "e5m2")),
    C("B54-e4m3-k-only", (9, 20), kv="e4m3", k_scale="float"),
    C("B54-e4m3-v-only", (9, 20), kv="e4m3", v_scale="head"),
    C("B54-int8-mixed", (9, 20), kv="int8", k_scale="token", v_scale="float"),
    *(
        C(f"B29-{layout}-{kv}-token", (9, 20), kv=kv, layout=layout, k_scale="token_padded", v_scale="token_padded", storage="padded")
        for layout in ("HND", "HND_SPLIT", "SPLIT_V0")
        for kv in ("int8", "e4m3")
    ),
    *(
        C(f"B54-{kv}-{d}", (9, 20), kv=kv, dtype=d, k_scale="float", v_scale="head", q_len=2)
        for kv in ("int8", "e4m3", "e5m2")
        for d in ("fp16", "bf16")
    ),
    C("B24-sinks-int8", (30,), heads=(8, 2), kv="int8", k_scale="float", v_scale="float", sinks=True, softcap=2.0),
    C("B24-sinks-e4m3", (30,), heads=(8, 2), kv="e4m3", k_scale="float", v_scale="float", sinks=True, window=9),
)
_TREES = (
    C("B60-tree", (45, 37), q_len=5, tree="branches", page=16),
    C("B60-tree-page-crossing", (34,), q_len=5, tree="branches", page=16),
    C("B60-tree-no-prefix", (5, 3), q_len=5, tree="branches"),
    C("B60-tree-wide", (20, 9), q_len=5, tree="wide"),
    C("B60-tree-upper", (20,), q_len=4, tree="upper"),
    C("B60-tree-alibi", (20, 9), q_len=5, tree="branches", alibi=True),
    C("B60-tree-window", (20, 9), q_len=5, tree="branches", window=4),
    C("B60-tree-varlen", (20, 9, 4), q_len=(6, 0, 3), tree="random", padding=2),
    C("B60-tree-bf16", (33,), q_len=8, tree="random", dtype="bf16", sinks=True),
)
_MIXES = (
    C("mix-1", (33, 0, 9), q_len=2, layout="HND", window=7, softcap=1.5, sinks=True, dtype="bf16", out="strided"),
    C("mix-2", (33, 2), q_len=(1, 3), padding=2, layout="SPLIT_V0", alibi=True, sinks=True, dtype="fp16"),
    C("mix-3", (33, 2), layout="HND_SPLIT", kv="int8", k_scale="head", v_scale="token", softcap=1.0, dtype="bf16", storage="padded"),
    C("mix-4", (33, 2), q_len=5, kv="int8", k_scale="float", v_scale="head", tree="branches", window=6, alibi=True, storage="interleaved"),
)

#: Cases of `flash_decode`.
DECODE = (*_ROWS, *_MEMORY, *_NUMERICS, *_SINKS, *_STORAGE, *_SIZES, *_WINDOWS, *_BIASES, *_QUANTISED, *_TREES, *_MIXES)

_LONG_BLOCKS = (
    C("whole-prompt", (21, 9), q_len=(21, 9)),
    C("chunk-on-prefix", (40, 33), q_len=(12, 17)),
    C("crossing-tiles", (80,), q_len=(70,), heads=(2, 1), page=16),
    C("one-row", (33, 5), q_len=(1, 1)),
    C("whole-prompt-bf16", (21, 9), q_len=(21, 9), dtype="bf16"),
    C("whole-prompt-fp16", (21, 9), q_len=(21, 9), dtype="fp16"),
    C("longer-than-keys", (3, 12), q_len=(9, 4), padding=2),
    C("window", (40, 12), q_len=(20, 12), window=7),
    C("alibi", (40, 12), q_len=(20, 12), alibi=True),
    C("softcap-sinks", (40, 12), q_len=(20, 12), softcap=2.0, sinks=True),
    C("softcap-window", (40, 12), q_len=(20, 12), softcap=2.0, window=7),
    C("scale-zero", (21, 9), q_len=(21, 9), scale=0.0),
    C("scale-negative", (21, 9), q_len=(21, 9), scale=-0.2),
    C("group-5-dim-40", (30,), q_len=(18,), heads=(5, 1), dims=(40, 40)),
    C("dims-differ", (30,), q_len=(18,), dims=(64, 32)),
    C("out-strided", (30, 4), q_len=(18, 2), padding=3, out="strided"),
    C("out-new", (30, 4), q_len=(18, 2), out="new"),
    C("out-fp32", (30, 4), q_len=(18, 2), out="fp32", dtype="bf16"),
    C("q-packed-qkv", (30, 4), q_len=(18, 4), q_storage="packed_qkv"),
    C("no-sequences", (), q_len=()),
    C("only-padding", (0, 0), q_len=(0, 0), padding=3),
    C("no-keys", (0, 9), q_len=(4, 9)),
)
_PAGED_ONLY = (
    *(
        C(f"{layout}-{storage}", (26,), q_len=(11,), layout=layout, storage=storage)
        for layout in ("HND", "HND_SPLIT", "SPLIT_V0")
        for storage in ("compact", "padded")
    ),
    C("tree", (30, 8), q_len=(7, 5), tree="random"),
    C("int8-token", (26, 8), q_len=(11, 8), kv="int8", k_scale="token", v_scale="token_padded"),
    C("e4m3-head", (26, 8), q_len=(11, 8), kv="e4m3", k_scale="head", v_scale="float"),
    C("window-stale-pages", (70,), q_len=(9,), window=12, table="huge"),
    C("tight-table", (33, 5), q_len=(9, 5), page=16, table="tight"),
    C("probe-page", (33,), q_len=(9,), probe="page"),
    C("causal-corner", (10,), q_len=(3,), probe="position"),
    C("not-causal", (26, 8), q_len=(11, 8), causal=False),
    C("mla", (26,), q_len=(9,), dims=(576, 512), heads=(4, 1)),
)
_PACKED_ONLY = (
    C("int8-head", (26, 8), q_len=(11, 8), kv="int8", k_scale="head", v_scale="float"),
    C("int8-token", (26, 8), q_len=(11, 8), kv="int8", k_scale="token", v_scale="token"),
    C("e5m2", (26, 8), q_len=(11, 8), kv="e5m2"),
    C("not-causal", (26, 0, 8), q_len=(11, 2, 12), causal=False),
    C("not-causal-window", (26, 8), q_len=(11, 8), causal=False, window=5),
    C("not-causal-alibi", (26, 8), q_len=(11, 8), causal=False, alibi=True),
    C("tree", (30, 8), q_len=(7, 5), tree="random"),
    C("B1-empty-between", (0, 17, 0, 9), q_len=(2, 5, 0, 9)),
)

#: Cases of `flash_prefill` on caches.
PAGED_PREFILL = (*_LONG_BLOCKS, *_PAGED_ONLY)
#: Cases of `flash_prefill` on packed keys.
PACKED_PREFILL = tuple(replace(c, packed=True) for c in (*_LONG_BLOCKS, *_PACKED_ONLY))

_BASE = C("base", (20, 30), q_len=3)
_INT8 = replace(_BASE, kv="int8", k_scale="head", v_scale="head")

#: Every optional argument of attention that changes the result, with a call that uses it: were it ignored, the result
#: would be that of `without`, and the oracle must tell the two apart.
TOGGLES = (
    Toggle("scale", replace(_BASE, scale=0.7), None),
    Toggle("softcap", replace(_BASE, softcap=0.5), 0.0),
    Toggle("window", replace(_BASE, window=2, poison="zero", table="tight"), None),
    Toggle("alibi_slopes", replace(_BASE, alibi=True), None),
    Toggle("sinks", replace(_BASE, sinks=True), None),
    Toggle("tree_mask", replace(_BASE, tree="branches"), None),
    Toggle("kv_layout", replace(_BASE, layout="HND", page=2, poison="zero"), "NHD"),
    Toggle("k_scale", replace(_BASE, kv="e4m3", k_scale="float"), None),
    Toggle("v_scale", replace(_BASE, kv="e4m3", v_scale="float"), None),
    Toggle("k_scale", replace(_INT8, id="int8-head"), 1.0),
    Toggle("v_scale", replace(_INT8, id="int8-head"), 1.0),
)
#: Of `flash_decode` only: blocks of 1 and 5 rows, where q_len alone would mean 3 and 3.
DECODE_TOGGLES = (*TOGGLES, Toggle("cu_seqlens_q", replace(_BASE, q_len=(1, 5)), None))
#: Of `flash_prefill` only.
PREFILL_TOGGLES = (*TOGGLES, Toggle("causal", replace(_BASE, causal=False), True))
