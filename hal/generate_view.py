"""What `hal generate` shows: text as it comes, then speed and who served which op."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hal.report import Report

if TYPE_CHECKING:
    from hal.generate import Stats

__all__ = ["Printer", "print_stats"]

_INCOMPLETE = "\ufffd"


class Printer:
    """A streamer for transformers' `generate`: prints one answer token by token, several each when it ends.

    Args:
        prompts: what was asked.
        tokenizer: of the model.
        ends: token ids that end an answer.
        console: where to print.

    Attributes:
        tokens: the answers' token ids so far, without end tokens and what follows them.
        times: seconds of the start and of the arrival of each step's tokens on the host.
    """

    def __init__(self, prompts: list[str], tokenizer: Any, ends: list[int], console: Console) -> None:
        self.prompts, self.tokenizer, self.ends, self.console = prompts, tokenizer, ends, console
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.times: list[float] = []
        self._open = set(range(len(prompts)))
        self._prompt_seen = False
        self._shown = 0
        self._line = 0

    def start(self) -> None:
        """Start the clock."""
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        """Take the prompt, then the next token of each sequence."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        for index, token in enumerate(value.tolist()):
            if index in self._open:
                self._take(index, token)

    def end(self) -> None:
        """Print what is still open."""
        for index in sorted(self._open):
            self._close(index)

    def texts(self) -> list[str]:
        """The answers as text."""
        return [self._decode(tokens) for tokens in self.tokens]

    def _take(self, index: int, token: int) -> None:
        if token in self.ends:
            self._open.discard(index)
            self._close(index)
            return
        self.tokens[index].append(token)
        if len(self.prompts) == 1:
            self._stream(final=False)

    def _close(self, index: int) -> None:
        if len(self.prompts) == 1:
            self._stream(final=True)
            self.console.out("")
            return
        self.console.print(Rule(Text(f"{index + 1}/{len(self.prompts)}  {self.prompts[index]}"), align="left"))
        self.console.out(self._decode(self.tokens[index]), highlight=False)

    def _stream(self, *, final: bool) -> None:
        """Print what the last token added to the current line, unless it ends inside a character."""
        text = self._decode(self.tokens[0][self._line :])
        if text.endswith(_INCOMPLETE) and not final:
            return
        self.console.out(text[self._shown :], end="", highlight=False)
        self.console.file.flush()
        self._shown = len(text)
        if text.endswith("\n"):  # a line is complete: what follows decodes alike without it
            self._line, self._shown = len(self.tokens[0]), 0

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def print_stats(stats: Stats, console: Console) -> None:
    """Print speed, the proof, and one row per decision of the dispatcher."""
    console.print()
    console.print(_speed(stats))
    console.print(_served(stats))


def _speed(stats: Stats) -> Table:
    table = Table(title=f"{stats.model}, {stats.dtype} on {stats.device}, {stats.prompts} prompt(s)", title_justify="left")
    for heading in ("", "tokens", "seconds", "tokens/s", "measured"):
        table.add_column(heading, justify="right" if heading in ("tokens", "seconds", "tokens/s") else "left")
    rows = (
        ("prefill", stats.prompt_tokens, stats.prefill_seconds, stats.prefill_rate, "call of generate to the first token"),
        ("decode", max(stats.new_tokens - stats.prompts, 0), stats.decode_seconds, stats.decode_rate, "first token to the last"),
    )
    for phase, tokens, seconds, rate, how in rows:
        table.add_row(phase, str(tokens), f"{seconds:.3f}", f"{rate:.1f}", how)
    return table


def _served(stats: Stats) -> Table:
    attention = stats.calls("flash_prefill", "flash_decode")
    caption = (
        f"{stats.layers} layers x {stats.steps} forward passes = {stats.layers * stats.steps} attention calls; "
        f"hal served {attention}, and {stats.calls('write_kv')} KV writes"
    )
    if stats.expert_layers:
        caption += (
            f"\n{stats.expert_layers} layers of experts x {stats.steps} = {stats.expert_layers * stats.steps}; hal served {stats.calls('fused_moe')}"
        )
    table = Table(title="who served which op, and why", title_justify="left", caption=caption, caption_justify="left")
    for heading in ("op", "served by", "calls", "decided by", "not served by"):
        table.add_column(heading, justify="right" if heading == "calls" else "left", overflow="fold")
    for report in _distinct(stats.decisions):
        calls = stats.served.get((report.op, report.chosen or ""), 0)
        rejected = "\n".join(f"{c.backend}: {reason}" for c in report.candidates if c.listed for reason in c.reasons)
        why = str(report.choice.source) + (f": {report.choice.reason}" if report.choice.reason else "")
        table.add_row(report.op, report.chosen or "", str(calls), Text(why), Text(rejected or "-"))
    return table


def _distinct(decisions: list[Report]) -> list[Report]:
    """One report for each op and backend: distinct calls of one op are often decided alike."""
    return list({(report.op, report.chosen): report for report in decisions}.values())
