"""Run the launchers as a GPU process would, compiling for sm_90 but launching nothing, and count the compiled variants.

    python tests/kernels/count_variants.py

Prints a JSON object: case -> {kernel: variants that it adds}. Each case of decoding and of experts runs as on a GPU that
gets the portable kernels and as on Hopper. Needs no GPU; must not run under TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch


class CompileOnlyDriver:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_only() -> Iterator[None]:
    """Turn every launch into a compilation."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch = JITFunction.__getitem__
    driver.set_active(CompileOnlyDriver())
    JITFunction.__getitem__ = lambda self, grid: lambda *args, **options: self.run(*args, grid=grid, warmup=True, **options)
    try:
        yield
    finally:
        JITFunction.__getitem__ = launch


@contextmanager
def hopper() -> Iterator[None]:
    """Let the launcher see a Hopper GPU of 132 multiprocessors."""
    from hal.backends import triton_moe, triton_ops  # noqa: F401

    pretended: dict[str, Callable[..., Any]] = {
        "is_hopper": lambda device: True,
        "supports_pdl": lambda device: True,
        "decode_programs": lambda device, config: 132 * config.residents,
        "multiprocessors": lambda device: 132,
    }
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("hal.kernels.")]
    own = [{name: module[name] for name in pretended if name in module} for module in modules]

    def forget() -> None:
        for module in modules:
            for value in list(module.values()):
                getattr(value, "cache_clear", lambda: None)()

    for module, names in zip(modules, own, strict=True):
        module.update({name: pretended[name] for name in names})
    forget()
    try:
        yield
    finally:
        for module, names in zip(modules, own, strict=True):
            module.update(names)
        forget()


def decode(sequences: int, columns: int, pages: int, padding: int = 0, **extra: Any) -> None:
    """One call of 8/2 heads, D = 64, page size 16; `padding` rows beyond the blocks."""
    from hal.backends.triton_ops import flash_decode

    q_len = extra.get("q_len", 1)
    tokens = sequences * q_len + padding
    if "cu_seqlens_q" in extra:
        extra["cu_seqlens_q"] = torch.arange(sequences + 1, dtype=torch.int32)
    cache = torch.zeros(pages, 16, 2, 64, dtype=torch.bfloat16)
    lengths, table = torch.zeros(sequences, dtype=torch.int32), torch.zeros(sequences, columns, dtype=torch.int32)
    flash_decode(torch.zeros(tokens, 8, 64, dtype=torch.bfloat16), cache, cache.clone(), lengths, table, return_lse=True, **extra)


def planned(sequences: int, columns: int, pages: int, **facts: Any) -> None:
    """A plan, its refresh, and a call that uses it."""
    from hal.backends.triton_ops import plan_decode

    facts |= {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "max_seq_len": 16 * columns}
    lengths = torch.zeros(sequences, dtype=torch.int32)
    plan = plan_decode(lengths, **facts)
    decode(sequences, columns, pages, plan=plan_decode(lengths, **facts, out=plan), q_len=facts["q_len"], window=facts["window"])


def sweep(call: Callable[..., None], **extra: Any) -> None:
    """The same call over batch sizes, table widths and cache sizes, 1 and multiples of 16 among them."""
    for sequences, columns, pages in ((1, 9, 1), (2, 16, 16), (3, 17, 5), (16, 300, 32), (33, 64, 48)):
        call(sequences, columns, pages, **dict(extra))


def write(sequences: int, columns: int, pages: int) -> None:
    """One write of as many tokens into an int8 cache; `columns` stands for nothing."""
    from hal.backends.triton_ops import write_kv

    key, cache = torch.zeros(sequences, 2, 64, dtype=torch.bfloat16), torch.zeros(pages, 16, 2, 64, dtype=torch.int8)
    write_kv(key, key, cache, cache.clone(), torch.zeros(sequences, dtype=torch.int64), k_scale=0.5 + pages, v_scale=1.0)


def merge(sequences: int, columns: int, pages: int) -> None:
    """One merge of as many tokens; `columns` and `pages` stand for nothing."""
    from hal.backends.triton_ops import merge_states

    out, lse = torch.zeros(sequences, 8, 64), torch.zeros(sequences, 8)
    merge_states(out, lse, out.clone(), lse.clone())


