"""One long context over several GPUs: each rank attends to its own keys, `merge_states` joins the parts.

    torchrun --nproc-per-node 2 tests/examples/context_parallel.py --keys 131072
    torchrun --nproc-per-node 3 tests/examples/context_parallel.py --device cpu --keys 4000 --keys 0 1 40 333 --json

Each `--keys` is a batch: the number of keys of each of its sequences. Every batch is compared with float64, without and
with sinks, and on CUDA timed against one rank that holds all keys. The exit code is 1 if a result is wrong.
Any number of ranks; NCCL on CUDA, gloo on the CPU. docs/context_parallel.md explains why it works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hal
from hal.conformance.compare import LSE, OUTPUT, Tolerance, close

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
State = tuple[Tensor, Tensor]  # out (T, H, Dv), lse (T, H)
#: torch 2.13 renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# The example: who holds which key, what a rank keeps, and one attention call.


def place(length: int, sequence: int, rank: int, world: int, page_size: int) -> Tensor:
    """Index of each key of a sequence among those that `rank` holds of it, -1 for a key of another rank: (length,) int64."""
    # Pages are dealt round robin, as engines do: a sequence that grows stays balanced and no key ever moves. Each sequence
    # starts at another rank, or rank 0 would hold all the short ones. To a rank its keys look consecutive. That is right
    # because the one query row of a sequence sees every key, and softmax does not ask for their order; it is wrong with a
    # window, ALiBi, a tree mask or several query rows, where positions count.
    key = torch.arange(length)
    page, offset = key // page_size, key % page_size
    return torch.where((sequence + page) % world == rank, page // world * page_size + offset, -1)


@dataclass(frozen=True)
class Shard:
    """What one rank holds: pages, how many keys of each sequence (B,), their table (B, max_pages), a plan for all layers."""

    k_cache: Tensor
    v_cache: Tensor
    kv_layout: str
    seq_lens: Tensor
    block_tables: Tensor
    plan: hal.DecodePlan


@dataclass(frozen=True)
class Parts:
    """The states of all ranks in fp32, out and lse of a rank in one row of the buffer: one collective exchanges them."""

    buffer: Tensor  # (ranks, T * H * (Dv + 1))
    shape: tuple[int, int, int]  # (T, H, Dv)

    def of(self, rank: int) -> State:
        """The state of one rank, as views."""
        tokens, heads, dim = self.shape
        out, lse = self.buffer[rank].split([tokens * heads * dim, tokens * heads])
        return out.view(self.shape), lse.view(tokens, heads)


def decode(backend: hal.Backend, q: Tensor, shard: Shard, parts: Parts, sinks: Tensor | None = None) -> State:
    """Attention of q (T, H, D), the same on all ranks, over the keys of all ranks -> out (T, H, Dv) fp32, lse (T, H)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    attend(backend, q, shard, *parts.of(rank))
    all_gather(parts.buffer.flatten(), parts.buffer[rank])  # in place: a contiguous buffer flattens to a view
    return merge(backend, [parts.of(r) for r in range(world)], sinks)


