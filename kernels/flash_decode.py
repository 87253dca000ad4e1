"""Launcher of `flash_decode` and of its planner: at most four kernels.

plan (unless given) -> depths (tree mask with ALiBi or window) -> main -> merge of cut units; beside them new counters are
zeroed, once. Nothing waits for the device. The merge is left out when no unit can be cut, and where the Hopper kernel
merges by itself. Scratch is bounded by twice the programs of a
call (eight times in a batch-invariant one) times the rows of a unit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hal.kernels.decode_hopper import decode_hopper_kernel, hopper_dims
from hal.kernels.decode_hopper_merge import merge_shape
from hal.kernels.decode_kernel import decode_kernel
from hal.kernels.decode_partition import Partition, PlanBuffer, partition_of, unit_rows, write_plan
from hal.kernels.decode_reduce import depth_kernel, reduce_kernel, reduce_shape
from hal.kernels.decode_repeat import REPEATS, form_of, remember
from hal.kernels.launch import pdl_options
from hal.kernels.layouts import copied_in_16_bytes, head_dims, key_strides, page_size_of, scale_arguments, split_of, value_strides
from hal.kernels.scratch import counters, current_device, scratch
from hal.kernels.tuning import DecodeConfig, decode_config, decode_programs, interpreting, is_hopper, supports_pdl

__all__ = ["flash_decode", "plan_decode", "split_dim"]

#: Lengths that keep every key index and its tile below 2**31.
_MOST_KEYS = 2**31 - 2**17


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
    kv_dtype: torch.dtype | None,
    batch_invariant: bool,
    out: PlanBuffer | None,
) -> PlanBuffer:
    """Partition a decode step of uniform blocks; `out` is refreshed in place.

    Made for 16-bit queries and the kernel that serves plain calls; a call of another partition plans for itself.

    Args:
        seq_lens: (B,) int32 keys of each sequence.
        num_heads: H.
        num_kv_heads: Hkv.
        head_dim: D.
        head_dim_v: Dv.
        max_seq_len: most keys of a sequence.
        q_len: query tokens of each sequence.
        window: visible keys, None for all.
        kv_dtype: of a quantised cache, else None.
        batch_invariant: as in the calls; their chunks must lie where the lengths of the moment put them, so that the
            plan is empty.
        out: an earlier plan of the same facts.
    """
    sequences, device = seq_lens.shape[0], seq_lens.device
    max_keys = min(max_seq_len, _MOST_KEYS)
    kv_bytes = 2 if kv_dtype is None else kv_dtype.itemsize
    hopper = is_hopper(device) and not batch_invariant and hopper_dims(head_dim, head_dim_v, kv_bytes, v_in_k=head_dim != head_dim_v)
    partition, _ = _partition(
        hopper, sequences, sequences * q_len, q_len, num_heads // num_kv_heads, num_kv_heads, head_dim, head_dim_v, max_keys,
        kv_bytes, 2, batch_invariant, device,
    )  # fmt: skip
    if batch_invariant or sequences == 0:
        return out or PlanBuffer(partition, None)
    words = out.words if out is not None else torch.empty(partition.words(sequences), dtype=torch.int32, device=device)
    assert words is not None  # a plan of the same facts has the same partition
    with current_device(device):
        write_plan(words, partition, seq_lens, None, sequences * q_len, q_len, _bounded(window), max_keys, pdl=supports_pdl(device))
    return out or PlanBuffer(partition, words)


@lru_cache(maxsize=4096)
def _partition(
    hopper: bool,
    sequences: int,
    tokens: int,
    q_len: int | None,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    max_keys: int,
    kv_bytes: int,
    compute_bytes: int,
    invariant: bool,
    device: torch.device,
) -> tuple[Partition, DecodeConfig]:
    """Sizes of the partition and config of the main kernel; a pure function of facts that the host knows."""
    kernel = "hopper" if hopper else "portable"
    rows = unit_rows(kernel, tokens, sequences, q_len, group, max(head_dim, head_dim_v), invariant)
    config = decode_config(kernel, head_dim, head_dim_v, kv_bytes, compute_bytes, rows)
    programs = decode_programs(device, config)
    partition = partition_of(
        sequences, tokens, q_len, group, num_kv_heads, rows, max_keys, invariant, programs,
        config.residents if config.lone_pieces else 1, config.short_pieces,
    )  # fmt: skip
    return partition, config


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
        plan: of the same facts, or None; ignored with `cu_seqlens_q` or if made for another partition.
        batch_invariant: a row's bits depend on its own keys only.
    """
    if q.shape[0] == 0:
        return
    key = None
    if q.is_cuda and not batch_invariant and cu_seqlens_q is None and tree_mask is None and alibi_slopes is None and sinks is None:
        key = form_of(q, k_cache, v_cache, seq_lens, block_tables, out, lse, q_len, kv_layout, scale, softcap, window, k_scale, v_scale)
        again = REPEATS.get(key)
        if again is not None and again(q, k_cache, v_cache, seq_lens, block_tables, out, lse, plan):
            return
    tokens, num_heads, head_dim = q.shape
    device, sequences = q.device, seq_lens.shape[0]
    num_kv_heads, _, head_dim_v = head_dims(k_cache, v_cache, kv_layout)
    page_size, group, window = page_size_of(k_cache, kv_layout), num_heads // num_kv_heads, _bounded(window)
    max_keys = min(block_tables.shape[1] * page_size, _MOST_KEYS)
    uniform = q_len if cu_seqlens_q is None else None
    d0, d1 = split_dim(head_dim)
    dv0, dv1 = split_dim(head_dim_v)
    k_tensor, k_factor, k_strides = scale_arguments(k_scale, kv_layout)
    v_tensor, v_factor, v_strides = scale_arguments(v_scale, kv_layout)
    k_per_token, v_per_token = (t is not None and t.dim() == 3 for t in (k_tensor, v_tensor))
    key_steps, value_steps = key_strides(k_cache, kv_layout), value_strides(v_cache, kv_layout)
    v_in_k = _values_in_keys(k_cache, v_cache, kv_layout, k_scale, v_scale)
    aligned = copied_in_16_bytes(kv_layout, key_steps, value_steps, k_cache.data_ptr() | v_cache.data_ptr())
    hopper = (
        is_hopper(device)
        and not (batch_invariant or k_per_token or v_per_token)
        and tree_mask is None
        and q.dtype != torch.float32
        and hopper_dims(head_dim, head_dim_v, k_cache.element_size(), v_in_k=v_in_k)
        and aligned
    )
    partition, config = _partition(
        hopper, sequences, tokens, uniform, group, num_kv_heads, head_dim, head_dim_v, max_keys,
        k_cache.element_size(), q.element_size(), batch_invariant, device,
    )  # fmt: skip
    out_strides, lse_stride = out.stride(), 0 if lse is None else lse.stride(0)
    fusion, pdl = not batch_invariant, supports_pdl(device)
    grid = (partition.pieces * num_kv_heads,)
    with current_device(device):
        if plan is not None and cu_seqlens_q is None and plan.partition == partition and plan.words is not None:
            words, planner = plan.words, None
        else:
            words = scratch("plan", partition.words(sequences), torch.int32, device)
            planner = write_plan(words, partition, seq_lens, cu_seqlens_q, tokens, q_len, window, max_keys, pdl=pdl)
        # Never None, also where nothing can be cut: the kernel's code for cut units needs a pointer to compile.
        parts = scratch("partials", partition.slots * num_kv_heads * partition.block_m * (head_dim_v + 1), torch.float32, device)
        rows = partition.block_m if uniform is None else min(partition.block_m, uniform * partition.token_rows)
        merge = merge_shape(rows, head_dim_v, config.merge_registers) if hopper else (0, 0)
        if hopper:
            count = counters(3 * partition.pieces * num_kv_heads, device)
            arguments = (
                q, k_cache, v_cache, out, lse, parts, count, words, seq_lens, block_tables, cu_seqlens_q, alibi_slopes, sinks, k_tensor, v_tensor,
                scale * k_factor, v_factor, softcap or None, window,
                tokens, sequences, q_len, k_cache.shape[0], max_keys, partition.pieces, partition.slots, num_kv_heads,
                q.stride(0), q.stride(1), *key_steps[:3], *value_steps[:3],
                out_strides[0], out_strides[1], lse_stride, block_tables.stride(0), k_strides[2], v_strides[2],
                head_dim, d0, max(d1, 32) if d1 else 0, head_dim_v, dv0, max(dv1, 64) if dv1 else 0,
                group, partition.token_rows, page_size, partition.block_m, config.stages, v_in_k, *merge,
                config.copy_warps, config.copy_registers, config.wide, pdl,
            )  # fmt: skip
            compiled = decode_hopper_kernel[grid](
                *arguments, num_warps=config.warps, maxnreg=config.registers, enable_fp_fusion=True, **pdl_options(pdl)
            )
            if key is not None and (merge[0] or not partition.splits):
                remember(key, (compiled, arguments), planner, partition, pdl=pdl)
        else:
            # Where one of K and V is not copied in 16 bytes, results were wrong with Triton 3.6's pipeline and right without.
            plain = alibi_slopes is None and window is None
            ahead = aligned and k_cache.element_size() == 2 and tree_mask is None
            tree, depth, tree_stride, tree_columns = _tree_arguments(tree_mask, cu_seqlens_q, sequences, tokens, q_len, plain, pdl)
            decode_kernel[grid](
                q, k_cache, v_cache, out, lse, parts, words, seq_lens, block_tables, cu_seqlens_q,
                alibi_slopes, sinks, tree, depth, k_tensor, v_tensor,
                scale * k_factor, v_factor, softcap or None, window,
                tokens, sequences, q_len, k_cache.shape[0], max_keys, partition.pieces, partition.slots, num_kv_heads,
                q.stride(0), q.stride(1), *key_steps, *value_steps,
                out_strides[0], out_strides[1], lse_stride, block_tables.stride(0), tree_stride, tree_columns, *k_strides, *v_strides,
                head_dim, d0, d1, head_dim_v, dv0, dv1, group, partition.token_rows, page_size, split_of(k_cache, kv_layout),
                config.tile, partition.block_m, partition.step, batch_invariant, v_in_k, ahead, k_per_token, v_per_token, interpreting(), pdl,
                num_warps=config.warps, num_stages=config.stages if aligned else 1, enable_fp_fusion=fusion, **pdl_options(pdl),
            )  # fmt: skip
        if partition.splits and not merge[0]:
            width = 1 << (head_dim_v - 1).bit_length()
            boundaries = (partition.pieces - 1) * num_kv_heads
            slices, together, parts_together = reduce_shape(rows, partition.block_m, head_dim_v, boundaries, invariant=batch_invariant)
            reduce_kernel[(boundaries * slices,)](
                out, lse, parts, words, cu_seqlens_q, sinks, v_tensor, v_factor,
                tokens, sequences, q_len, partition.pieces, partition.slots, num_kv_heads, rows, slices,
                out_strides[0], out_strides[1], lse_stride, v_strides[2],
                head_dim_v, width, group, partition.token_rows, partition.block_m, batch_invariant,
                together, parts_together, v_per_token, pdl,
                num_warps=4, num_stages=1, enable_fp_fusion=fusion, **pdl_options(pdl),
            )  # fmt: skip


