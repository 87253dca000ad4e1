"""Tokens per second of `generate` with attention by `hal` and by transformers' own SDPA path, side by side.

    python tests/bench/generate_speed.py [--batches 1 4 16] [--device cuda] [--dtype bfloat16] [--random-weights]

Both paths run the same weights (one model object, its attention switched), the same random prompts and settings, and
always the full number of new tokens. Runs alternate, and which path goes first alternates too; the table shows medians
and the ratio of medians. `--cpu-time` counts processor seconds instead of wall seconds (with `--threads 1`: for machines
that others use at the same time). In fp32 both paths must produce the same tokens, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hal
import hal.integrations.transformers as hal_transformers
from hal.models import find_model, load_model, parse_dtype

PATHS = ("sdpa", "hal")


class Clock:
    """A streamer that notes when each step's tokens arrive on the host."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.times = now, [now()]

    def put(self, value: Tensor) -> None:
        """Note one step; the first call brings the prompt and is dropped."""
        self.times.append(self.now())

    def end(self) -> None:
        """Nothing is held back."""


def smollm2_of_random_weights(dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of SmolLM2-135M's architecture with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, rms_norm_eps=1e-5, pad_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(device, dtype).eval()


def measure(model: Any, path: str, ids: Tensor, mask: Tensor, new_tokens: int, now: Callable[[], float]) -> tuple[Tensor, float, float]:
    """Return the new tokens, and the seconds of prefill (to the first token) and of decode (to the last)."""
    from transformers import GenerationConfig

    model.set_attn_implementation(path)
    settings = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0, eos_token_id=None)
    kwargs = hal_transformers.PagedCache.for_model(model).as_kwargs() if path == "hal" else {}
    clock = Clock(now)
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings, streamer=clock, **kwargs)
    start, _, first, *_ = clock.times
    return out[:, ids.shape[1] :], first - start, clock.times[-1] - first


def compare(model: Any, batch: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure both paths alternately on one batch size and return their medians in tokens per second."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, model.config.vocab_size, (batch, options.prompt_tokens), generator=generator).to(device)
    mask = torch.ones_like(ids)
    if options.padded:
        for sequence in range(1, batch):
            mask[sequence, : sequence * (options.prompt_tokens - 1) // batch] = 0
    now = time.process_time if options.cpu_time else time.perf_counter
    tokens = {path: measure(model, path, ids, mask, options.new_tokens, now)[0] for path in PATHS}  # warms up, too
    if options.dtype in ("float32", "fp32") and not torch.equal(tokens["sdpa"], tokens["hal"]):
        raise SystemExit(f"batch {batch}: the paths produced different tokens")
    seconds: dict[str, list[tuple[float, float]]] = {path: [] for path in PATHS}
    for run in range(options.runs):
        for path in PATHS if run % 2 == 0 else reversed(PATHS):
            seconds[path].append(measure(model, path, ids, mask, options.new_tokens, now)[1:])
    row: dict[str, Any] = {"batch": batch}
    for path in PATHS:
        prefill, decode = (statistics.median(values) for values in zip(*seconds[path], strict=True))
        whole = statistics.median(a + b for a, b in seconds[path])
        row[path] = {
            "prefill": int(mask.sum()) / prefill,
            "decode": batch * (options.new_tokens - 1) / decode,
            "whole": batch * options.new_tokens / whole,
        }
    row["ratio"] = {phase: row["hal"][phase] / row["sdpa"][phase] for phase in row["hal"]}
    return row


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", help="as of `hal generate`; default SmolLM2-135M-Instruct")
    parser.add_argument("--random-weights", action="store_true", help="the default model's architecture, without its weights")
    parser.add_argument("--padded", action="store_true", help="prompts of different lengths, padded on the left")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), parse_dtype(options.dtype)
    hal_transformers.register()
    model = (
        smollm2_of_random_weights(dtype, device) if options.random_weights else load_model(find_model(options.model), dtype=dtype, device=device)[0]
    )
    rows = [compare(model, batch, options, device) for batch in options.batches]
    kind = "processor" if options.cpu_time else "wall"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"tokens per {kind} second, {options.prompt_tokens} prompt + {options.new_tokens} new, {options.dtype}, {where}, median of {options.runs}"
    table = Table("batch", *(f"{phase} {what}" for phase in ("prefill", "decode", "whole") for what in ("sdpa", "hal", "ratio")), title=title)
    for row in rows:
        cells = [(f"{row['sdpa'][p]:.1f}", f"{row['hal'][p]:.1f}", f"{row['ratio'][p]:.3f}") for p in ("prefill", "decode", "whole")]
        table.add_row(str(row["batch"]), *(cell for group in cells for cell in group))
    Console(width=150).print(table)
    for report in {(r.op, r.chosen): r for r in hal.get_backend().decisions()}.values():
        print(f"{report.op}: {report.chosen} (decided by {report.choice.source})")
    if options.json:
        options.json.write_text(json.dumps({"title": title, "torch": torch.__version__, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
