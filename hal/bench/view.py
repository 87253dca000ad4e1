"""Tables of measured rows, for terminals (rich) and for documents (Markdown); one set of cells serves both.

What a table of rows looks like, and what else is worth a sentence, is each benchmark's matter: a `View`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hal.bench.bars import Judgement
from hal.bench.host import HostRow
from hal.bench.result import Result
from hal.bench.rows import PeerTime, Row

__all__ = ["View", "best_cells", "host_line", "line_of_peers", "markdown", "megabytes", "number", "ours", "peer_cells", "render"]

R = TypeVar("R", bound=Row[Any])


@dataclass(frozen=True)
class View(Generic[R]):
    """What a benchmark adds to the shared tables.

    Attributes:
        titles: of the tables, by group, in their order; `host` among them.
        head: columns of a table, from its rows and the names of their peers.
        cells: the same of one row, from it, all rows of its group, and the peers.
        notes: sentences beside those that every benchmark has.
    """

    titles: Mapping[str, str]
    head: Callable[[Sequence[R], tuple[str, ...]], tuple[str, ...]]
    cells: Callable[[R, Sequence[R], tuple[str, ...]], tuple[str, ...]]
    notes: Callable[[Any], list[str]]


def megabytes(size: float) -> str:
    """A number of bytes in MB, as a cell."""
    mb = size / 1e6
    return f"{mb:.1f}" if mb < 20 else f"{mb:.0f}"


@dataclass(frozen=True)
class Cells:
    """A table as text: the first column is words, the others are numbers; `good` says whether a row meets its bars (None: unjudged)."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    good: tuple[bool | None, ...]


def render(result: Result[R], view: View[R]) -> RenderableType:
    """Return everything as something that rich can print."""
    parts: list[RenderableType] = [Text(_machine(result)), Text(_ceilings(result)), Text("")]
    for cells in _tables(result, view):
        table = Table(title=cells.title, title_justify="left", title_style="bold")
        for index, heading in enumerate(cells.head):
            table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index == 0)
        for row, good in zip(cells.rows, cells.good, strict=True):
            table.add_row(*(Text(cell) for cell in row), style={None: "", True: "green", False: "yellow"}[good])
        parts += [table, Text("")]
    return Group(*parts, *(Text(text) for text in _summary(result, view)))


def markdown(result: Result[R], view: View[R]) -> str:
    """Return everything as Markdown."""
    parts = [_machine(result), "", _ceilings(result), "", result.method, ""]
    for cells in _tables(result, view):
        rules = ["---", *["---:"] * (len(cells.head) - 1)]
        parts += [f"### {cells.title}", "", *(f"| {' | '.join(row)} |" for row in (cells.head, rules, *cells.rows)), ""]
    summary = _summary(result, view)
    return (
        "\n".join([*parts, *(f"- {text.strip()}" if text.startswith("  ") else f"\n{text}\n" for text in summary)]).replace("\n\n\n", "\n\n") + "\n"
    )


def _tables(result: Result[R], view: View[R]) -> Iterator[Cells]:
    bad = {(j.group, j.row): j.met for j in result.judgements}  # a later bar must not hide an earlier miss
    for judgement in result.judgements:
        if judgement.met is False:
            bad[judgement.group, judgement.row] = False
    for group, title in view.titles.items():
        rows = [row for row in result.rows if row.case.group == group]
        if rows:
            peers = tuple(dict.fromkeys(name for row in rows for name in row.peers))
            good = tuple(bad.get((group, row.case.name)) for row in rows)
            yield Cells(title, view.head(rows, peers), tuple(view.cells(row, rows, peers) for row in rows), good)
    if result.host:
        host = tuple((row.who, row.what, number(row.us), row.problem) for row in result.host)
        yield Cells(view.titles["host"], ("who", "call", "us", "problem"), host, tuple(bad.get(("host", row.name)) for row in result.host))


def ours(row: Row[Any]) -> str:
    """Our time."""
    return "skipped" if row.skipped else "failed" if row.us is None else number(row.us)


