"""The bars of decode steps, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hal.bench.bars import Bar, Judgement, aggregate, geometric_mean, judge_rows
from hal.bench.decode.host import Scratch
from hal.bench.decode.rows import DecodeRow
from hal.bench.host import HostRow

__all__ = ["BARS", "judge"]

MB, GB = 10**6, 10**9


def _ratio(row: DecodeRow, rows: Mapping[str, DecodeRow]) -> float | None:
    return row.ratio


def _of_read(row: DecodeRow, rows: Mapping[str, DecodeRow]) -> float | None:
    return row.of_read


def _us(row: DecodeRow, rows: Mapping[str, DecodeRow]) -> float | None:
    return row.us


def _to_base(number: Callable[[DecodeRow], float | None]) -> Callable[[DecodeRow, Mapping[str, DecodeRow]], float | None]:
    """Return the number of a row over that of its base row."""

    def value(row: DecodeRow, rows: Mapping[str, DecodeRow]) -> float | None:
        base = rows.get(row.case.base)
        own, other = number(row), None if base is None else number(base)
        return None if own is None or not other else own / other

    return value


def _to_fastest(row: DecodeRow, rows: Mapping[str, DecodeRow]) -> float | None:
    times = [other.us for other in rows.values() if other.us is not None]
    return None if row.us is None or len(times) < 2 else row.us / min(times)


def _group(*names: str) -> Callable[[DecodeRow], bool]:
    return lambda row: row.case.group in names


def _streams(row: DecodeRow) -> bool:
    """Rows of unquantised caches that memory alone should bound."""
    return row.case.group in ("main", "groups", "dims", "pages") and not row.case.kv_dtype


#: Every bar of a row. Ratios are times, so less is better; fractions are of the ceilings measured in the same run.
BARS: tuple[Bar[DecodeRow], ...] = (
    Bar("time / best peer", 0.97, lambda r: r.case.group == "main" and bool(r.case.peers), _ratio),
    Bar("fraction of the read ceiling, KV >= 1 GB", 0.95, lambda r: _streams(r) and r.case.kv_bytes >= GB, _of_read, least=True),
    Bar("fraction of the read ceiling, KV >= 250 MB", 0.85, lambda r: _streams(r) and 250 * MB <= r.case.kv_bytes < GB, _of_read, least=True),
    Bar("microseconds, KV of 4 MB", 6.5, lambda r: r.case.group == "main" and r.case.kv_bytes <= 5 * MB, _us),
    Bar("microseconds, KV of 17 to 34 MB", 14.0, lambda r: r.case.group == "main" and 16 * MB <= r.case.kv_bytes <= 34 * MB, _us),
    Bar("time per byte / uniform lengths", 1.05, lambda r: r.case.group == "main" and bool(r.case.base), _to_base(lambda r: r.ns_per_kb)),
    Bar("time / FlashMLA, 16 heads", 0.95, lambda r: r.case.mla and r.case.heads == 16, _ratio),
    Bar("time / FlashMLA, 128 heads", 1.25, lambda r: r.case.mla and r.case.heads == 128, _ratio),
    Bar(
        "fraction of the read ceiling, fp8 KV >= 250 MB",
        0.85,
        lambda r: r.case.kv_dtype == "e4m3" and r.case.kv_bytes >= 250 * MB,
        _of_read,
        least=True,
    ),
    Bar("time / fastest page size", 1.10, _group("pages"), _to_fastest),
    Bar("time / q_len 1, up to 64 rows", 1.20, lambda r: r.case.group == "qlen" and bool(r.case.base) and _rows(r) <= 64, _to_base(lambda r: r.us)),
    Bar("time / context of the window's size", 1.10, lambda r: r.case.window is not None, _to_base(lambda r: r.us)),
    Bar("time per byte / one sequence less", 1.03, lambda r: r.case.group == "batch" and bool(r.case.base), _to_base(lambda r: r.ns_per_kb)),
)
_MEAN_LIMIT, _HOST_LIMIT, _SCRATCH_LIMIT = 0.90, 24.0, 32 * 1024 * 1024


def _rows(row: DecodeRow) -> int:
    """Query rows that share a kv head."""
    return row.case.heads // row.case.kv_heads * row.case.q_len


def judge(
    rows: Sequence[DecodeRow], host: Sequence[HostRow] = (), scratch: Scratch | None = None, bars: Sequence[Bar[DecodeRow]] = BARS
) -> list[Judgement]:
    """Hold every row to every bar that applies to it, then the aggregates."""
    found = judge_rows(rows, bars)
    main = [row for row in rows if row.case.group == "main" and row.case.peers]
    if main:
        ratios = [row.ratio for row in main if row.ratio is not None]
        mean = geometric_mean(ratios) if len(ratios) == len(main) else None  # a bar over all rows: told only of all
        what = f"geometric mean of time / best peer, {len(ratios)} of {len(main)} rows"
        found.append(aggregate("main", "all rows", what, mean, _MEAN_LIMIT))
    found += [aggregate("host", row.name, "host microseconds", row.us, _HOST_LIMIT, failed=bool(row.problem)) for row in host if row.judged]
    if scratch is not None:
        found.append(aggregate("host", f"{scratch.calls} calls", "scratch bytes grown", scratch.after - scratch.before, 0))
        found.append(aggregate("host", "up to 16 rows", "scratch bytes", scratch.after, _SCRATCH_LIMIT))
    return found
