"""A few calls at the edges of memory, each compared with float64, to be run under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python tests/kernels/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 9 python tests/kernels/sanitize.py

Without the cache of PyTorch's allocator every tensor is an allocation of its own, so that one element read past its end
is seen. Names of cases as arguments choose among them. Runs on the CPU too, under TRITON_INTERPRET=1: that checks the
results only.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.kernels.moe_naive import GARBAGE, act, assert_close, make_experts, n_inner, split_gate_up
from tests.kernels.moe_naive import check as check_experts
from tests.kernels.moe_naive_quantised import make as make_quantised
from tests.kernels.naive import NAN, Problem, assert_matches, expected, make_problem
from tests.kernels.naive_route import assert_routes

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TREE = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)

#: Lengths around pages and tiles, empty ones among them; the last row of the table is the longest and fills it.
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 300]


def attend(problem: Problem, dtype: torch.dtype, planned: bool = True) -> None:
    """One call without and, if blocks are uniform, one with a plan."""
    from hal.backends.triton_ops import flash_decode, plan_decode

    a, wanted = problem.args, expected(problem)
    assert_matches(flash_decode(**a), wanted, dtype)
    if not planned:
        return
    k, v = a["k_cache"], a["v_cache"]
    plan = plan_decode(
        a["seq_lens"],
        num_heads=a["q"].shape[1],
        num_kv_heads=k.shape[2],
        head_dim=k.shape[3],
        head_dim_v=v.shape[3],
        page_size=k.shape[1],
        max_seq_len=k.shape[1] * a["block_tables"].shape[1],
        q_len=a["q_len"],
        window=a["window"],
        kv_dtype=k.dtype,
        batch_invariant=a.get("batch_invariant", False),
    )
    assert_matches(flash_decode(**a, plan=plan), wanted, dtype)


def decode(device: torch.device, *, dtype: torch.dtype = BF16, planned: bool = True, spare_columns: int = 0, **options: Any) -> None:
    """Unreferenced slots hold NaN, unreferenced table entries -1 or huge ids; with no spare column the table is tight."""
    problem = make_problem(device, dtype=dtype, spare_columns=spare_columns, **options)
    if device.type == "cpu" and options.get("kv_dtype") == E4M3:  # the interpreter reads fp8 NaN as a number
        for name in ("k_cache", "v_cache"):
            problem.args[name] = problem.args[name].float().nan_to_num(0.0).to(E4M3)
    attend(problem, dtype, planned)


def mla(device: torch.device) -> None:
    """Values inside the keys: the last row of V ends 64 elements before the cache does."""
    problem = make_problem(device, lengths=[0, 40, 150], dims=(576, 512), heads=(16, 1), dtype=BF16, spare_columns=0)
    problem.args["v_cache"] = problem.args["k_cache"][..., :512]
    problem.values = [k[..., :512] for k in problem.keys]
    attend(problem, BF16)


def write(device: torch.device, layout: str, kv: torch.dtype | None) -> None:
    """The first and the last slot, skipped ones on either side, fewer slots than rows, and per-token scales for int8."""
    from hal.backends.triton_ops import write_kv

    pages, size, heads, dim = 3, 5, 3, 40
    shape = (pages, size, heads, dim) if layout == "NHD" else (pages, heads, size, dim)
    key, value = (torch.randn(6, heads, dim, generator=torch.Generator().manual_seed(i)).to(BF16).to(device) for i in range(2))
    k, v = (torch.zeros(shape, dtype=kv or BF16, device=device) for _ in range(2))
    scales = [torch.zeros(shape[:-1], device=device) if kv == torch.int8 else None for _ in range(2)]
    slots = [0, pages * size - 1, -1, pages * size, 2**31]
    write_kv(key, value, k, v, torch.tensor(slots, device=device), kv_layout=layout, k_scale=scales[0], v_scale=scales[1])
    for new, cache, scale in zip((key, value), (k, v), scales, strict=True):
        rows = (cache if layout == "NHD" else cache.transpose(1, 2)).float().reshape(pages * size, heads, dim)
        if scale is not None:
            rows = rows * (scale if layout == "NHD" else scale.transpose(1, 2)).reshape(pages * size, heads, 1)
        error = (rows[[0, -1]] - new[:2].float()).abs().max()
        limit = float(new[:2].abs().max()) / 127 if scale is not None else 0.0
        assert float(error) <= limit, f"error {float(error):.2e}, accepted {limit:.2e}"
        assert not rows[1:-1].any(), "another slot was written to"


def write_shared(device: torch.device) -> None:
    """More rows than each program looks through, six of them for few slots, and slots outside on either side."""
    from hal.backends.triton_ops import write_kv

    pages, size, heads, dim = 3, 5, 3, 40
    slots = torch.full((600,), -1, dtype=torch.int64)
    slots[[0, 5, 300, 598]], slots[[7, 599]], slots[[1, 597]] = 14, 0, torch.tensor([15, 2**32])
    new = torch.arange(1.0, 601.0).view(-1, 1, 1).expand(-1, heads, dim).contiguous().to(device)
    k, v = (torch.zeros(pages, size, heads, dim, device=device) for _ in range(2))
    write_kv(new, new, k, v, slots.to(device))
    wanted = torch.zeros(pages * size)
    wanted[14], wanted[0] = 599.0, 600.0
    for cache in (k, v):
        assert torch.equal(cache.cpu().flatten(0, 1), wanted.view(-1, 1, 1).expand(-1, heads, dim)), "not the last row of each slot"


def merge(device: torch.device) -> None:
    """Both parts, one, and none empty; an empty part's output is NaN."""
    from hal.backends.triton_ops import merge_states

    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(2, 5, 3, 40, generator=g), torch.randn(2, 5, 3, generator=g) * 5
    for part, row in ((0, 1), (1, 2), (0, 3), (1, 3)):
        outs[part, row], lses[part, row] = NAN, -math.inf
    sinks = torch.randn(3, generator=g)
    merged, lse = merge_states(*(t.to(device) for t in (outs[0], lses[0], outs[1], lses[1])), sinks=sinks.to(device))
    full = lses.isfinite().any(0)
    total = torch.logaddexp(torch.logsumexp(lses.double(), 0), sinks.double()).masked_fill(~full, -math.inf)
    weights = torch.exp(lses.double() - total.masked_fill(~full, 0.0))
    wanted = (weights[..., None] * outs.double().nan_to_num(0.0)).sum(0)
    assert_matches((merged, lse), (wanted, total), F32)


