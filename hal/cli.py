"""The `hal` command.

Exit codes: 0 all well, 1 an error of `hal` (a message on standard error, no traceback) or a failed check, 2 wrong usage.
An exception that is not a HalError is a bug and keeps its traceback.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hal.errors import ConfigError, HalError, nearest
from hal.version import API_VERSION, CONTRACT_VERSION, __version__

__all__ = ["app", "main"]

_SETTINGS: dict[str, Any] = {"no_args_is_help": True, "pretty_exceptions_enable": False, "context_settings": {"help_option_names": ["-h", "--help"]}}
app = typer.Typer(help="Inference kernels: what this machine has, what serves each op, and why.", **_SETTINGS)
config_app = typer.Typer(help="Check, list and show YAML device configs.", **_SETTINGS)
app.add_typer(config_app, name="config")
bench_app = typer.Typer(help="Measure ops on this machine, beside other implementations.", **_SETTINGS)
app.add_typer(bench_app, name="bench")
tune_app = typer.Typer(help="Measure choices of speed on this machine, for the key `tuning` of a device config.", **_SETTINGS)
app.add_typer(tune_app, name="tune")

#: pytest's exit status -> ours; any other is 1.
_EXIT = {0: 0, 4: 2}

BackendOption = Annotated[str | None, typer.Option("--backend", "-b", help="Backend for every op: runs or fails, never degrades.")]
ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="YAML file, or the name of a shipped config.")]
AgainstOption = Annotated[Path | None, typer.Option("--against", metavar="PEERS.py", help="Python file with other implementations to compare with.")]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", metavar="TEXT", help="Only cases whose name contains it; may be repeated.")]
BenchJsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything there, after each row.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw rates and ceilings there.")]
MarkdownOption = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables there.")]
LimitOption = Annotated[float | None, typer.Option("--limit-seconds", metavar="N", min=0, help="Start no row after that many seconds.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run the command line; errors of `hal` become a message and exit code 1."""
    try:
        app(prog_name="hal")
    except HalError as error:
        print(f"hal: {error}", file=sys.stderr)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hal {__version__} (backend interface {API_VERSION}, op contracts {CONTRACT_VERSION})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the versions and exit.")] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: JsonFlag = False, backend: BackendOption = None, config: ConfigOption = None) -> None:
    """Show versions, devices, settings, backends, and what serves each op on each device, with the reasons.

    The exit code is 1 if a variable, a config or a backend name is wrong; the rest is shown all the same.
    """
    from hal.doctor import diagnose
    from hal.doctor_view import console, render_diagnosis

    found = diagnose(backend, config=config)
    if as_json:
        _print_json(found.to_dict())
    else:
        console().print(render_diagnosis(found))
    if found.problem:
        if as_json or not sys.stdout.isatty():  # on a terminal the tables have just said it
            print(f"hal: {found.problem}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="Name of an op, such as flash_decode.")],
    device: Annotated[str | None, typer.Option("--device", "-d", help="Such as cuda:0; default the first accelerator, else cpu.")] = None,
    as_json: JsonFlag = False,
    backend: BackendOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what would serve an op on a device, and every other backend with its reasons.

    The exit code is 1 if nothing can serve it.
    """
    from hal.backend import build_backend
    from hal.doctor_view import console, render_report

    report = build_backend(backend, config=config).explain(op, device=None if device is None else _device(device))
    if as_json:
        _print_json(report.to_dict())
    else:
        console().print(render_report(report))
    if report.chosen is None:
        raise typer.Exit(1)


@config_app.command()
def check(files: Annotated[list[str], typer.Argument(metavar="FILE...", help="YAML files, or names of shipped configs.")]) -> None:
    """Check configs. Every mistake is printed as file:line:column with the nearest valid name; the exit code is then 1."""
    from hal.backend import registry
    from hal.config_file import read, vocabulary

    known, failed = vocabulary(registry()), False
    for file in files:
        try:
            config = read(file, known).config
        except ConfigError as error:
            print(error, file=sys.stderr)
            failed = True
        else:
            print(f"{file}: ok ({config.name})")
    if failed:
        raise typer.Exit(1)


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of a config, with the ops and backends of this installation, for editors."""
    from hal.backend import registry
    from hal.config_file import vocabulary
    from hal.config_schema import json_schema

    _print_json(json_schema(vocabulary(registry())))


@config_app.command("list")
def list_configs() -> None:
    """List the configs that ship with hal."""
    from hal.backend import registry
    from hal.config_file import read, shipped, vocabulary

    known = vocabulary(registry())
    for name in shipped():
        print(f"{name:18} {read(name, known).description}")


@config_app.command()
def show(name: Annotated[str, typer.Argument(help="Name of a shipped config.")]) -> None:
    """Print a shipped config with its comments; a start for one of your own."""
    from hal import config_file

    known = config_file.shipped()
    if name not in known:
        raise ConfigError(f"no such shipped config; shipped are: {', '.join(known)};{nearest(name, known)}".rstrip(";"), f"config {name!r}")
    print(Path(config_file.shipped_path(name)).read_text(encoding="utf-8"), end="")


@app.command()
def conformance(
    backend: Annotated[str, typer.Option("--backend", "-b", help="Backend under test.")],
    device: Annotated[str | None, typer.Option("--device", "-d", help="Such as cuda:0; default cuda if there is one, else cpu.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the full report there.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write a short summary there.")] = None,
    waivers: Annotated[Path | None, typer.Option("--waivers", metavar="FILE", help="YAML list of known failures, with reason and link.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the random inputs.")] = None,
    keyword: Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Run only the cases that pytest's -k would select.")] = None,
) -> None:
    """Run the conformance suite against a backend.

    The exit code is 0 only if cases passed and none failed, 2 if the options are wrong, else 1.
    """
    _need("conformance", "pytest", "hypothesis")
    from hal.conformance.run import run

    status = run(backend, device=device, json_path=json_path, markdown_path=markdown_path, waivers=waivers, seed=seed, keyword=keyword)
    raise typer.Exit(_EXIT.get(status, 1))


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="One batch; several may differ in length.")] = None,
    batch: Annotated[Path | None, typer.Option("--batch", metavar="FILE", help="More prompts, one per line.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Folder, .gguf file or hub id; default SmolLM2-135M-Instruct.")] = None,
    backend: BackendOption = None,
    config: ConfigOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most new tokens of each prompt.")] = 64,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16 or bfloat16.")] = "float32",
    device: Annotated[str | None, typer.Option("--device", "-d", help="Such as cuda:0; default the first accelerator, else cpu.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it stands, without the model's chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens per second, and what served each op and why.")] = False,
) -> None:
    """Generate text with a real model, its attention and its KV cache served by hal."""
    if not prompts and batch is None:
        raise typer.BadParameter("give a prompt, or a file of prompts with --batch", param_hint="PROMPT")
    _need("transformers", "transformers", "gguf")
    from hal import generate as generation

    options = generation.GenerateOptions(
        model=model,
        backend=backend,
        config=config,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        offline=offline,
        raw=raw,
        stats=stats,
    )
    generation.generate([*(prompts or ()), *(generation.read_prompts(batch) if batch else ())], options)


