"""What can be chosen about the experts' kernels, and for what. None of it changes a result beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Experts", "GemmConfig", "Measured", "MoeConfig", "SlotConfig", "SlotPath"]


@dataclass(frozen=True)
class GemmConfig:
    """How one grouped product runs.

    Attributes:
        block_n: rows of the weights of a tile; with an activation half of them are gates.
        block_k: K of a step.
        warps: of a program.
        stages: of the load pipeline.
        swap: the weights are the wide operand of the matrix instruction.
        w_tma: weights come through a TMA descriptor where their strides allow.
        x_tma: rows that are already sorted do so too.
        programs: programs per multiprocessor that work through all tiles; 0 for a program per tile.
        group_m: row tiles of an expert that run side by side.
        ahead: columns of the weights that programs ask L2 for before the kernel before is done (down projection).
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    swap: bool = False
    w_tma: bool = False
    x_tma: bool = False
    programs: int = 0
    group_m: int = 8
    ahead: int = 0


@dataclass(frozen=True)
class MoeConfig:
    """Rows of a tile, the product with the gate and up projections, and that with the down projection."""

    block_m: int
    up: GemmConfig
    down: GemmConfig


@dataclass(frozen=True)
class SlotConfig:
    """How a kernel of `moe_slots` runs.

    Attributes:
        rows: outputs of a program.
        block_k: K of a step.
        warps: of a program.
        stages: of the load pipeline, 1 for none.
        prefetch: ask L2 for the weights before the kernel before is done (second kernel).
    """

    rows: int
    block_k: int
    warps: int
    stages: int = 1
    prefetch: bool = True


@dataclass(frozen=True)
class SlotPath:
    """The two kernels of `moe_slots`."""

    up: SlotConfig
    down: SlotConfig


@dataclass(frozen=True)
class Experts:
    """What a config is chosen for: E experts of (H, I), k of them for each token, with elements of 2 or 4 bytes.

    Attributes:
        experts: E, held here.
        hidden: H.
        inner: I.
        top_k: k.
        element_bytes: of x and the weights.
        k_inner: K is the contiguous dimension of both weights.
    """

    experts: int
    hidden: int
    inner: int
    top_k: int
    element_bytes: int = 2
    k_inner: bool = True

    def rows(self, tokens: int) -> float:
        """Rows that an expert gets that has any, if the choices of a token are distinct and all experts alike."""
        share = min(1.0, self.top_k / max(1, self.experts))
        return tokens * self.top_k / max(1.0, self.experts * (1.0 - (1.0 - share) ** tokens))


@dataclass(frozen=True)
class Measured:
    """The best config that was measured for some experts and tokens, and its microseconds."""

    experts: Experts
    tokens: int
    config: MoeConfig | SlotPath
    microseconds: float
