"""Attention as the contract defines it: loops over rows and keys, float64, no kernel. And the data to try it on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NAN = float("nan")


@dataclass
class Problem:
    """Keyword arguments of one `flash_decode` call, and the dense keys and values behind its cache."""

    args: dict[str, Any]
    keys: list[Tensor]  # (S, Hkv, D) float64 each
    values: list[Tensor]
    blocks: list[tuple[int, int]]  # first row and number of rows of each sequence
    extra: dict[str, Any] = field(default_factory=dict)


def to_layout(dense_k: Tensor, dense_v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """NHD caches -> the same caches in another layout."""
    if layout == "NHD":
        return dense_k, dense_v
    k, v = dense_k.permute(0, 2, 1, 3).contiguous(), dense_v.permute(0, 2, 1, 3).contiguous()
    if layout == "HND":
        return k, v
    pages, heads, page_size, dim = k.shape
    x = min(8, 16 // k.element_size())
    k = k.view(pages, heads, page_size, dim // x, x).permute(0, 1, 3, 2, 4).contiguous()
    return k, v if layout == "HND_SPLIT" else v.transpose(2, 3).contiguous()


def fill(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that no result may depend on."""
    if dtype == torch.int8:
        return torch.full(shape, 127, dtype=dtype, device=device)
    return torch.full(shape, NAN, dtype=torch.float32, device=device).to(dtype)


