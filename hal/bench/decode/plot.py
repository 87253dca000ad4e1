"""The roofline plot of a run: rate of reading keys and values over their size, with the read ceiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hal.bench.plot import INK, MUTED, OURS, new_figure, peer_styles, save, title

__all__ = ["draw"]

#: Groups that a plot shows: rows that memory bounds.
_GROUPS = ("main",)


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw a run.

    Args:
        data: what the run's JSON file holds.
        path: file to write; its ending (.png, .svg, .pdf) decides the format.
    """
    rows = [row for row in data["rows"] if row["us"] is not None and row["group"] in _GROUPS] or [r for r in data["rows"] if r["us"] is not None]
    ceiling, machine, places = data["ceilings"]["read_gbps"], data["machine"], _places(rows)
    figure = new_figure(9.5, 5.8)
    axes = figure.add_subplot()
    axes.axhline(ceiling, color=INK, linewidth=1.4)
    axes.axhspan(0.95 * ceiling, ceiling, color=INK, alpha=0.06, linewidth=0)
    axes.annotate(f"read ceiling {ceiling:.0f} GB/s", (0.012, ceiling), (0, 4), ("axes fraction", "data"), "offset points", color=INK, fontsize=9)
    _bars(axes, rows, places)
    axes.scatter(places, [row["gbps"] for row in rows], s=48, marker="o", color=OURS, edgecolors="white", linewidths=0.8, label="hal", zorder=4)
    for name, (colour, mark) in peer_styles(rows).items():
        points = [(x, _rate(row, name)) for x, row in zip(places, rows, strict=True) if row["peers"].get(name, {}).get("us")]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=26, marker=mark, facecolors="none", edgecolors=colour, linewidths=1.2, label=name.replace("_", " "), zorder=3)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.08 * max([ceiling, *(row["gbps"] for row in rows)]))
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))
    axes.set_xlabel("keys and values that a step reads (rows of one size drawn side by side)")
    axes.set_ylabel("achieved GB/s")
    axes.grid(True, which="major", color=MUTED, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    times = axes.secondary_xaxis("top", functions=(lambda size: size / ceiling / 1e3, lambda us: us * ceiling * 1e3))
    times.xaxis.set_major_formatter(lambda value, _: f"{value:g} us")
    times.tick_params(labelsize=8, colors=MUTED, length=2)
    times.set_xlabel("time at the ceiling", fontsize=8, color=MUTED)
    times.spines["top"].set_visible(False)
    title(figure, axes, "Paged decode attention", machine)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.8), frameon=False, fontsize=9)
    save(figure, path)


def _places(rows: list[dict[str, Any]]) -> list[float]:
    """Where each row stands: at its size, a little to the right for each earlier row of about that size."""
    places: list[float] = []
    for row in rows:
        place = float(row["kv_bytes"])
        while any(0.97 < place / other < 1.03 for other in places):
            place *= 1.03
        places.append(place)
    return places


def _bars(axes: Any, rows: list[dict[str, Any]], places: list[float]) -> None:
    """Join our point with the best peer's, so that the eye sees which belong together."""
    for x, row in zip(places, rows, strict=True):
        if row["best_peer"]:
            axes.plot([x, x], [_rate(row, row["best_peer"]), row["gbps"]], color=OURS, alpha=0.45, linewidth=1.2, zorder=2)


def _rate(row: dict[str, Any], peer: str) -> float:
    """A peer's rate in 10^9 bytes a second."""
    return float(row["kv_bytes"] / row["peers"][peer]["us"] / 1e3)


def _size(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"