def experts(tokens: int, seed: int) -> None:
    """Routing, the fused op and its stages: 24 experts of 64 x 32, 3 of them for each token, with ids, factors and limits of `seed`."""
    from hal.backends import triton_moe as moe

    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.zeros(2, tokens, 64, dtype=torch.bfloat16)
    up, down = torch.zeros(24, 64, 64, dtype=torch.bfloat16), torch.zeros(24, 64, 32, dtype=torch.bfloat16)
    logits = torch.randn(tokens, 24, generator=generator)
    weights, ids = moe.topk_softmax(logits, 3, renormalize=True)
    moe.route(logits, 3, scoring="sigmoid", correction_bias=torch.zeros(24), scale=1.5 + seed)
    ids.copy_(torch.randint(24, (tokens, 3), generator=generator))
    moe.fused_moe(x, up, down, weights, ids)
    oai: dict[str, Any] = {"activation": "swiglu_oai", "alpha": 1.0 + seed, "limit": 7.0 + seed}
    moe.fused_moe(x, up, down, weights, ids, **oai, num_valid_tokens=torch.zeros((), dtype=torch.int32))
    index = moe.moe_index(ids, 24)
    rows = moe.moe_expand(x, index)
    for scales in ((torch.ones(24, 64), torch.ones(24, 64)), (torch.ones(24, 1, 1), torch.ones(24, 1, 1))):
        moe.fused_moe(x, up.to(torch.int8), down.to(torch.int8), weights, ids, w_scales=scales)
        moe.group_gemm(rows, up.to(torch.int8), index.expert_sizes, w_scales=scales[0])
    rows = moe.group_gemm(moe.silu_and_mul(moe.group_gemm(rows, up, index.expert_sizes), limit=1.0 + seed), down, index.expert_sizes)
    moe.moe_combine(rows, weights, index, residual=residual, scale=0.5 + seed)


def serve(tokens: tuple[int, ...], seed: int) -> None:
    """`experts` with each number of tokens."""
    for count in tokens:
        experts(count, seed)


def variants() -> dict[str, int]:
    """Compiled variants of each kernel so far."""
    from triton.runtime.jit import JITFunction

    from hal.backends import triton_moe, triton_ops  # noqa: F401

    found: dict[str, int] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("hal.kernels.")]:
        for name, kernel in vars(module).items():
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                found[name] = len(kernel.device_caches[0][0])
    return found


TREE = torch.ones(33 * 2, 2, dtype=torch.bool)
#: case -> calls of one set of facts, on any GPU.
CASES: dict[str, list[Callable[[], None]]] = {
    "plain": [partial(sweep, decode)],
    "windows": [partial(sweep, decode, window=w, scale=w / 7) for w in (1, 16, 100)],
    "variable": [partial(sweep, decode, cu_seqlens_q=True, padding=rows) for rows in (3, 0)],
    "block": [partial(sweep, decode, q_len=3)],
    "planned": [partial(sweep, planned, q_len=2, window=w) for w in (1, 16, 100)],
    "tree": [partial(decode, n, 9 + n, 5, q_len=2, tree_mask=TREE[: 2 * n], alibi_slopes=torch.zeros(8)) for n in (1, 8, 33)],
    "invariant": [partial(sweep, decode, batch_invariant=True), partial(decode, 4, 64, 9, q_len=4, batch_invariant=True)],
    "short": [partial(decode, 2, 3, 5)],
    "short-variable": [partial(decode, 2, 3, 5, cu_seqlens_q=True)],
}
#: The same for the other ops.
OTHERS: dict[str, list[Callable[[], None]]] = {
    "write": [partial(sweep, write)],
    "write-many": [partial(write, rows, 0, pages) for rows, pages in ((513, 1), (1024, 16), (4097, 300))],
    "merge": [partial(sweep, merge)],
}
#: Numbers of tokens in every class that configs may tell apart, odd ones; then others in the same classes, multiples of 16 among them.
WARM, OTHER = (1, 3, 5, 9, 17, 33, 61, 65, 129, 257, 515, 1031, 2051), (2, 4, 8, 16, 31, 32, 48, 64, 80, 128, 250, 256, 512, 600, 1024, 1500, 2048)
#: Experts: a warm-up, and the calls after it.
EXPERTS: dict[str, list[Callable[[], None]]] = {
    "experts": [partial(serve, WARM, 0)],
    "experts-again": [partial(serve, OTHER, 1), partial(serve, WARM, 2)],
}


def count(cases: dict[str, list[Callable[[], None]]], prefix: str = "") -> dict[str, dict[str, int]]:
    """Variants that each case adds to those before it."""
    found, before = {}, variants()
    for name, calls in cases.items():
        for call in calls:
            call()
        after = variants()
        found[prefix + name] = {kernel: after[kernel] - before[kernel] for kernel in after if after[kernel] != before[kernel]}
        before = after
    return found


def main() -> None:
    """Sweep the cases."""
    with compile_only():
        found = count(CASES | OTHERS | EXPERTS)
        with hopper():
            found |= count(CASES | EXPERTS, "hopper-")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