def attend(backend: hal.Backend, q: Tensor, shard: Shard, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
    """Attention over the keys of one shard. Where it has none of a sequence: exactly (0, -inf), which merges to nothing."""
    caches = (shard.k_cache, shard.v_cache, shard.seq_lens, shard.block_tables)
    backend.flash_decode(q, *caches, kv_layout=shard.kv_layout, sinks=sinks, out=out, lse=lse, plan=shard.plan)


def merge(backend: hal.Backend, states: list[State], sinks: Tensor | None = None) -> State:
    """Merge in the order given, which is the same everywhere: all ranks get the same bits."""
    (out, lse), *others = states
    others = others or [(out, torch.full_like(lse, -math.inf))]  # a rank alone merges with nothing, for its sinks
    for i, (other_out, other_lse) in enumerate(others, 1):
        last = i == len(others)  # a sink counts once
        out, lse = backend.merge_states(out, lse, other_out, other_lse, sinks=sinks if last else None)
    return out, lse


# Data: made on rank 0, written by each rank into its own pages.


@dataclass(frozen=True)
class Batch:
    """What a model would compute: q (B, H, D), and of each sequence keys and values (S, Hkv, D). The same on all ranks."""

    q: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def random_batch(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Draw on rank 0 and send to all."""

    def draw(*shape: int) -> Tensor:
        tensor = torch.randn(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, 0)
        return tensor

    # Scores of deviation 3: a few keys carry most of the weight, so the parts weigh differently and a wrong merge shows.
    q = draw(len(lengths), heads, dim) * 3
    return Batch(q, *(draw(sum(lengths), kv_heads, dim).split(lengths) for _ in range(2)))


def fill(backend: hal.Backend, batch: Batch, rank: int, world: int) -> Shard:
    """Allocate the pages of one rank of `world` and write its share; every other slot, and one page more, stays NaN."""
    (_, heads, dim), device, kv_heads = batch.q.shape, batch.q.device, batch.keys[0].shape[1]
    spec = backend.kv_cache_spec(kv_heads, dim, batch.q.dtype, device=device)
    size = spec.page_size
    places = [place(len(keys), b, rank, world, size) for b, keys in enumerate(batch.keys)]
    counts = [int((p >= 0).sum()) for p in places]
    pages = [-(-n // size) for n in counts]
    tables = torch.full((len(pages), max(1, *pages)), -1)
    for row, ids in zip(tables, torch.randperm(sum(pages) + 1)[1:].split(pages), strict=True):
        row[: len(ids)] = ids
    slots = [torch.where(p >= 0, row[p.clamp(min=0) // size] * size + p % size, -1).to(device) for p, row in zip(places, tables, strict=True)]

    k_cache, v_cache = (cache.fill_(math.nan) for cache in spec.allocate(sum(pages) + 1, device))
    for keys, values, slot in zip(batch.keys, batch.values, slots, strict=True):  # the prompts
        backend.write_kv(keys[:-1], values[:-1], k_cache, v_cache, slot[:-1], kv_layout=spec.layout)
    # The new token of each sequence, in one call that is the same on all ranks but for the slots: only its owner has one.
    new_keys, new_values, new_slots = (torch.cat([rows[-1:] for rows in tensors]) for tensors in (batch.keys, batch.values, slots))
    backend.write_kv(new_keys, new_values, k_cache, v_cache, new_slots, kv_layout=spec.layout)

    seq_lens, most = torch.tensor(counts, dtype=torch.int32, device=device), tables.shape[1] * size
    plan = backend.plan_decode(seq_lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, page_size=size, max_seq_len=most)
    return Shard(k_cache, v_cache, spec.layout, seq_lens, tables.to(device, torch.int32), plan)


# The judge: float64.


def exact(batch: Batch) -> State:
    """Attention in float64 over all keys, without sinks; a sequence without keys gives 0 and -inf."""
    group = batch.q.shape[1] // batch.keys[0].shape[1]
    out = torch.zeros(batch.q.shape, dtype=torch.float64, device=batch.q.device)
    lse = torch.full(batch.q.shape[:2], -math.inf, dtype=torch.float64, device=batch.q.device)
    for b, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        for h in range(keys.shape[1] if len(keys) else 0):  # one kv head at a time: float64 copies of long contexts are large
            rows = slice(h * group, (h + 1) * group)
            scores = batch.q[b, rows].double() @ keys[:, h].double().T * batch.q.shape[2] ** -0.5
            lse[b, rows] = scores.logsumexp(dim=1)
            out[b, rows] = scores.softmax(dim=1) @ values[:, h].double()
    return out, lse


def exact_merge(states: list[State]) -> State:
    """Merge states in float64."""
    outs, lses = (torch.stack([state[i].double() for state in states]) for i in range(2))
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse).exp().nan_to_num(0.0)  # -inf - -inf: no rank has a key
    return (weights[..., None] * outs).sum(dim=0), lse


def with_sinks(state: State, sinks: Tensor | None) -> State:
    """Let exp(sink) join the denominators in float64; empty rows stay 0 and -inf."""
    out, lse = state
    if sinks is None:
        return state
    total = torch.logaddexp(lse, sinks.double())
    return out * (lse - total).exp()[..., None], total.masked_fill(lse == -math.inf, -math.inf)


class Check:
    """The worst error under each name, as a fraction of the largest magnitude, and what was wrong."""

    def __init__(self) -> None:
        self.errors: dict[str, float] = {}
        self.problems: list[str] = []

    def state(self, name: str, got: State, expected: State, dtype: torch.dtype) -> None:
        """Compare outputs and LSE, with the tolerances of the conformance suite for `dtype`."""
        self.tensor(name, got[0], expected[0], OUTPUT[dtype])
        self.tensor(f"{name}, lse", got[1], expected[1], LSE[dtype], least=1.0)

    def that(self, problem: str, holds: bool) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(problem)

    def tensor(self, name: str, got: Tensor, expected: Tensor, tolerance: Tolerance, least: float = 0.0) -> None:
        """Compare one tensor; errors are relative to at least `least`."""
        try:
            self.errors[name] = max(self.errors.get(name, 0.0), close(name, got, expected, tolerance, least))
        except AssertionError as error:
            self.problems.append(str(error))


def check(backend: hal.Backend, batch: Batch, mine: Shard, whole: Shard, parts: Parts) -> Check:
    """Compare the split decode with float64, beside the unsplit one; without and with sinks."""
    found, rank, world, dtype = Check(), dist.get_rank(), dist.get_world_size(), batch.q.dtype
    expected = exact(batch)
    # Sinks about as heavy as all keys together, whatever the length.
    sinks = expected[1].amax(dim=0).clamp(min=0.0).float() + torch.linspace(-1, 1, batch.q.shape[1], device=batch.q.device)
    for sink in (None, sinks):
        right = with_sinks(expected, sink)
        unsplit = torch.empty_like(parts.of(0)[0]), torch.empty_like(parts.of(0)[1])
        attend(backend, batch.q, whole, *unsplit, sinks=sink)
        found.state("unsplit", unsplit, right, dtype)

        def split(sink: Tensor | None = sink) -> State:
            return decode(backend, batch.q, mine, parts, sink)

        parts.buffer.fill_(math.nan)
        got = split()
        found.state("split", got, right, dtype)
        states = [parts.of(r) for r in range(world)]
        own_out, own_lse = (part[mine.seq_lens == 0] for part in states[rank])
        found.that("a sequence without keys here is not (0, -inf)", bool((own_out == 0).all() and (own_lse == -math.inf).all()))
        # The merge alone loses nothing: float64 on the same parts says the same. Parts rounded to q's dtype would lose.
        found.state("merge", got, with_sinks(exact_merge(states), sink), torch.float32)
        rounded, _ = merge(backend, [(out.to(dtype).float(), lse) for out, lse in states], sink)
        found.tensor(f"split, parts rounded to {str(dtype).removeprefix('torch.')}", rounded, right[0], OUTPUT[dtype])

        everyone = torch.empty(world, got[0].numel(), device=got[0].device)
        all_gather(everyone.flatten(), got[0].flatten())
        found.that("the ranks hold different results", all(torch.equal(bits, got[0].flatten()) for bits in everyone))

        if batch.q.is_cuda:
            graph, replayed = capture(split, 1)
            parts.buffer.fill_(math.nan)
            graph.replay()
            found.state("split, from a CUDA graph", replayed, right, dtype)
            graph.reset()  # a communicator waits for the graphs that use it
    return found


# Time, on CUDA.


def capture(run: Callable[[], Any], calls: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `calls` calls of `run`, and the result of the last."""
    run()  # compiles: a first call cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog thread may ask about events meanwhile
        results = [run() for _ in range(calls)]
    return graph, results[-1]


def median_us(run: Callable[[], Any], repeats: int) -> float:
    """Median over 7 rounds of the microseconds of one of `repeats` runs in a row."""
    rounds = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(rounds[1:])


def times(backend: hal.Backend, batch: Batch, mine: Shard, whole: Shard, parts: Parts, calls: int = 20) -> dict[str, dict[str, float]]:
    """Microseconds of one call on this rank, eager and in a CUDA graph, for all keys on one rank and for the split decode."""
    own = parts.of(dist.get_rank())
    runs: dict[str, Callable[[], Any]] = {
        "unsplit": lambda: attend(backend, batch.q, whole, *own),
        "split": lambda: decode(backend, batch.q, mine, parts),
        "split, own keys only": lambda: attend(backend, batch.q, mine, *own),
    }
    measured = {}
    for name, run in runs.items():
        graph, _ = capture(run, calls)
        measured[name] = {"eager": median_us(run, calls), "graph": median_us(graph.replay, 1) / calls}
        graph.reset()  # as above
    return measured


# The program.


def number(text: str) -> int:
    """An int32 of at least 0, for argparse."""
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer in 0..{2**31 - 1}")
    return int(text)


def options() -> argparse.Namespace:
    """Parse the command line; a wrong one is an error message and exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog="Start it with torchrun --nproc-per-node N.")
    parser.add_argument("--keys", type=number, nargs="+", action="append", metavar="N", help="a batch: keys of each sequence; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    for name, default in (("--heads", 32), ("--kv-heads", 8), ("--head-dim", 128), ("--seed", 0)):
        parser.add_argument(name, type=number, default=default, help=f"default {default}")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
    given = parser.parse_args()
    given.keys = given.keys or [[131072]]
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("LOCAL_WORLD_SIZE is not set: start it with torchrun --nproc-per-node 2 tests/examples/context_parallel.py")
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if given.device == "cuda" and ranks > gpus:
        parser.error(f"--device cuda: {ranks} ranks on this machine but {gpus} GPUs; start one rank for each GPU, or use --device cpu")
    return given


def run_batch(backend: hal.Backend, given: argparse.Namespace, lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Check and time one batch; the report of all ranks, where lists are by rank and errors the largest."""
    world = dist.get_world_size()
    batch = random_batch(lengths, given.heads, given.kv_heads, given.head_dim, DTYPES[given.dtype], device)
    mine, whole = fill(backend, batch, dist.get_rank(), world), fill(backend, batch, 0, 1)
    tokens, heads, dim = batch.q.shape
    parts = Parts(torch.empty(world, tokens * heads * (dim + 1), device=device), (tokens, heads, dim))
    found = check(backend, batch, mine, whole, parts)
    measured = times(backend, batch, mine, whole, parts) if device.type == "cuda" else {}
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, (mine.seq_lens.tolist(), found.errors, found.problems, measured))
    held, errors, problems, us = zip(*ranks, strict=True)
    return {
        "keys": lengths,
        "held": held,
        "errors": {name: max(e.get(name, 0.0) for e in errors) for name in found.errors},
        "problems": [f"rank {r}: {text}" for r, texts in enumerate(problems) for text in texts],
        "us": {name: {how: [u[name][how] for u in us] for how in hows} for name, hows in measured.items()},
    }


def text(report: dict[str, Any]) -> str:
    """The report of a batch for people."""
    lines = [f"keys {report['keys']}, held by the ranks: {', '.join(map(str, report['held']))}"]
    lines += [f"  error         {name:<42} {error:.1e}" for name, error in report["errors"].items()]
    for name, hows in report["us"].items():
        lines += [f"  us by rank    {name + ', ' + how:<32}" + "".join(f"{us:10.1f}" for us in by_rank) for how, by_rank in hows.items()]
    return "\n".join(lines + [f"  WRONG         {problem}" for problem in report["problems"]])


def main() -> int:
    """Run all batches; the exit code says whether every result was right on every rank."""
    given = options()
    device = torch.device("cpu") if given.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    transport: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        transport = {"backend": "nccl", "device_id": device}
    dist.init_process_group(timeout=timedelta(seconds=120), **transport)
    torch.manual_seed(given.seed)
    reports = []
    try:
        backend = hal.get_backend()
        facts = {
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "backend": backend.explain("flash_decode", device=device).chosen,
            "torch": torch.__version__,
            **{name: vars(given)[name] for name in ("dtype", "heads", "kv_heads", "head_dim")},
        }
        say = print if dist.get_rank() == 0 and not given.json else lambda *_, **__: None
        say(", ".join(f"{name} {value}" for name, value in facts.items()))
        for lengths in given.keys:
            reports.append(run_batch(backend, given, lengths, device))
            say(text(reports[-1]), flush=True)
    except hal.HalError as error:
        print(f"context_parallel.py: rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    if dist.get_rank() == 0 and given.json:
        print(json.dumps(facts | {"batches": reports}))
    dist.destroy_process_group()
    return int(any(report["problems"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
