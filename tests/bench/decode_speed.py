"""Time of one `flash_decode` call on a GPU, and the rate at which it reads keys and values.

    python tests/bench/decode_speed.py [--json FILE] [--backend NAME]

Calls are captured in one CUDA graph that rotates over enough distinct caches to exceed the L2 cache several times; the
graph is replayed 7 times and the median taken. Random data, shuffled page tables, bf16. The plan is made once, as for
all layers of a step; `no plan` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import hal

#: name, sequence lengths, query heads, kv heads, head dim, page size, query tokens
CASES: tuple[tuple[str, list[int], int, int, int, int, int], ...] = (
    ("llama8b B1 1k", [1024], 32, 8, 128, 16, 1),
    ("llama8b B1 8k", [8192], 32, 8, 128, 16, 1),
    ("llama8b B1 128k", [131072], 32, 8, 128, 16, 1),
    ("llama8b B8 8k", [8192] * 8, 32, 8, 128, 16, 1),
    ("llama8b B64 1k", [1024] * 64, 32, 8, 128, 16, 1),
    ("llama8b B64 8k", [8192] * 64, 32, 8, 128, 16, 1),
    ("llama8b ragged B64 64..16k", [64 + i * 16320 // 63 for i in range(64)], 32, 8, 128, 16, 1),
    ("llama8b one 64k + 63 x 512", [65536] + [512] * 63, 32, 8, 128, 16, 1),
    ("llama70b/tp8 B64 8k", [8192] * 64, 8, 1, 128, 16, 1),
    ("llama70b/tp8 B1 32k", [32768], 8, 1, 128, 16, 1),
    ("mha llama2-7b B16 4k", [4096] * 16, 32, 32, 128, 16, 1),
    ("qwen3.5 16/2 D256 B16 16k", [16384] * 16, 16, 2, 256, 16, 1),
    ("smollm 9/3 D64 B8 2k", [2048] * 8, 9, 3, 64, 16, 1),
    ("llama8b B8 8k q_len 8", [8192] * 8, 32, 8, 128, 16, 8),
)
_ROTATED_BYTES = 400 << 20


def replayed(run: Any, repeats: int) -> float:
    """Median seconds of one call of `run`, captured `repeats` times in a graph that is replayed 7 times."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    seconds = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(seconds[1:])


def measure(
    backend: hal.Backend, device: torch.device, lengths: list[int], heads: int, kv_heads: int, dim: int, page: int, q_len: int
) -> dict[str, float]:
    """Seconds of one case with and without a plan, and its KV bytes."""
    counts = [-(-s // page) for s in lengths]
    pages, width = sum(counts), max(counts)
    kv_bytes = sum(lengths) * kv_heads * dim * 4
    sets = max(1, min(64, -(-_ROTATED_BYTES // kv_bytes)))
    caches = [torch.randn(2, pages, page, kv_heads, dim, device=device, dtype=torch.bfloat16) for _ in range(sets)]
    order = torch.randperm(pages, dtype=torch.int32).split(counts)
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, ids in enumerate(order):
        tables[row, : len(ids)] = ids
    tables, lens = tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(len(lengths) * q_len, heads, dim, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    plan = backend.plan_decode(lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, page_size=page, max_seq_len=width * page, q_len=q_len)

    def run(given: Any) -> None:
        for k, v in caches:
            backend.flash_decode(q, k, v, lens, tables, q_len=q_len, out=out, plan=given)

    repeats = max(1, 16 // sets)
    return {
        "kv_bytes": float(kv_bytes),
        "plan_us": replayed(lambda: run(plan), repeats) / sets * 1e6,
        "no_plan_us": replayed(lambda: run(None), repeats) / sets * 1e6,
    }


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backend", default="triton")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode_speed: needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    backend = hal.get_backend(options.backend)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, backend {backend.name}")
    print("| case | KV MB | with a plan us | GB/s | no plan us |\n|---|---|---|---|---|")
    rows = []
    for name, lengths, heads, kv_heads, dim, page, q_len in CASES:
        row = measure(backend, device, lengths, heads, kv_heads, dim, page, q_len)
        rows.append({"case": name, **row})
        rate = row["kv_bytes"] / row["plan_us"] / 1e3
        print(f"| {name} | {row['kv_bytes'] / 1e6:.0f} | {row['plan_us']:.1f} | {rate:.0f} | {row['no_plan_us']:.1f} |", flush=True)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
