"""Tables of measured rows, for terminals (rich) and for documents (Markdown); one set of cells serves both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hal.bench.bars import Judgement
from hal.bench.cases import GROUPS
from hal.bench.host import HostRow, Scratch
from hal.bench.result import Result
from hal.bench.rows import PeerTime, Row

__all__ = ["line", "markdown", "render"]

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


@dataclass(frozen=True)
class Cells:
    """A table as text: the first column is words, the others are numbers; `good` says whether a row meets its bars (None: unjudged)."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    good: tuple[bool | None, ...]


def line(row: Row) -> str:
    """One line for a row as it comes."""
    head = f"{row.case.group:9} {row.case.name:34} {_mb(row):>7} MB"
    if row.us is None:
        return f"{head}  FAILED  {row.problem}"
    plain = "" if row.plan_us is None or row.no_plan_us is None else f" (no plan {row.no_plan_us:.1f})"
    text = f"{head}  {row.us:8.1f} us{plain}  {row.gbps or 0:6.0f} GB/s  {row.of_read or 0:.3f} of read"
    if row.ratio is not None and row.best_peer is not None:
        text += f"  ratio {row.ratio:.3f} to {row.best_peer[0]}"
    text += "".join(f"  {name} {_peer(peer)}" for name, peer in row.peers.items())
    text += "".join(f"\n          {name}: {peer.problem}" for name, peer in row.peers.items() if peer.problem)
    return text + "".join(f"\n          note: {note}" for note in row.notes)


def render(result: Result) -> RenderableType:
    """Return everything as something that rich can print."""
    parts: list[RenderableType] = [Text(_machine(result)), Text(_ceilings(result)), Text("")]
    for cells in _tables(result):
        table = Table(title=cells.title, title_justify="left", title_style="bold")
        for index, heading in enumerate(cells.head):
            table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index == 0)
        for row, good in zip(cells.rows, cells.good, strict=True):
            table.add_row(*(Text(cell) for cell in row), style={None: "", True: "green", False: "yellow"}[good])
        parts += [table, Text("")]
    return Group(*parts, *(Text(text) for text in _summary(result)))


def markdown(result: Result) -> str:
    """Return everything as Markdown."""
    parts = [_machine(result), "", _ceilings(result), "", result.method, ""]
    for cells in _tables(result):
        rules = ["---", *["---:"] * (len(cells.head) - 1)]
        parts += [f"### {cells.title}", "", *(f"| {' | '.join(row)} |" for row in (cells.head, rules, *cells.rows)), ""]
    summary = _summary(result)
    return (
        "\n".join([*parts, *(f"- {text.strip()}" if text.startswith("  ") else f"\n{text}\n" for text in summary)]).replace("\n\n\n", "\n\n") + "\n"
    )


def _tables(result: Result) -> Iterator[Cells]:
    bad = {(j.group, j.row): j.met for j in result.judgements}  # a later bar must not hide an earlier miss
    for judgement in result.judgements:
        if judgement.met is False:
            bad[judgement.group, judgement.row] = False
    for group in GROUPS:
        rows = [row for row in result.rows if row.case.group == group]
        if rows:
            peers = tuple(dict.fromkeys(name for row in rows for name in row.peers))
            good = tuple(bad.get((group, row.case.name)) for row in rows)
            yield Cells(TITLES[group], _head(rows, peers), tuple(_cells(row, rows, peers) for row in rows), good)
    if result.host:
        host = tuple((row.who, row.what, _number(row.us), row.problem) for row in result.host)
        yield Cells(TITLES["host"], ("who", "call", "us", "problem"), host, tuple(bad.get(("host", row.name)) for row in result.host))


def _head(rows: Sequence[Row], peers: tuple[str, ...]) -> tuple[str, ...]:
    based = ("/ base",) if any(row.case.base for row in rows) else ()
    ratio = ("best peer", "ours / best") if peers else ()
    return (
        "case",
        "KV MB",
        "floor us",
        "ours us",
        "no plan us",
        "GB/s",
        "of read",
        "of floor",
        *based,
        *(name.replace("_", " ") for name in peers),
        *ratio,
    )