@bench_app.command("decode")
def bench_decode(
    backend: BackendOption = None,
    against: AgainstOption = None,
    only: OnlyOption = None,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", help="main (default), fp8, mla, invariant, pages, groups, dims, qlen, window, batch, host or all; may be repeated."),
    ] = None,
    json_path: BenchJsonOption = None,
    plot: PlotOption = None,
    markdown: MarkdownOption = None,
    device: Annotated[str, typer.Option("--device", "-d", help="cuda, cuda:N, or cpu for one step of the reference beside transformers'.")] = "cuda",
    limit_seconds: LimitOption = None,
) -> None:
    """Measure flash_decode: time, rate of reading keys and values, and how close that is to what the GPU can.

    The read ceiling is measured first. With --against, each implementation of that file runs on the same buffers under the
    same timer; one that fails or is wrong is reported and never counts as beaten.
    """
    from hal.bench.decode.run import run
    from hal.bench.run import Options

    run(Options(backend, against, tuple(only or ()), tuple(group or ("main",)), json_path, plot, markdown, device, limit_seconds))


@bench_app.command("moe")
def bench_moe(
    backend: BackendOption = None,
    against: AgainstOption = None,
    only: OnlyOption = None,
    group: Annotated[list[str] | None, typer.Option("--group", help="experts and routing (default), quant, host or all; may be repeated.")] = None,
    json_path: BenchJsonOption = None,
    plot: PlotOption = None,
    markdown: MarkdownOption = None,
    device: Annotated[str, typer.Option("--device", "-d", help="cuda, cuda:N, or cpu for tiny shapes.")] = "cuda",
    limit_seconds: LimitOption = None,
) -> None:
    """Measure fused_moe and topk_softmax: time, work memory, and how close that is to what the GPU can.

    The read ceiling and the rate of a large matrix product are measured first. PyTorch's own implementations and, with
    --against, those of that file run on the same data under the same timer; one that fails or is wrong is reported and never
    counts as beaten.
    """
    from hal.bench.moe.run import run
    from hal.bench.run import Options

    run(Options(backend, against, tuple(only or ()), tuple(group or ("experts", "routing")), json_path, plot, markdown, device, limit_seconds))


