"""Inputs of public bug reports as the reports state them, where `cases.py` has smaller relatives, and grids of sizes in 16 bits.

Unless a report says otherwise: 32 query and 8 kv heads of 128, bf16, pages of 16. Ids begin as those of `cases.py`; `L` are
defects that were found by reading, never reported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hal.conformance.cases import Attention

__all__ = ["GRID", "PAIRS", "REPORTED"]

R = partial(Attention, heads=(32, 8), dims=(128, 128), page=16, dtype="bf16")
_MLA: dict[str, Any] = {"dims": (576, 512), "heads": (16, 1), "mla": True}
_SINKS: dict[str, Any] = {"heads": (8, 2), "sinks": True}

REPORTED = (
    R("B1-empty-between", (0, 17, 33)),
    R("B2-B8-mla-padded-batch", (57, 23, 101, 13, 0), page=4, table="clean", **_MLA),
    R("B3-empty-tail-under-131072-keys", (*[300] * 5, 0, 0, 0), spare_columns=8192 - 19),
    R("B5-more-queries-than-keys", (2,), q_len=4),
    R("B9-window-pages-of-nan", (1000,), dims=(64, 64), window=128, table="tight"),
    R("B9-window-entries-minus-one", (1000,), dims=(64, 64), window=128),
    R("B9-window-entries-of-others", (1000, 40), dims=(64, 64), window=128, table="clean", spare_pages=0),
    R("B13-tight-table", (257,), page=64, table="tight"),
    R("B22-empty", (0,)),
    R("B24-sinks-window", (1000, 0), window=32, **_SINKS),
    R("B24-sinks-window-softcap-e4m3", (1000, 0), window=32, softcap=30.0, kv="e4m3", k_scale="float", v_scale="float", **_SINKS),
    *(R(f"B26-{storage}", (9, 40), storage=storage) for storage in ("interleaved", "padded", "permuted", "stacked", "v_padded", "wide_rows")),
    R("B27-q-packed-qkv", (9, 20, 3, 40), q_storage="packed_qkv"),
    R("B27-q-heads-first", (9, 20, 3, 40), q_storage="heads_first"),
    R("B28-out-contiguous", (700, 90), q_len=4, heads=(8, 2)),
    R("B28-out-strided", (700, 90), q_len=4, heads=(8, 2), out="strided"),
    R("B29-padded-scales", (300, 90), kv="int8", k_scale="token_padded", v_scale="token_padded", storage="padded"),
    *(R(f"B34-{h}-heads-over-{k}", (9,), heads=(h, k), probe="head") for h, k in ((48, 2), (40, 2), (80, 4))),
    R("B60-tree", (1005, 1010), q_len=5, tree="branches", heads=(8, 2)),
    R("B61-group-8-pages-of-32", (512, 512), heads=(16, 2), page=32),
    R("L5-empty-beside-split", (0, 900), heads=(8, 2)),
    R("L7-mla-interleaved", (57, 23), page=4, storage="interleaved", **_MLA),
    R("L7-mla-stacked", (57, 23), page=4, storage="stacked", **_MLA),
    R("L9-4096-beside-empty", (4096, 0), heads=(4, 1)),
)

#: Head dims, groups and pages that public kernels refused or got wrong.
_DIMS = ((64, 64), (80, 80), (96, 96), (120, 120), (128, 128), (192, 192), (256, 256), (576, 512))
_GROUPS = (1, 3, 5, 7, 12, 24, 71)
_PAGES = (1, 3, 16, 48, 64, 128, 256)


def _sized(index: int, shift: int, **features: Any) -> Attention:
    """Head dim `index`; lengths that end a page, begin one, leave one slot free, and are long enough to be split."""
    dims, group, page = _DIMS[index], _GROUPS[(index + shift) % 7], _PAGES[(index + 3 * shift) % 7]
    heads = 1 if dims[0] == 576 or group > 24 else 2
    name = f"dim-{dims[0]}-group-{group}-page-{page}" + "".join(f"-{v}" for v in features.values())
    lengths = (page, page + 1, max(1, 2 * page - 1), 300)
    return R(name, lengths, dims=dims, heads=(heads * group, heads), page=page, **features)


#: Each compiles kernels of its own on a GPU, so they are few: every dim, group and page once or twice.
GRID = (
    *(_sized(index, 2, q_len=1 + 2 * (index % 2), storage="wide_rows") for index in range(8)),
    *(_sized(index, 4, kv="e4m3", storage="wide_rows") for index in (0, 7)),
)

#: Five rows in three of which each feature is on, a different three for each, and one without any: so any two features
#: meet in all four combinations of on and off (the smallest covering array; Katona 1973, Kleitman and Spencer 1973).
_FEATURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("11100", {"window": 150}),
    ("11010", {"alibi": True}),
    ("11001", {"softcap": 2.0}),
    ("10110", {"sinks": True}),
    ("10011", {"q_len": 5, "tree": "branches"}),
    ("01101", {"kv": "int8", "k_scale": "token", "v_scale": "head"}),
    ("00111", {"batch_invariant": True}),
)


def _pair(row: int) -> Attention:
    chosen = [feature for marks, feature in _FEATURES if row < 5 and marks[row] == "1"]
    name = "+".join(next(reversed(feature)) for feature in chosen) or "none"
    merged = {k: v for feature in chosen for k, v in feature.items()}
    return R(f"pairs-{name}", (300, 0, 19), heads=(8, 2), **merged)


PAIRS = tuple(_pair(row) for row in range(6))