def route(device: torch.device, experts: int, top_k: int, dtype: torch.dtype = BF16, **options: Any) -> None:
    """Rows that fill their memory, bad ones among them; the last row is the last program's."""
    from hal.backends.triton_moe import route

    logits = torch.randn(9, experts, generator=torch.Generator().manual_seed(0))
    logits[3], logits[8] = NAN, math.inf
    logits = logits.to(dtype).to(device)
    assert_routes(route(logits, top_k, **options), logits, top_k, **options)


def experts(device: torch.device, *, dtype: torch.dtype = BF16, **options: Any) -> None:
    """Sizes that no tile divides, weights and lists that end with their memory, ids that point far outside."""
    top_k, tokens = options.setdefault("top_k", 3), options["tokens"]
    problem = make_experts(device, **{"experts": 7, "hidden": 100, "inner": 72} | options, dtype=dtype)
    flat = problem.ids.view(-1)
    flat[::5] = torch.tensor((*GARBAGE, 7), dtype=torch.int32, device=device).repeat(tokens * top_k)[: flat[::5].numel()]
    flat[-1] = 6  # the last expert, for the last token
    check_experts(problem)


def quantised_experts(device: torch.device, dtype: torch.dtype, kind: str, **options: Any) -> None:
    """Codes, scales and blocks that end with their memory; the last expert, for the last token."""
    problem = make_quantised(device, dtype, kind, **{"experts": 7, "hidden": 200, "inner": 136} | options)
    if dtype == E4M3 and device.type == "cpu":
        problem.run()  # the interpreter rounds to e4m3 wrongly
    else:
        problem.check()


def stages(device: torch.device, tokens: int) -> None:
    """The ops of the pipeline one by one, each in allocations of its own; two rows have no expert."""
    from hal.backends import triton_moe as moe

    generator = torch.Generator().manual_seed(tokens)
    count, top_k, hidden, inner = 5, 3, 40, 24
    x, up, down = (torch.randn(*s, generator=generator) for s in ((tokens, hidden), (count, 2 * inner, hidden), (count, hidden, inner)))
    weights = torch.rand(tokens, top_k, generator=generator)
    ids = torch.randint(count, (tokens, top_k), generator=generator, dtype=torch.int32)
    ids[0], ids[1] = -1, count
    index = moe.moe_index(ids.to(device), count)
    rows = moe.moe_expand(x.to(device), index)
    codes = moe.moe_expand((x * 20).to(torch.int8).to(device), index)
    hidden_rows = moe.silu_and_mul(moe.group_gemm(rows, n_inner(up).to(device), index.expert_sizes))
    out = moe.moe_combine(
        moe.group_gemm(hidden_rows, down.to(device), index.expert_sizes), weights.to(device), index, residual=x.to(device), scale=0.5
    )
    used = int(index.expert_sizes.sum())
    source = index.dst_to_src[:used].cpu().long() // top_k
    assert torch.equal(codes[:used].cpu(), (x * 20).to(torch.int8)[source]), "rows of int8 are not those of their tokens"
    wanted = x.double()
    for t in range(tokens):
        for j, e in enumerate(ids[t].tolist()):
            if 0 <= e < count:
                gate, up_ = split_gate_up(up[e].double() @ x[t].double(), "concat")
                wanted[t] += 0.5 * weights[t, j].double() * (down[e].double() @ act("silu", gate, up_))
    assert_close(out, wanted, F32)


