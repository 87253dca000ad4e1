"""The shapes that `hal bench decode` measures, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hal.bench.cases import chosen

__all__ = ["CASES", "GROUPS", "DecodeCase", "select"]

#: Bytes of an element.
_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "int8": 1}


@dataclass(frozen=True)
class DecodeCase:
    """One decode step of one layer.

    Attributes:
        group: which table it belongs to.
        name: unique inside the group.
        lengths: keys of each sequence.
        heads: query heads.
        kv_heads: kv heads.
        head_dim: of K; also of V, unless `mla`.
        page: slots of a page.
        q_len: query tokens of each sequence.
        dtype: of q and of the result: `bf16` or `fp16`.
        kv_dtype: of the caches; empty for q's. `e4m3` has one scale for K and one for V, `int8` one per token and head.
        window: visible keys, None for all.
        mla: latent attention: V is the first 512 elements of K.
        batch_invariant: as in the call.
        peers: functions of a peers file that can compute it; the first that works is used.
        base: name of the row of the same group that this one is compared with, or empty.
    """

    group: str
    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    page: int = 16
    q_len: int = 1
    dtype: str = "bf16"
    kv_dtype: str = ""
    window: int | None = None
    mla: bool = False
    batch_invariant: bool = False
    peers: tuple[str, ...] = ()
    base: str = ""

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def head_dim_v(self) -> int:
        """Head dim of V."""
        return 512 if self.mla else self.head_dim

    @property
    def stored(self) -> str:
        """Name of the caches' dtype."""
        return self.kv_dtype or self.dtype

    @property
    def visible(self) -> tuple[int, ...]:
        """Keys of each sequence that some query token sees."""
        reach = max(self.lengths, default=0) if self.window is None else self.window + self.q_len - 1
        return tuple(min(n, reach) for n in self.lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and their scales that a step has to read."""
        elements = self.head_dim if self.mla else self.head_dim + self.head_dim_v
        scales = 8 if self.stored == "int8" else 0
        return sum(self.visible) * self.kv_heads * (elements * _BYTES[self.stored] + scales)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products; causality inside the block of query tokens is not subtracted."""
        return 2 * self.heads * self.q_len * (self.head_dim + self.head_dim_v) * sum(self.visible)


def _llama(name: str, lengths: tuple[int, ...], group: str = "main", **fields: object) -> DecodeCase:
    """Llama-3-8B's attention: 32 query heads on 8, D = 128."""
    shape: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128} | fields
    return DecodeCase(group, name, lengths, **shape)


#: 64 lengths from 64 to 16384, evenly spaced, in an order without a pattern.
_RAGGED = tuple(64 + (i * 37 % 64) * 16320 // 63 for i in range(64))
_ONE_LONG = (65536, *[512] * 63)
_LONG_AND_MID = (131072, *[4096] * 31)


def _main() -> list[DecodeCase]:
    decode = ("decode", "attend")
    with_peers = [
        DecodeCase("main", "seed B16 16/8 D128 4k p32 fp16", (4096,) * 16, 16, 8, 128, 32, dtype="fp16", peers=decode),
        *(_llama(f"llama8b {name}", lengths, peers=decode) for name, lengths in _LLAMA_BATCHES.items()),
        _llama("llama8b ragged B64 64..16k", _RAGGED, peers=decode),
        _llama("llama8b one 64k + 63 x 512", _ONE_LONG, peers=decode, base="llama8b 64 x 1528 (twin)"),
        _llama("llama8b 1 x 128k + 31 x 4k", _LONG_AND_MID, peers=decode, base="llama8b 32 x 8064 (twin)"),
        DecodeCase("main", "llama70b/tp8 B64 8k", (8192,) * 64, 8, 1, 128, peers=decode),
        DecodeCase("main", "llama70b/tp8 B1 32k", (32768,), 8, 1, 128, peers=decode),
        DecodeCase("main", "mha llama2-7b B16 4k", (4096,) * 16, 32, 32, 128, peers=decode),
        DecodeCase("main", "qwen3.5 16/2 D256 B16 16k", (16384,) * 16, 16, 2, 256, peers=decode),
        DecodeCase("main", "smollm 9/3 D64 B8 2k", (2048,) * 8, 9, 3, 64, peers=decode),
        DecodeCase("main", "mqa 32/1 D128 B32 4k p64", (4096,) * 32, 32, 1, 128, 64, peers=decode),
        _llama("llama8b B64 8k p64", (8192,) * 64, page=64, peers=decode),
    ]
    twins = [_llama("llama8b 64 x 1528 (twin)", (1528,) * 64), _llama("llama8b 32 x 8064 (twin)", (8064,) * 32)]
    return with_peers + twins


_LLAMA_BATCHES = {
    "B1 1k": (1024,),
    "B1 8k": (8192,),
    "B1 128k": (131072,),
    "B8 8k": (8192,) * 8,
    "B64 1k": (1024,) * 64,
    "B64 8k": (8192,) * 64,
    "B256 2k": (2048,) * 256,
}
#: batch, query heads, keys, query tokens
_MLA = (
    (1, 16, 4096, 1),
    (1, 128, 4096, 1),
    (1, 128, 32768, 1),
    (32, 16, 4096, 1),
    (128, 16, 4096, 1),
    (32, 128, 4096, 1),
    (128, 128, 4096, 1),
    (64, 16, 16384, 1),
    (64, 128, 16384, 1),
    (64, 128, 4096, 2),
)
#: query heads, kv heads
_HEADS = (*((8 * group, 8) for group in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24)), (40, 2), (48, 2), (71, 1))


