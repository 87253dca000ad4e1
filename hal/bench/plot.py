"""What the figures of all benchmarks share, and which benchmark draws an earlier run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hal.errors import HalError

__all__ = ["INK", "MUTED", "OURS", "draw_file", "need_matplotlib", "new_figure", "peer_styles", "save", "title"]

#: Schema of a run's JSON file -> module whose `draw` draws it.
_DRAWN_BY = {"hal.bench.decode/1": "hal.bench.decode.plot", "hal.bench.moe/1": "hal.bench.moe.plot"}
OURS, INK, MUTED = "#d1495b", "#222222", "#8a8f98"
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
        raise HalError(f"bench plot {run}: cannot be read as JSON ({error}); give the file that `hal bench ... --json` wrote") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in _DRAWN_BY:
        raise HalError(
            f"bench plot {run}: its schema is {schema!r}; drawn are: {', '.join(_DRAWN_BY)}. Give the file that `hal bench ... --json` wrote"
        )
    import_module(_DRAWN_BY[schema]).draw(data, path)


def new_figure(width: float, height: float) -> Any:
    """Return a figure that needs no display."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def title(figure: Any, axes: Any, what: str, machine: dict[str, str]) -> None:
    """Say what is drawn, and what it was measured on."""
    where = f"torch {machine['torch']}, Triton {machine['triton']}, CUDA {machine['cuda']}, {machine['date']}"
    figure.suptitle(f"{what} on {machine['gpu']}", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes.set_title(where, loc="left", fontsize=8.5, color=MUTED)


def peer_styles(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Colour and mark of each peer of the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    return dict(zip(names, _PEERS * (1 + len(names) // len(_PEERS)), strict=False))


def save(figure: Any, path: Path) -> None:
    """Write the figure; the file's ending (.png, .svg, .pdf) decides the format."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # no such folder, or an ending that matplotlib does not know
        raise HalError(f"the plot cannot be written to {path}: {error}") from error