def peer_cells(row: Row[Any], peers: tuple[str, ...]) -> list[str]:
    """Times of the peers."""
    return [_peer(row.peers[name]) if name in row.peers else "-" for name in peers]


def best_cells(row: Row[Any]) -> list[str]:
    """The best peer and the ratio to it."""
    return ["-" if row.best_peer is None else row.best_peer[0].replace("_", " "), number(row.ratio, 3)]


def line_of_peers(row: Row[Any]) -> str:
    """What a row's line says of peers."""
    text = "" if row.ratio is None or row.best_peer is None else f"  ratio {row.ratio:.3f} to {row.best_peer[0]}"
    text += "".join(f"  {name} {_peer(peer)}" for name, peer in row.peers.items())
    text += "".join(f"\n          {name}: {peer.problem}" for name, peer in row.peers.items() if peer.problem)
    return text + "".join(f"\n          note: {note}" for note in row.notes)


def host_line(row: HostRow) -> str:
    """One line for a host row as it comes."""
    return f"host      {row.name:70} {'FAILED  ' + row.problem if row.us is None else f'{row.us:8.1f} us'}"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _machine(result: Result[Any]) -> str:
    m = result.machine
    return f"{m['gpu']}, torch {m['torch']}, Triton {m['triton']}, CUDA {m['cuda']}, hal {m['hal']}, served by {m['served_by']}, {m['date']}"


def _ceilings(result: Result[Any]) -> str:
    c = result.ceilings
    others = "".join(f", {dtype} {rate:.3g}" for dtype, rate in c.quantised_tflops.items() if isinstance(rate, float))
    return (
        f"Ceilings: streaming read {c.read_gbps:.0f} GB/s ({c.read_method}), {c.matmul_tflops:.3g} TFLOP/s ({c.matmul} matmul, random data{others})."
    )


def _summary(result: Result[R], view: View[R]) -> list[str]:
    texts = []
    present = {
        name: sum(1 for row in result.rows if name in row.peers and row.peers[name].us is not None) for row in result.rows for name in row.peers
    }
    if present:
        texts.append("Peers that ran and were right: " + ", ".join(f"{name} on {count} rows" for name, count in present.items()) + ".")
    for group, mean, count, total in result.means():
        texts.append(f"Geometric mean of ours / best peer, {group}: {mean:.3f} over {count} of {total} rows.")
    texts += view.notes(result)
    texts += _listed("Rows that miss a bar", [j for j in result.judgements if j.met is False])
    texts += _listed("Bars not judged, for want of a peer or of another row", [j for j in result.judgements if j.met is None])
    problems = _problems(result.rows)
    texts += ["Problems:", *problems] if problems else []
    if result.not_run:
        texts += [f"Not run: {len(result.not_run)} rows ({result.stopped}).", *(f"  {group} | {name}" for group, name in result.not_run)]
    met = sum(1 for j in result.judgements if j.met)
    return [*texts, f"{met} of {len(result.judgements)} bars met."] if result.judgements else texts


def _problems(rows: Sequence[Row[Any]]) -> list[str]:
    """What failed or was skipped, each sentence once, with the rows that it came from."""
    found: dict[str, list[str]] = {}
    for row in rows:
        said = [f"ours: {row.problem}"] if row.problem else [f"skipped: {row.skipped}"] if row.skipped else []
        said += [f"{name}: {peer.problem}" for name, peer in row.peers.items() if peer.problem]
        for sentence in [*said, *row.notes]:
            found.setdefault(sentence, []).append(f"{row.case.group} | {row.case.name}")
    return [f"  {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''} | {sentence}" for sentence, where in found.items()]


def _listed(title: str, judgements: Sequence[Judgement]) -> list[str]:
    return [f"{title}:", *(f"  {judgement}" for judgement in judgements)] if judgements else []


def _peer(peer: PeerTime) -> str:
    return number(peer.us) if peer.us is not None else "wrong" if peer.problem.startswith("wrong") else "failed"