def _cells(row: Row, rows: Sequence[Row], peers: tuple[str, ...]) -> tuple[str, ...]:
    cells = [row.case.name, _mb(row), f"{row.floor_us:.1f}", "failed" if row.us is None else _number(row.us), _number(row.no_plan_us)]
    cells += [_number(row.gbps, 0), _number(row.of_read, 3), _number(row.of_floor, 3)]
    if any(other.case.base for other in rows):
        base = next((other for other in rows if other.case.name == row.case.base), None)
        known = base is not None and base.ns_per_kb is not None and row.ns_per_kb is not None
        same_bytes = known and base is not None and row.case.group not in ("main", "batch")
        own, other = (row.us, base.us if base else None) if same_bytes else (row.ns_per_kb, base.ns_per_kb if base else None)
        cells.append(_number(own / other, 3) if known and own and other else "-")
    if peers:
        best = row.best_peer
        cells += [_peer(row.peers[name]) if name in row.peers else "-" for name in peers]
        cells += ["-" if best is None else best[0].replace("_", " "), _number(row.ratio, 3)]
    return tuple(cells)


def _machine(result: Result) -> str:
    m = result.machine
    return f"{m['gpu']}, torch {m['torch']}, Triton {m['triton']}, CUDA {m['cuda']}, hal {m['hal']}, served by {m['served_by']}, {m['date']}"


def _ceilings(result: Result) -> str:
    c = result.ceilings
    return f"Ceilings: streaming read {c.read_gbps:.0f} GB/s ({c.read_method}), bf16 {c.matmul_tflops:.0f} TFLOP/s (8192^3 matmul, random data)."


def _summary(result: Result) -> list[str]:
    texts = []
    present = {
        name: sum(1 for row in result.rows if name in row.peers and row.peers[name].us is not None) for row in result.rows for name in row.peers
    }
    if present:
        texts.append("Peers that ran and were right: " + ", ".join(f"{name} on {count} rows" for name, count in present.items()) + ".")
    for group, mean, count, total in result.means():
        texts.append(f"Geometric mean of ours / best peer, {group}: {mean:.3f} over {count} of {total} rows.")
    held = max((row.scratch_bytes or 0 for row in result.rows), default=0)
    if held:
        texts.append(f"Work memory that the kernels hold after all rows: {held / 2**20:.1f} MiB.")
    if result.scratch is not None:
        texts.append(_scratch(result.scratch))
    texts += _listed("Rows that miss a bar", [j for j in result.judgements if j.met is False])
    texts += _listed("Bars not judged, for want of a peer or of another row", [j for j in result.judgements if j.met is None])
    problems = _problems(result.rows)
    texts += ["Problems:", *problems] if problems else []
    if result.not_run:
        texts += [f"Not run: {len(result.not_run)} rows ({result.stopped}).", *(f"  {group} | {name}" for group, name in result.not_run)]
    met = sum(1 for j in result.judgements if j.met)
    return [*texts, f"{met} of {len(result.judgements)} bars met."] if result.judgements else texts


def _problems(rows: Sequence[Row]) -> list[str]:
    """What failed, each sentence once, with the rows that it came from."""
    found: dict[str, list[str]] = {}
    for row in rows:
        said = [f"ours: {row.problem}"] if row.problem else []
        said += [f"{name}: {peer.problem}" for name, peer in row.peers.items() if peer.problem]
        for sentence in [*said, *row.notes]:
            found.setdefault(sentence, []).append(f"{row.case.group} | {row.case.name}")
    return [f"  {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''} | {sentence}" for sentence, where in found.items()]


def _listed(title: str, judgements: Sequence[Judgement]) -> list[str]:
    return [f"{title}:", *(f"  {judgement}" for judgement in judgements)] if judgements else []


def _scratch(scratch: Scratch) -> str:
    after, before, largest = (f"{size / 2**20:.1f} MiB" for size in (scratch.after, scratch.before, scratch.largest))
    return f"Scratch: {after} after {scratch.calls} calls, {before} before; largest buffer {largest}."


def host_line(row: HostRow) -> str:
    """One line for a host row as it comes."""
    return f"host      {row.name:70} {'FAILED  ' + row.problem if row.us is None else f'{row.us:8.1f} us'}"


def _mb(row: Row) -> str:
    mb = row.case.kv_bytes / 1e6
    return f"{mb:.1f}" if mb < 20 else f"{mb:.0f}"


def _peer(peer: PeerTime) -> str:
    return _number(peer.us) if peer.us is not None else "wrong" if peer.problem.startswith("wrong") else "failed"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