def make_problem(
    device: torch.device,
    *,
    lengths: list[int],
    q_len: int = 1,
    blocks: list[int] | None = None,
    padding: int = 0,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    page_size: int = 16,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scales: tuple[str, str] = ("", ""),
    spare_columns: int = 2,
    window: int | None = None,
    seed: int = 0,
    **features: Any,
) -> Problem:
    """Random call with a shuffled page table; unused slots hold NaN, unused table entries -1 or huge ids."""
    g = torch.Generator().manual_seed(seed)
    (num_heads, kv_heads), (dim, dim_v) = heads, dims
    kv_dtype = kv_dtype or dtype
    counts = [q_len] * len(lengths) if blocks is None else blocks
    tokens = sum(counts) + padding
    used = [-(-n // page_size) for n in lengths]
    pages = sum(used) + 3
    ids = torch.randperm(pages, generator=g).tolist()
    table = torch.full((len(lengths), max(used, default=0) + spare_columns), -1, dtype=torch.int32)
    table[:, 1::2] = 2**30
    k_cache, v_cache = (
        fill((pages, page_size, kv_heads, dim), kv_dtype, torch.device("cpu")),
        fill((pages, page_size, kv_heads, dim_v), kv_dtype, torch.device("cpu")),
    )
    scale_caches = [torch.full((pages, page_size, kv_heads), NAN), torch.full((pages, page_size, kv_heads), NAN)]
    head_scales = [torch.rand(kv_heads, generator=g) * 0.02 + 0.01 for _ in range(2)]
    keys, values = [], []
    for b, length in enumerate(lengths):
        dense = []
        for which, d in enumerate((dim, dim_v)):
            x = torch.randn(length, kv_heads, d, generator=g)
            token_scale = torch.rand(length, kv_heads, generator=g) * 0.02 + 0.01
            unit = {"": torch.tensor(1.0), "scalar": torch.tensor(0.015), "tensor": torch.tensor(0.015), "head": head_scales[which][None, :, None]}
            factor = token_scale[:, :, None] if scales[which] == "token" else unit[scales[which]]
            stored = (x / factor).round().clamp(-127, 127).to(kv_dtype) if kv_dtype == torch.int8 else (x / factor).to(kv_dtype)
            dense.append((stored, stored.double() * factor.double(), token_scale))
        keys.append(dense[0][1])
        values.append(dense[1][1])
        for page in range(used[b]):
            table[b, page] = ids.pop()
            part = slice(page * page_size, min(length, (page + 1) * page_size))
            rows = part.stop - part.start
            for cache, scale_cache, (stored, _, token_scale) in zip((k_cache, v_cache), scale_caches, dense, strict=True):
                cache[table[b, page], :rows] = stored[part]
                scale_cache[table[b, page], :rows] = token_scale[part]
        if window is not None:  # pages wholly before the window of the first row may be anything
            first = max(0, length - counts[b] - window + 1)
            for page in range(min(first // page_size, used[b])):
                if counts[b]:
                    k_cache[table[b, page]] = fill((1,), kv_dtype, torch.device("cpu"))
                    v_cache[table[b, page]] = fill((1,), kv_dtype, torch.device("cpu"))
                    table[b, page] = (-1, 2**30)[page % 2]
    k_cache, v_cache = to_layout(k_cache, v_cache, layout)
    args: dict[str, Any] = {
        "q": torch.randn(tokens, num_heads, dim, generator=g).to(dtype).to(device),
        "k_cache": k_cache.to(device),
        "v_cache": v_cache.to(device),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "block_tables": table.to(device),
        "kv_layout": layout,
        "window": window,
        "return_lse": True,
    }
    for which, name in enumerate(("k_scale", "v_scale")):
        if scales[which] == "token":
            scale = scale_caches[which] if layout == "NHD" else scale_caches[which].transpose(1, 2).contiguous()
            args[name] = scale.to(device)
        elif scales[which]:
            args[name] = {"scalar": 0.015, "tensor": torch.tensor(0.015, device=device), "head": head_scales[which].to(device)}[scales[which]]
    if blocks is None:
        args["q_len"] = q_len
    else:
        args["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device)
    args |= {k: v.to(device) if isinstance(v, Tensor) else v for k, v in features.items()}
    starts = [sum(counts[:b]) for b in range(len(counts))]
    return Problem(args, keys, values, list(zip(starts, counts, strict=True)))


def expected(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64."""
    a = problem.args
    q = a["q"].double().cpu()
    tokens, num_heads, dim = q.shape
    scale = a.get("scale") or dim**-0.5
    softcap, window, tree = a.get("softcap", 0.0), a.get("window"), a.get("tree_mask")
    slopes, sinks = (None if a.get(n) is None else a[n].double().cpu() for n in ("alibi_slopes", "sinks"))
    dim_v = a["v_cache"].shape[2 if a["kv_layout"] == "SPLIT_V0" else 3]
    out, lse = torch.zeros(tokens, num_heads, dim_v, dtype=torch.float64), torch.full((tokens, num_heads), -math.inf, dtype=torch.float64)
    for (start, count), keys, values in zip(problem.blocks, problem.keys, problem.values, strict=True):
        length, group = keys.shape[0], num_heads // keys.shape[1] if keys.numel() else 1
        own = None if tree is None else tree[start : start + count, :count].cpu()
        depth = None if own is None else (own.sum(1) - 1).clamp_min(0)
        where = torch.arange(length)
        if depth is not None and count:
            drafts = where - (length - count)
            where = torch.where(drafts >= 0, length - count + depth[drafts.clamp_min(0)], where)
        for i in range(count):
            position = length - count + (i if depth is None else int(depth[i]))
            visible = torch.arange(length) <= position
            if own is not None:
                drafts = torch.arange(length) - (length - count)
                visible = (drafts < 0) | own[i][drafts.clamp_min(0)]
            if window is not None:
                visible = visible & (position - where < window)
            if not bool(visible.any()):
                continue
            for h in range(num_heads):
                scores = scale * (keys[:, h // group] @ q[start + i, h])
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if slopes is not None:
                    scores = scores - slopes[h] * (position - where)
                scores = scores[visible]
                total = torch.logsumexp(scores, 0)
                if sinks is not None:
                    total = torch.logaddexp(total, sinks[h])
                out[start + i, h] = torch.exp(scores - total) @ values[visible, h // group]
                lse[start + i, h] = total
    return out, lse


def assert_matches(actual: Tensor | tuple[Tensor, ...], wanted: tuple[Tensor, Tensor], dtype: torch.dtype, factor: float = 1.0) -> None:
    """Outputs within the tolerance of `dtype` relative to the largest magnitude; LSE likewise, -inf exactly."""
    assert isinstance(actual, tuple), "call with return_lse=True"
    for name, a, w in zip(("out", "lse"), actual, wanted, strict=True):
        a = a.double().cpu()
        assert not torch.isnan(a).any(), f"{name} holds NaN"
        empty = torch.isinf(w)
        assert torch.equal(a[empty], w[empty]), f"{name}: empty rows must be exact"
        if bool((~empty).any()):
            error = float((a - w)[~empty].abs().max() / w[~empty].abs().max().clamp_min(1e-30))
            assert error <= factor * TOLERANCE[dtype], f"{name}: error {error:.2e}"
    rows = torch.isinf(wanted[1])
    assert not actual[0].cpu()[rows].any(), "rows with nothing to see must be exactly 0"
