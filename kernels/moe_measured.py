"""Measured bests of the experts' kernels: `fused_moe` on one NVIDIA H200, bf16, CUDA graph over weights beyond L2 (Triton 3.6.0).

Written down from a sweep over all candidates of `hal tune moe`; the microseconds are those of the whole op.
"""

from __future__ import annotations

from dataclasses import replace

from hal.kernels.moe_configs import Experts, GemmConfig, Measured, MoeConfig, SlotConfig, SlotPath

__all__ = ["HOPPER"]

_QWEN3_30B = Experts(128, 2048, 768, 8)
_MIXTRAL = Experts(8, 4096, 14336, 2)
_QWEN3_NEXT = Experts(512, 2048, 512, 10)
_QWEN35_TP4 = Experts(256, 2048, 128, 8)
_SLOT_UP = SlotConfig(4, 512, 4, 3)
_NARROW = GemmConfig(128, 128, 4, 4, swap=True, w_tma=True)
_HALF = GemmConfig(64, 128, 4, 4, swap=True, w_tma=True)
_WIDE = GemmConfig(256, 64, 8, 4, w_tma=True, x_tma=True)
_WIDE_3 = replace(_WIDE, stages=3)

HOPPER: tuple[Measured, ...] = (
    Measured(_QWEN3_30B, 1, SlotPath(_SLOT_UP, SlotConfig(4, 1024, 4, prefetch=False)), 25.4),
    Measured(_QWEN3_30B, 16, MoeConfig(16, _NARROW, GemmConfig(128, 128, 4, 3, swap=True)), 187.4),
    Measured(_QWEN3_30B, 64, MoeConfig(16, GemmConfig(128, 64, 4, 6, swap=True), GemmConfig(128, 128, 4, 3, swap=True)), 277.6),
    Measured(_QWEN3_30B, 256, MoeConfig(32, GemmConfig(128, 128, 4, 3), GemmConfig(128, 64, 4, 6, w_tma=True)), 299.9),
    Measured(_QWEN3_30B, 1024, MoeConfig(128, GemmConfig(128, 64, 8, 3, w_tma=True), _WIDE), 412.6),
    Measured(_QWEN3_30B, 8192, MoeConfig(128, _WIDE_3, replace(_WIDE, programs=1, ahead=256)), 1241.8),
    Measured(_MIXTRAL, 1, SlotPath(_SLOT_UP, SlotConfig(8, 1024, 4, prefetch=False)), 162.6),
    Measured(_MIXTRAL, 16, MoeConfig(16, _HALF, replace(_NARROW, ahead=64)), 625.6),
    Measured(_MIXTRAL, 256, MoeConfig(128, _WIDE, replace(_WIDE, programs=1)), 691.0),
    Measured(_MIXTRAL, 4096, MoeConfig(128, _WIDE_3, replace(_WIDE_3, programs=1, ahead=256)), 4788.7),
    Measured(_QWEN3_NEXT, 1, SlotPath(_SLOT_UP, SlotConfig(2, 1024, 2, prefetch=False)), 24.9),
    Measured(_QWEN3_NEXT, 16, MoeConfig(16, _HALF, GemmConfig(128, 64, 4, 6, swap=True, w_tma=True)), 205.0),
    Measured(_QWEN3_NEXT, 256, MoeConfig(16, _NARROW, GemmConfig(128, 128, 4, 3, ahead=256)), 773.6),
    Measured(_QWEN3_NEXT, 4096, MoeConfig(128, _WIDE, replace(_WIDE, programs=1, ahead=256)), 1030.0),
    Measured(_QWEN35_TP4, 64, MoeConfig(16, GemmConfig(64, 256, 4, 3, w_tma=True), GemmConfig(128, 64, 4, 4, swap=True)), 98.6),
)