@bench_app.command("plot")
def bench_plot(
    run_json: Annotated[Path, typer.Argument(metavar="RUN.json", help="What hal bench decode or moe wrote with --json.")],
    picture: Annotated[Path, typer.Argument(metavar="FILE.png", help="Picture to write; .svg and .pdf work too.")],
) -> None:
    """Draw the plot of an earlier run: for machines without matplotlib."""
    from hal.bench.plot import draw_file

    draw_file(run_json, picture)


@tune_app.command("moe")
def tune_moe(
    experts: Annotated[int, typer.Option("--experts", "-E", min=1, help="Experts that one device holds.")],
    hidden: Annotated[int, typer.Option("--hidden", "-H", min=1, help="Hidden size.")],
    inner: Annotated[int, typer.Option("--inner", "-I", min=1, help="Intermediate size that one device holds.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="Experts for each token.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.yaml", help="File to write; entries of other shapes in it are kept.")],
    tokens: Annotated[str, typer.Option("--tokens", "-t", metavar="N,N,...", help="Numbers of tokens.")] = "1,4,16,64,256,1024,4096",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    transposed: Annotated[bool, typer.Option("--transposed", help="Weights are stored (E, K, N), as gpt-oss has them.")] = False,
    device: Annotated[str, typer.Option("--device", "-d", help="Such as cuda:0.")] = "cuda:0",
    limit_seconds: Annotated[float | None, typer.Option("--limit-seconds", metavar="N", min=0, help="Start no candidate after that.")] = None,
) -> None:
    """Measure tiles, warps and stages of fused_moe for given experts, and write the best of each number of tokens to a file.

    A device config takes it up with `tuning: FILE.yaml`. It changes speed only.
    """
    counts = tuple(int(part) for part in tokens.split(",") if part.strip().isdecimal() and part.isascii())
    if not counts or len(counts) != len(tokens.split(",")) or min(counts) < 1:
        raise typer.BadParameter(f"{tokens!r} is no list of numbers such as 1,16,256", param_hint="--tokens")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"{dtype!r} is none of bfloat16, float16, float32", param_hint="--dtype")
    if top_k > experts:
        raise typer.BadParameter(f"{top_k} choices of {experts} experts", param_hint="--top-k")
    _need("triton", "triton")
    from hal.tune_moe import TuneOptions
    from hal.tune_moe import tune_moe as measure

    measure(TuneOptions(experts, hidden, inner, top_k, counts, dtype, not transposed, device, output, limit_seconds))


def _device(text: str) -> str:
    """Return a device of this machine as torch names it, or raise a usage error that lists them."""
    from hal.device import local_devices

    here = [f"{device.type}:{device.index}" for device in local_devices()]
    found = text if ":" in text else f"{text}:0"
    if found not in here:
        raise typer.BadParameter(f"{text!r} is no device of this machine; it has {', '.join(here)}", param_hint="--device")
    return found


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _need(extra: str, *modules: str) -> None:
    """Raise a HalError that says what to install, if one of the modules is not there."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise HalError(f"this command needs {', '.join(missing)}, which this Python does not have; install with: pip install 'hal-kernels[{extra}]'")
