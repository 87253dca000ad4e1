"""Tables of routing and of the expert layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hal.bench.moe.result import MoeResult
from hal.bench.moe.rows import MoeRow
from hal.bench.view import View, best_cells, line_of_peers, megabytes, number, ours, peer_cells

__all__ = ["VIEW", "line"]

TITLES = {
    "experts": "Expert layer (fused_moe), bf16 unless said: gate and up, SiLU, down, weighted sum; routing apart",
    "routing": "Routing (topk_softmax), bf16 unless said",
    "quant": "Expert layer with quantised weights and activations",
    "host": "Host cost of one eager call, one token",
}
#: Heading -> cell, of rows of the expert layer.
_EXPERTS: dict[str, Callable[[MoeRow], str]] = {
    "touched": lambda row: number(row.touched, 0),
    "MB": lambda row: megabytes(row.bytes_read),
    "floor us": lambda row: number(row.floor_us),
    "bound": lambda row: "flops" if row.compute_us > row.memory_us else "memory",
    "ours us": ours,
    "of floor": lambda row: number(row.of_floor, 3),
    "TFLOP/s": lambda row: "-" if row.tflops is None else f"{row.tflops:.3g}",
    "scratch MB": lambda row: number(None if row.scratch_bytes is None else row.scratch_bytes / 1e6, 2),
    "/ results": lambda row: number(row.scratch_ratio, 2),
}
_ROUTING: dict[str, Callable[[MoeRow], str]] = {
    "floor us": lambda row: number(row.floor_us, 2),
    "ours us": lambda row: number(row.us, 2) if row.us else ours(row),
}


def line(row: MoeRow) -> str:
    """One line for a row as it comes."""
    head = f"{row.case.group:9} {row.case.name:34}"
    if row.skipped:
        return f"{head} skipped  {row.skipped}"
    if row.us is None:
        return f"{head} FAILED  {row.problem}"
    scratch = "" if row.scratch_ratio is None else f"  scratch {row.scratch_ratio:.2f}"
    return f"{head} {row.us:9.2f} us  floor {row.floor_us:8.2f}  {row.of_floor or 0:.3f} of floor{scratch}  by {row.served_by}{line_of_peers(row)}"


def _columns(rows: Sequence[MoeRow]) -> dict[str, Callable[[MoeRow], str]]:
    return _EXPERTS if rows[0].experts_case else _ROUTING


def _head(rows: Sequence[MoeRow], peers: tuple[str, ...]) -> tuple[str, ...]:
    return ("case", *_columns(rows), *(name.replace("_", " ") for name in peers), *(("best peer", "ours / best") if peers else ()))


def _cells(row: MoeRow, rows: Sequence[MoeRow], peers: tuple[str, ...]) -> tuple[str, ...]:
    return (row.case.name, *(cell(row) for cell in _columns(rows).values()), *peer_cells(row, peers), *(best_cells(row) if peers else ()))


def _notes(result: MoeResult) -> list[str]:
    servers = sorted({f"{row.case.group}: {row.served_by}" for row in result.rows if row.served_by and not row.skipped})
    return [f"Served by: {', '.join(servers)}."] if servers else []


VIEW = View(TITLES, _head, _cells, _notes)