def _values_in_keys(k_cache: Tensor, v_cache: Tensor, layout: str, k_scale: float | Tensor | None, v_scale: float | Tensor | None) -> bool:
    """Whether the values are the leading elements of the keys, as in MLA, so that one load serves both."""
    if k_cache.data_ptr() != v_cache.data_ptr() or layout not in ("NHD", "HND") or k_scale is not None or v_scale is not None:
        return False
    first, rest = split_dim(v_cache.shape[3])
    return k_cache.stride() == v_cache.stride() and rest == 0 and first == split_dim(k_cache.shape[3])[0]


def _tree_arguments(
    tree_mask: Tensor | None, cu_seqlens_q: Tensor | None, sequences: int, tokens: int, q_len: int, plain: bool, pdl: bool
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(mask as bytes, depths or None, row stride, columns); depths are needed unless positions are (`plain`)."""
    if tree_mask is None:
        return None, None, 0, 0
    tree = tree_mask.view(torch.uint8)
    columns = tree.shape[1]
    if plain or sequences == 0:
        return tree, None, tree.stride(0), columns
    depth = scratch("depth", tokens, torch.int32, tree.device)
    depth_kernel[(sequences,)](
        depth, tree, cu_seqlens_q, tokens, q_len, tree.stride(0), columns, pdl,
        num_warps=1, num_stages=1, enable_fp_fusion=True, **pdl_options(pdl),
    )  # fmt: skip
    return tree, depth, tree.stride(0), columns
