"""The figure of a run: a roofline of the expert layer, and how close each shape comes to its floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal.bench.plot import INK, MUTED, OURS, new_figure, peer_styles, save, title
from hal.errors import HalError

__all__ = ["draw"]

_GROUP = "experts"


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw a run.

    Args:
        data: what the run's JSON file holds.
        path: file to write; its ending (.png, .svg, .pdf) decides the format.

    Raises:
        HalError: no row of the expert layer has a time, or the file cannot be written.
    """
    rows = [row for row in data["rows"] if row["group"] == _GROUP and row["us"] is not None]
    if not rows:
        raise HalError(f"no row of group {_GROUP} has a time, so there is nothing to draw; measure that group too")
    figure = new_figure(13.0, max(4.8, 1.6 + 0.26 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.0))
    styles = peer_styles(rows)
    _roofline(left, rows, data["ceilings"], styles)
    _fractions(right, rows, styles)
    title(figure, left, "Expert layer of mixtures of experts", data["machine"])
    save(figure, path)


def _roofline(axes: Any, rows: Sequence[dict[str, Any]], ceilings: dict[str, Any], styles: dict[str, tuple[str, str]]) -> None:
    """Rate of computing over operations per byte of weights, below the two ceilings."""
    peak, read = ceilings["matmul_tflops"], ceilings["read_gbps"]
    intensities = [_intensity(row) for row in rows]
    low, high, ridge = min(intensities) / 2, max([*intensities, 1e3 * peak / read]) * 3, 1e3 * peak / read
    axes.plot([low, ridge, high], [low * read / 1e3, peak, peak], color=INK, linewidth=1.4, zorder=1)
    axes.annotate(
        f"{ceilings['matmul']} matmul {peak:.3g} TFLOP/s", (high, peak), (0, 4), "data", "offset points", ha="right", fontsize=8.5, color=INK
    )
    place = (low * ridge) ** 0.5
    axes.annotate(
        f"streaming read {read:.0f} GB/s", (place, place * read / 1e3), (-6, 8), "data", "offset points", ha="right", fontsize=8.5, color=INK
    )
    axes.scatter(intensities, [row["tflops"] for row in rows], s=46, color=OURS, edgecolors="white", linewidths=0.8, label="hal", zorder=4)
    for name, (colour, mark) in styles.items():
        points = [(_intensity(row), row["flops"] / row["peers"][name]["us"] / 1e6) for row in rows if _time(row, name)]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=26, marker=mark, facecolors="none", edgecolors=colour, linewidths=1.1, label=name.replace("_", " "), zorder=3)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    axes.set_xlim(low, high)
    axes.set_xlabel("operations per byte of the experts touched")
    axes.set_ylabel("achieved TFLOP/s")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    _plain(axes)


def _fractions(axes: Any, rows: Sequence[dict[str, Any]], styles: dict[str, tuple[str, str]]) -> None:
    """Floor over time of each shape: 1 is the limit."""
    places = list(range(len(rows)))[::-1]
    for y, row in zip(places, rows, strict=True):
        fractions = [row["of_floor"], *(row["floor_us"] / row["peers"][name]["us"] for name in styles if _time(row, name))]
        axes.plot([min(fractions), max(fractions)], [y, y], color=MUTED, alpha=0.5, linewidth=1.2, zorder=1)
    axes.scatter([row["of_floor"] for row in rows], places, s=46, color=OURS, edgecolors="white", linewidths=0.8, zorder=4)
    for name, (colour, mark) in styles.items():
        points = [(row["floor_us"] / row["peers"][name]["us"], y) for y, row in zip(places, rows, strict=True) if _time(row, name)]
        if points:
            x, y_values = zip(*points, strict=True)
            axes.scatter(x, y_values, s=26, marker=mark, facecolors="none", edgecolors=colour, linewidths=1.1, zorder=3)
    axes.axvline(1.0, color=INK, linewidth=1.4)
    axes.set_yticks(places, [f"{row['case']}  {row['us']:.0f} us" for row in rows], fontsize=8.5)
    axes.set_xlim(0, 1.06)
    axes.set_xlabel("floor / time: 1 is what the ceilings allow")
    axes.set_title("microseconds are those of hal", loc="right", fontsize=8.5, color=MUTED)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.grid(True, which="major", color=MUTED, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _intensity(row: dict[str, Any]) -> float:
    """Operations per byte that has to be read."""
    return float(row["flops"] / row["bytes_read"])


def _time(row: dict[str, Any], peer: str) -> float | None:
    """A peer's time, None if it has none."""
    found: float | None = row["peers"].get(peer, {}).get("us")
    return found
