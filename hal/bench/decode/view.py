"""Tables of decode steps."""

from __future__ import annotations

from collections.abc import Sequence

from hal.bench.decode.host import Scratch
from hal.bench.decode.result import DecodeResult
from hal.bench.decode.rows import DecodeRow
from hal.bench.view import View, best_cells, line_of_peers, megabytes, number, ours, peer_cells

__all__ = ["VIEW", "line"]

TITLES = {
    "main": "Paged decode, bf16 unless said",
    "fp8": "Quantised KV caches",
    "mla": "Latent attention (MLA 576/512), page 64, bf16",
    "invariant": "The price of batch_invariant",
    "pages": "Page sizes: 32/8 heads, D 128, 16 sequences of 8k",
    "groups": "Head groups: D 128, 16 sequences of 8k",
    "dims": "Head dims: 32/8 heads, 16 sequences of 8k",
    "qlen": "Several query tokens: 8 kv heads, D 128, 8 sequences of 8k",
    "window": "Window of 1024 keys: 32/8 heads, D 128",
    "batch": "Batch sizes 1 to 64",
    "host": "Host cost of one eager call: batch 1, 64 keys",
}
_HEAD = ("case", "KV MB", "floor us", "ours us", "no plan us", "GB/s", "of read", "of floor")


def line(row: DecodeRow) -> str:
    """One line for a row as it comes."""
    head = f"{row.case.group:9} {row.case.name:34} {megabytes(row.case.kv_bytes):>7} MB"
    if row.us is None:
        return f"{head}  FAILED  {row.problem}"
    plain = "" if row.plan_us is None or row.no_plan_us is None else f" (no plan {row.no_plan_us:.1f})"
    return f"{head}  {row.us:8.1f} us{plain}  {row.gbps or 0:6.0f} GB/s  {row.of_read or 0:.3f} of read{line_of_peers(row)}"


def _head(rows: Sequence[DecodeRow], peers: tuple[str, ...]) -> tuple[str, ...]:
    based = ("/ base",) if any(row.case.base for row in rows) else ()
    return (*_HEAD, *based, *(name.replace("_", " ") for name in peers), *(("best peer", "ours / best") if peers else ()))


def _cells(row: DecodeRow, rows: Sequence[DecodeRow], peers: tuple[str, ...]) -> tuple[str, ...]:
    cells = [row.case.name, megabytes(row.case.kv_bytes), f"{row.floor_us:.1f}", ours(row), number(row.no_plan_us)]
    cells += [number(row.gbps, 0), number(row.of_read, 3), number(row.of_floor, 3)]
    if any(other.case.base for other in rows):
        base = next((other for other in rows if other.case.name == row.case.base), None)
        known = base is not None and base.ns_per_kb is not None and row.ns_per_kb is not None
        same_bytes = known and base is not None and row.case.group not in ("main", "batch")
        own, other = (row.us, base.us if base else None) if same_bytes else (row.ns_per_kb, base.ns_per_kb if base else None)
        cells.append(number(own / other, 3) if known and own and other else "-")
    return (*cells, *peer_cells(row, peers), *(best_cells(row) if peers else ()))


def _notes(result: DecodeResult) -> list[str]:
    held = max((row.scratch_bytes or 0 for row in result.rows), default=0)
    texts = [f"Work memory that the kernels hold after all rows: {held / 2**20:.1f} MiB."] if held else []
    return texts if result.scratch is None else [*texts, _scratch(result.scratch)]


def _scratch(scratch: Scratch) -> str:
    after, before, largest = (f"{size / 2**20:.1f} MiB" for size in (scratch.after, scratch.before, scratch.largest))
    return f"Scratch: {after} after {scratch.calls} calls, {before} before; largest buffer {largest}."


VIEW = View(TITLES, _head, _cells, _notes)