def _mla() -> list[DecodeCase]:
    return [
        DecodeCase("mla", f"B{b} H{h} ctx{keys} q{q_len}", (keys,) * b, h, 1, 576, 64, q_len, mla=True, peers=("mla",)) for b, h, keys, q_len in _MLA
    ]


def _fp8() -> list[DecodeCase]:
    batches = {"B64 8k": (8192,) * 64, "B8 8k": (8192,) * 8, "1 x 128k": (131072,)}
    e4m3 = [
        _llama(f"e4m3 {name} p{page}", lengths, "fp8", page=page, kv_dtype="e4m3", peers=("fp8",))
        for page in (64, 16)
        for name, lengths in batches.items()
    ]
    return [*e4m3, _llama("int8 per token B64 8k p16", batches["B64 8k"], "fp8", kv_dtype="int8")]


def _invariant() -> list[DecodeCase]:
    batches = {name: _LLAMA_BATCHES[name] for name in ("B1 8k", "B1 128k", "B8 8k", "B64 8k")}
    shapes = [_llama(name, lengths, "invariant") for name, lengths in (batches | {"ragged B64 64..16k": _RAGGED}).items()]
    shapes.append(DecodeCase("invariant", "tp8 8/1 B64 8k", (8192,) * 64, 8, 1, 128))
    return [row for plain in shapes for row in (plain, _with(plain, name=f"{plain.name} invariant", batch_invariant=True, base=plain.name))]


def _qlen() -> list[DecodeCase]:
    rows = []
    for group, lengths in ((4, (1, 2, 4, 8)), (8, (1, 2, 4, 8)), (16, (1, 8))):
        for q_len in lengths:
            name = f"group {group} B8 8k q_len "
            base = "" if q_len == 1 else f"{name}1"
            rows.append(_llama(f"{name}{q_len}", (8192,) * 8, "qlen", heads=8 * group, q_len=q_len, peers=("attend",), base=base))
    return rows


def _window() -> list[DecodeCase]:
    rows = []
    for batch in (1, 16):
        short = f"B{batch} context 1024"
        rows += [
            _llama(short, (1024,) * batch, "window"),
            _llama(f"B{batch} window 1024 of 128k", (131072,) * batch, "window", window=1024, base=short),
        ]
    return rows


def _batch() -> list[DecodeCase]:
    rows = []
    for heads, kv_heads, keys in ((8, 1, 6144), (32, 8, 4096)):
        for batch in range(1, 65):
            name = f"Hkv {kv_heads} ctx {keys} B"
            base = f"{name}{batch - 1}" if batch > 1 else ""
            rows.append(DecodeCase("batch", f"{name}{batch}", (keys,) * batch, heads, kv_heads, 128, base=base))
    return rows


def _with(case: DecodeCase, **fields: object) -> DecodeCase:
    return DecodeCase(**{**case.__dict__, **fields})


#: All cases, in the order in which they run.
CASES: tuple[DecodeCase, ...] = (
    *_main(),
    *_fp8(),
    *_mla(),
    *_invariant(),
    *(_llama(f"page {page}", (8192,) * 16, "pages", page=page) for page in (1, 16, 48, 64, 128, 256)),
    *(DecodeCase("groups", f"{h}/{hkv} (group {h // hkv}) B16 8k", (8192,) * 16, h, hkv, 128) for h, hkv in _HEADS),
    *(_llama(f"D{dim} B16 8k", (8192,) * 16, "dims", head_dim=dim) for dim in (64, 96, 128, 192, 256)),
    *_qlen(),
    *_window(),
    *_batch(),
)
#: Groups of `CASES`, then those measured otherwise.
GROUPS: tuple[str, ...] = (*dict.fromkeys(case.group for case in CASES), "host")


def select(groups: tuple[str, ...], only: tuple[str, ...] = ()) -> list[DecodeCase]:
    """Return the cases of some groups and names, see `chosen`."""
    return chosen(CASES, groups, only)
