"""Run the launchers as a GPU process would, compiling for sm_90 but launching nothing, and count the compiled variants.

    python tests/kernels/count_variants.py

Prints a JSON object: case -> {kernel: variants that it adds}. Each case of decoding runs as on a GPU that gets the
portable kernel and as on Hopper. Needs no GPU; must not run under TRITON_INTERPRET.
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
    from hal.kernels import flash_decode

    pretended = {
        "is_hopper": lambda device: True,
        "supports_pdl": lambda device: True,
        "decode_programs": lambda device, config: 132 * config.residents,
    }
    own = {name: getattr(flash_decode, name) for name in pretended}
    vars(flash_decode).update(pretended)
    flash_decode._partition.cache_clear()
    try:
        yield
    finally:
        vars(flash_decode).update(own)
        flash_decode._partition.cache_clear()


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


def variants() -> dict[str, int]:
    """Compiled variants of each kernel so far."""
    from hal.kernels import decode_hopper, decode_kernel, decode_partition, decode_reduce, last_rows, merge_states, write_kv

    kernels = (
        decode_kernel.decode_kernel,
        decode_hopper.decode_hopper_kernel,
        decode_partition.plan_kernel,
        decode_reduce.reduce_kernel,
        decode_reduce.depth_kernel,
        merge_states.merge_kernel,
        write_kv.write_kernel,
        last_rows.last_row_kernel,
    )
    return {kernel.fn.__name__: len(kernel.device_caches[0][0]) for kernel in kernels}


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
        found = count(CASES | OTHERS)
        with hopper():
            found |= count(CASES, "hopper-")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
