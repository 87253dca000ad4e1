"""The roofline plot of a run: rate of reading keys and values over their size, with the read ceiling."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hal.bench.result import SCHEMA
from hal.errors import HalError

__all__ = ["draw", "draw_file", "need_matplotlib"]

#: Groups that a plot shows: rows that memory bounds.
_GROUPS = ("main",)
_OURS, _INK, _MUTED = "#d1495b", "#222222", "#8a8f98"
#: Colours and marks of peers, in order of appearance; distinguishable also in grey and for the colour-blind.
_PEERS = (("#0072b2", "s"), ("#e69f00", "^"), ("#009e73", "D"), ("#7b5ea7", "v"), ("#56b4e9", "P"), ("#8c6d31", "X"))


def need_matplotlib() -> None:
    """Raise HalError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise HalError("--plot needs matplotlib, which this Python does not have; install it with: pip install 'hal-kernels[plots]'")


def draw_file(run: Path, path: Path) -> None:
    """Draw the run that a JSON file holds."""
    need_matplotlib()
    try:
        data = json.loads(run.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HalError(f"bench plot {run}: cannot be read as JSON ({error}); give the file that `hal bench decode --json` wrote") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise HalError(f"bench plot {run}: its schema is {schema!r}, not {SCHEMA!r}; give the file that `hal bench decode --json` wrote")
    draw(data, path)


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw a run.

    Args:
        data: what the run's JSON file holds.
        path: file to write; its ending (.png, .svg, .pdf) decides the format.
    """
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in data["rows"] if row["us"] is not None and row["group"] in _GROUPS] or [r for r in data["rows"] if r["us"] is not None]
    ceiling, machine, places = data["ceilings"]["read_gbps"], data["machine"], _places(rows)
    figure = Figure(figsize=(9.5, 5.8), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(ceiling, color=_INK, linewidth=1.4)
    axes.axhspan(0.95 * ceiling, ceiling, color=_INK, alpha=0.06, linewidth=0)
    axes.annotate(f"read ceiling {ceiling:.0f} GB/s", (0.012, ceiling), (0, 4), ("axes fraction", "data"), "offset points", color=_INK, fontsize=9)
    _bars(axes, rows, places)
    axes.scatter(places, [row["gbps"] for row in rows], s=48, marker="o", color=_OURS, edgecolors="white", linewidths=0.8, label="hal", zorder=4)
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    for name, (colour, mark) in zip(names, _PEERS * (1 + len(names) // len(_PEERS)), strict=False):
        points = [(x, _rate(row, name)) for x, row in zip(places, rows, strict=True) if row["peers"].get(name, {}).get("us")]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=26, marker=mark, facecolors="none", edgecolors=colour, linewidths=1.2, label=name.replace("_", " "), zorder=3)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.08 * max([ceiling, *(row["gbps"] for row in rows)]))
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))
    axes.set_xlabel("keys and values that a step reads (rows of one size drawn side by side)")
    axes.set_ylabel("achieved GB/s")
    axes.grid(True, which="major", color=_MUTED, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    times = axes.secondary_xaxis("top", functions=(lambda size: size / ceiling / 1e3, lambda us: us * ceiling * 1e3))
    times.xaxis.set_major_formatter(lambda value, _: f"{value:g} us")
    times.tick_params(labelsize=8, colors=_MUTED, length=2)
    times.set_xlabel("time at the ceiling", fontsize=8, color=_MUTED)
    times.spines["top"].set_visible(False)
    where = f"torch {machine['torch']}, Triton {machine['triton']}, CUDA {machine['cuda']}, {machine['date']}"
    figure.suptitle(f"Paged decode attention on {machine['gpu']}", x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    axes.set_title(where, loc="left", fontsize=8.5, color=_MUTED)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.8), frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # no such folder, or an ending that matplotlib does not know
        raise HalError(f"the plot cannot be written to {path}: {error}") from error


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
            axes.plot([x, x], [_rate(row, row["best_peer"]), row["gbps"]], color=_OURS, alpha=0.45, linewidth=1.2, zorder=2)


def _rate(row: dict[str, Any], peer: str) -> float:
    """A peer's rate in 10^9 bytes a second."""
    return float(row["kv_bytes"] / row["peers"][peer]["us"] / 1e3)


def _size(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"
