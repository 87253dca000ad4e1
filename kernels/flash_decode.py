"""Launcher of `flash_decode` and of its planner: at most four kernels and no other device work.

depths (tree mask with ALiBi or window) -> plan (unless given) -> main -> merge of split units. Nothing waits for the
device. The merge is left out when no unit can be split. Scratch is bounded by twice the programs that fill the device
(eight times in a batch-invariant call) times one tile of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.kernels.decode_kernel import decode_kernel
from hal.kernels.decode_plan import Partition, partition_of, write_plan
from hal.kernels.decode_reduce import REDUCE_ROWS, depth_kernel, reduce_kernel
from hal.kernels.layouts import head_dims, key_strides, page_size_of, scale_arguments, split_of, value_strides
from hal.kernels.scratch import current_device, scratch
from hal.kernels.tuning import INVARIANT_CHUNK, decode_config, device_class, interpreting

__all__ = ["PlanBuffer", "flash_decode", "plan_decode", "split_dim"]

#: Lengths that keep every key index and its tile below 2**31.
_MOST_KEYS = 2**31 - 2**17


@dataclass(frozen=True)
class PlanBuffer:
    """A partition of uniform blocks on the device; `words` is None if the call needs none."""

    partition: Partition
    words: Tensor | None


def split_dim(dim: int) -> tuple[int, int]:
    """Cut a head dim into the largest power of two and a padded rest: 80 -> (64, 16), 128 -> (128, 0)."""
    first = 1 << (dim.bit_length() - 1)
    rest = dim - first
    return first, 0 if rest == 0 else max(16, 1 << (rest - 1).bit_length())


def plan_decode(
    seq_lens: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    max_seq_len: int,
    q_len: int,
    window: int | None,
    batch_invariant: bool,
    out: PlanBuffer | None,
) -> PlanBuffer:
    """Partition a decode step of uniform blocks; `out` is refreshed in place.

    Args:
        seq_lens: (B,) int32 keys of each sequence.
        num_heads: H.
        num_kv_heads: Hkv.
        head_dim: D.
        head_dim_v: Dv.
        max_seq_len: most keys of a sequence.
        q_len: query tokens of each sequence.
        window: visible keys, None for all.
        batch_invariant: as in the calls.
        out: an earlier plan of the same facts.
    """
    sequences, group = seq_lens.shape[0], num_heads // num_kv_heads
    max_keys = min(max_seq_len, _MOST_KEYS)
    partition = partition_of(
        sequences, sequences * q_len, q_len, group, num_kv_heads, max(head_dim, head_dim_v), max_keys, batch_invariant, seq_lens.device
    )
    if not partition.planned or sequences == 0:
        return out or PlanBuffer(partition, None)
    words = out.words if out is not None else torch.empty(partition.words, dtype=torch.int32, device=seq_lens.device)
    assert words is not None  # a plan of the same facts has the same partition
    with current_device(seq_lens.device):
        write_plan(words, partition, seq_lens, None, sequences * q_len, q_len, _bounded(window), max_keys)
    return out or PlanBuffer(partition, words)


def _bounded(window: int | None) -> int | None:
    """A window that no length can reach is none; also keeps it below 2**31."""
    return None if window is None or window > 2**30 else window


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    q_len: int,
    cu_seqlens_q: Tensor | None,
    kv_layout: str,
    scale: float,
    softcap: float,
    window: int | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    plan: PlanBuffer | None,
    batch_invariant: bool,
) -> None:
    """Write `out` and `lse`; arguments as in the contract of `flash_decode`, `scale` resolved.

    Args:
        q: (T, H, D).
        k_cache: paged keys.
        v_cache: paged values.
        seq_lens: (B,) int32.
        block_tables: (B, max_pages) int32.
        out: (T, H, Dv) in q's dtype or fp32.
        lse: (T, H) fp32, or None.
        q_len: tokens of every sequence without `cu_seqlens_q`.
        cu_seqlens_q: (B+1,) int32 or None.
        kv_layout: layout of the caches.
        scale: factor of the scores.
        softcap: 0 for none.
        window: visible keys or None.
        alibi_slopes: (H,) fp32 or None.
        sinks: (H,) fp32 or None.
        tree_mask: (T, Q) bool or None.
        k_scale: None, float, scalar tensor, (Hkv,) or per token and head.
        v_scale: the same for V.
        plan: of the same facts, or None; ignored with `cu_seqlens_q` or if made for other tiles.
        batch_invariant: a row's bits depend on its own keys only.
    """
    tokens, num_heads, head_dim = q.shape
    if tokens == 0:
        return
    device, sequences = q.device, seq_lens.shape[0]
    num_kv_heads, _, head_dim_v = head_dims(k_cache, v_cache, kv_layout)
    page_size, group, window = page_size_of(k_cache, kv_layout), num_heads // num_kv_heads, _bounded(window)
    max_keys = min(block_tables.shape[1] * page_size, _MOST_KEYS)
    uniform = q_len if cu_seqlens_q is None else None
    partition = partition_of(sequences, tokens, uniform, group, num_kv_heads, max(head_dim, head_dim_v), max_keys, batch_invariant, device)
    kind = device_class(device)
    heavy = partition.block_m > 16 or batch_invariant or tree_mask is not None
    config = decode_config(kind, head_dim, head_dim_v, k_cache.element_size(), q.element_size(), heavy=heavy)
    d0, d1 = split_dim(head_dim)
    dv0, dv1 = split_dim(head_dim_v)
    k_tensor, k_factor, k_strides = scale_arguments(k_scale, kv_layout)
    v_tensor, v_factor, v_strides = scale_arguments(v_scale, kv_layout)
    k_per_token, v_per_token = (t is not None and t.dim() == 3 for t in (k_tensor, v_tensor))
    out_strides, lse_stride = out.stride(), 0 if lse is None else lse.stride(0)
    fusion = not batch_invariant
    with current_device(device):
        plain = alibi_slopes is None and window is None
        tree, depth, tree_stride, tree_columns = _tree_arguments(tree_mask, cu_seqlens_q, sequences, tokens, q_len, plain)
        words = None
        if partition.planned:
            if plan is not None and cu_seqlens_q is None and plan.partition == partition:
                words = plan.words
            else:
                words = scratch("plan", partition.words, torch.int32, device)
                write_plan(words, partition, seq_lens, cu_seqlens_q, tokens, q_len, window, max_keys)
        # Never None, also where nothing can be split: the kernel's code for split units needs a pointer to compile.
        parts = scratch("partials", partition.max_slots * num_kv_heads * partition.block_m * (head_dim_v + 1), torch.float32, device)
        decode_kernel[(partition.max_items * num_kv_heads,)](
            q, k_cache, v_cache, out, lse, parts, words, seq_lens, block_tables, cu_seqlens_q,
            alibi_slopes, sinks, tree, depth, k_tensor, v_tensor,
            scale * k_factor, v_factor, softcap or None, window,
            tokens, sequences, q_len, k_cache.shape[0], max_keys, partition.row_tiles, partition.max_items, partition.max_slots, num_kv_heads,
            q.stride(0), q.stride(1), *key_strides(k_cache, kv_layout), *value_strides(v_cache, kv_layout),
            out_strides[0], out_strides[1], lse_stride, block_tables.stride(0), tree_stride, tree_columns, *k_strides, *v_strides,
            head_dim, d0, d1, head_dim_v, dv0, dv1, group, partition.token_rows, page_size, split_of(k_cache, kv_layout),
            config.tile, partition.block_m, INVARIANT_CHUNK if batch_invariant else 0, k_per_token, v_per_token, interpreting(),
            num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=fusion,
        )  # fmt: skip
        if partition.max_slots:
            reduce_kernel[(partition.max_slots // 2 * num_kv_heads * (partition.block_m // REDUCE_ROWS),)](
                out, lse, parts, words, cu_seqlens_q, sinks, v_tensor, v_factor,
                tokens, sequences, q_len, partition.max_items, partition.max_slots, num_kv_heads,
                out_strides[0], out_strides[1], lse_stride, v_strides[2],
                head_dim_v, 1 << (head_dim_v - 1).bit_length(), group, partition.token_rows, partition.block_m, REDUCE_ROWS, v_per_token,
                num_warps=2, num_stages=2, enable_fp_fusion=fusion,
            )  # fmt: skip


def _tree_arguments(
    tree_mask: Tensor | None, cu_seqlens_q: Tensor | None, sequences: int, tokens: int, q_len: int, plain: bool
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(mask as bytes, depths or None, row stride, columns); depths are needed unless positions are (`plain`)."""
    if tree_mask is None:
        return None, None, 0, 0
    tree = tree_mask.view(torch.uint8)
    columns = tree.shape[1]
    if plain or sequences == 0:
        return tree, None, tree.stride(0), columns
    depth = scratch("depth", tokens, torch.int32, tree.device)
    depth_kernel[(sequences,)](depth, tree, cu_seqlens_q, tokens, q_len, tree.stride(0), columns, num_warps=1, num_stages=1, enable_fp_fusion=True)
    return tree, depth, tree.stride(0), columns