def sizes_beyond_rows(device: torch.device) -> None:
    """Sizes below 0, whose sum overflows int32, and rows beyond the tensor."""
    from hal.backends.triton_moe import group_gemm

    x, weight = torch.randn(12, 40), torch.randn(4, 24, 40)
    sizes = torch.tensor([5, -(2**31), 2**31 - 1, 2**31 - 1], dtype=torch.int32)
    out = group_gemm(x.to(device), weight.to(device), sizes.to(device))
    assert_close(out, torch.cat([x[:5].double() @ weight[0].double().T, x[5:].double() @ weight[2].double().T]), F32)


Case = Callable[[torch.device], None]
CASES: dict[str, Case] = {
    "edges": partial(decode, lengths=EDGES),
    "edges-fp32": partial(decode, lengths=EDGES, dtype=F32),
    "tight-table-of-64": partial(decode, lengths=[0, 257], page_size=64),
    "tight-table-of-3": partial(decode, lengths=[5, 200], page_size=3, dims=(80, 96)),
    "poisoned-ids": partial(decode, lengths=[300, 0, 40], spare_columns=7),
    "block-of-3": partial(decode, lengths=[2, 0, 5, 260], q_len=3),
    "varlen": partial(decode, lengths=[300, 3, 0, 50], blocks=[1, 5, 2, 0], padding=3, planned=False),
    "window": partial(decode, lengths=[0, 10, 333], window=100, q_len=2),
    "fp8": partial(decode, lengths=[0, 33, 300], kv_dtype=E4M3, scales=("scalar", "head"), dtype=F16, page_size=64),
    "int8-per-token": partial(decode, lengths=[0, 33, 300], kv_dtype=torch.int8, scales=("token", "token")),
    "split-layout": partial(decode, lengths=[19, 300], layout="SPLIT_V0", planned=False),
    "mla": mla,
    "batch-invariant": partial(decode, lengths=[0, 40, 530], batch_invariant=True, q_len=2),
    "tree": partial(decode, lengths=[3, 0, 300], q_len=5, tree_mask=TREE.repeat(3, 1), window=40, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.01])),
    "many-sequences": partial(decode, lengths=[i * 7 % 23 for i in range(40)], heads=(2, 1), dims=(16, 16)),
    "write": partial(write, layout="NHD", kv=None),
    "write-int8": partial(write, layout="HND", kv=torch.int8),
    "write-shared-slots": write_shared,
    "merge": merge,
    "route": partial(route, experts=60, top_k=6),
    "route-few-experts": partial(route, experts=7, top_k=7, dtype=F32),
    "route-many-experts": partial(route, experts=1100, top_k=3, dtype=F16),
    "route-groups": partial(route, experts=24, top_k=4, scoring="sigmoid", num_groups=4, top_groups=2, renormalize=True),
    "experts-one-token": partial(experts, tokens=1, top_k=2),
    "experts-one-token-n-inner": partial(experts, tokens=1, top_k=2, transposed=True, dtype=F32),
    "experts": partial(experts, tokens=40),
    "experts-biased": partial(experts, tokens=20, biased=True, dtype=F16),
    "experts-n-inner": partial(experts, tokens=40, transposed=True, gate_up="interleaved", activation="swiglu_oai", limit=7.0),
    "experts-aligned": partial(experts, tokens=40, hidden=136, inner=72),
    "experts-many-rows": partial(experts, tokens=300, hidden=64, inner=40),
    "experts-padding": partial(experts, tokens=20, num_valid_tokens=torch.tensor(20, dtype=torch.int32), biased=True),
    "experts-int8-one-token": partial(quantised_experts, dtype=torch.int8, kind="channel", ids=[[0, 6]], tokens=1),
    "experts-int8": partial(quantised_experts, dtype=torch.int8, kind="channel", tokens=40, biased=True),
    "experts-e4m3-blocks-one-token": partial(quantised_experts, dtype=E4M3, kind="block", ids=[[6, 0]], tokens=1, given=True),
    "experts-e4m3-blocks": partial(quantised_experts, dtype=E4M3, kind="block", tokens=40, gate_up="interleaved"),
    "expert-stages": partial(stages, tokens=20),
    "expert-stages-many-slots": partial(stages, tokens=1400),
    "group-gemm-sizes": sizes_beyond_rows,
}


def where() -> torch.device:
    """The GPU, or the CPU under the interpreter; ends with a message if there is neither."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("sanitize.py: this machine has no GPU; set TRITON_INTERPRET=1 to check the results alone")
    return torch.device("cuda", torch.cuda.current_device())


def main(names: list[str]) -> int:
    """Run the named cases, or all; return the number of those with a wrong result."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"sanitize.py: no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    device, wrong = where(), 0
    for name in names or CASES:
        try:
            CASES[name](device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except AssertionError as error:
            print(f"{name}: {error}", flush=True)
            wrong += 1
        else:
            print(f"{name}: right", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
