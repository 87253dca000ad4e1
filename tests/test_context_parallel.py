"""The worked example of a context split over ranks: right with any number of them, and wrong backends do not get through."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.conformance.runs import ROOT, environment
from tests.examples.context_parallel import place

SCRIPT = ROOT / "tests" / "examples" / "context_parallel.py"
DOCUMENT = ROOT / "docs" / "context_parallel.md"
SIZES = ("--heads", "6", "--kv-heads", "2", "--head-dim", "32")
GPUS = torch.cuda.device_count()
PAGE = 16
TIMEOUT_S = 180


class Ran(NamedTuple):
    code: int
    report: dict[str, Any]
    text: str


def torchrun(ranks: int, *arguments: str, script: Path = SCRIPT) -> Ran:
    """Run the example under torchrun; its report is the one line of JSON on standard output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script), *arguments, "--json"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers
        _, err = process.communicate(timeout=60)
        pytest.fail(f"{ranks} ranks did not end within {TIMEOUT_S} s: {err[-3000:]}")
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert len(lines) <= 1, out
    return Ran(process.returncode, json.loads(lines[0]) if lines else {}, out + err)


def held(length: int, sequence: int, rank: int, ranks: int) -> int:
    """Keys of a sequence on a rank, counted one by one."""
    return sum((sequence + key // PAGE) % ranks == rank for key in range(length))


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float16")])
def test_on_the_cpu(ranks: int, dtype: str) -> None:
    batches = [[700], [0, 1, 16, 17, 333], [0]]
    given = [text for batch in batches for text in ("--keys", *map(str, batch))]
    ran = torchrun(ranks, "--device", "cpu", "--dtype", dtype, *given, *SIZES)
    assert ran.code == 0, ran.text
    assert (ran.report["ranks"], ran.report["device"], ran.report["backend"]) == (ranks, "cpu", "reference")
    assert [b["keys"] for b in ran.report["batches"]] == batches
    for batch in ran.report["batches"]:
        assert batch["held"] == [[held(n, b, r, ranks) for b, n in enumerate(batch["keys"])] for r in range(ranks)]
        assert batch["problems"] == []
        errors = batch["errors"]
        assert {"unsplit", "split", "split, lse", "merge", f"split, parts rounded to {dtype}"} <= set(errors)
        # fp32 parts lose nothing that q's dtype would: the reference computes in fp32.
        assert errors["split"] < 2e-5
        assert errors["merge"] < 2e-6
        if dtype != "float32" and any(batch["keys"]):
            assert errors[f"split, parts rounded to {dtype}"] > 10 * errors["split"] > 0


WRONG = {
    "the merge averages": (
        """
@functools.wraps(merge)
def merge_states(out_a, lse_a, out_b, lse_b, **options):
    _, lse = merge(out_a, lse_a, out_b, lse_b, **options)
    return (out_a + out_b) / 2, lse
""",
        "split: ",
    ),
    "an empty part weighs": (
        """
@functools.wraps(attention)
def flash_decode(q, *caches, **options):
    attention(q, *caches, **options)
    options["lse"].clamp_(min=-3.0)
    return options["out"]
""",
        "a sequence without keys here is not (0, -inf)",
    ),
    "tokens of other ranks are written": (
        """
@functools.wraps(write)
def write_kv(key, value, k_cache, v_cache, slot_mapping, **options):
    slots = torch.where(slot_mapping < 0, torch.arange(len(slot_mapping)), slot_mapping)
    write(key, value, k_cache, v_cache, slots, **options)
""",
        "split: ",
    ),
    "ranks differ": (
        """
@functools.wraps(merge)
def merge_states(*states, **options):
    out, lse = merge(*states, **options)
    return out * (1 + 1e-6 * dist.get_rank()), lse
""",
        "the ranks hold different results",
    ),
}
PROGRAM = """
import functools, runpy, torch
import torch.distributed as dist
from hal.backends import reference_attention, reference_kv, reference_states

attention, write, merge = reference_attention.flash_decode, reference_kv.write_kv, reference_states.merge_states
{wrong}
for module in (reference_attention, reference_kv, reference_states):
    vars(module).update({{name: value for name, value in globals().items() if name in ("flash_decode", "write_kv", "merge_states")}})
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_backends_are_noticed(wrong: str, tmp_path: Path) -> None:
    code, problem = WRONG[wrong]
    program = tmp_path / "wrong.py"
    program.write_text(PROGRAM.format(wrong=code, script=str(SCRIPT)))
    ran = torchrun(2, "--device", "cpu", "--dtype", "float32", "--keys", "9", "200", *SIZES, script=program)
    assert ran.code == 1, ran.text
    (batch,) = ran.report["batches"]
    assert any(problem in text for text in batch["problems"]), batch["problems"]


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, this machine has {GPUS}")
def test_on_two_gpus() -> None:
    ran = torchrun(2, "--device", "cuda", "--keys", "20000", "--keys", "0", "1", "16", "3000")
    assert ran.code == 0, ran.text
    for batch in ran.report["batches"]:
        assert batch["problems"] == []
        assert "split, from a CUDA graph" in batch["errors"]
        assert all(us > 0 for hows in batch["us"].values() for by_rank in hows.values() for us in by_rank)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keys", "-3"), "argument --keys: '-3' is not an integer in 0..2147483647"),
        (("--keys", "5", "--heads", "7"), "`num_heads` is 7; accepted: a multiple of the 8 kv heads"),
    ],
)
def test_wrong_arguments_are_messages(arguments: tuple[str, ...], message: str) -> None:
    ran = torchrun(1, "--device", "cpu", *arguments)
    assert ran.code != 0
    assert message in ran.text
    assert 'context_parallel.py", line' not in ran.text  # no traceback of the program


def test_without_torchrun_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu"], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "start it with torchrun --nproc-per-node 2" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 1000])
def test_every_key_has_one_owner_which_numbers_its_keys_in_order(length: int, ranks: int) -> None:
    for sequence in range(3):
        places = torch.stack([place(length, sequence, r, ranks, PAGE) for r in range(ranks)])
        assert ((places >= 0).sum(dim=0) == 1).all()
        counts = [int((p >= 0).sum()) for p in places]
        assert all(p[p >= 0].tolist() == list(range(n)) for p, n in zip(places, counts, strict=True))
        assert max(counts) - min(counts) <= PAGE


def test_code_of_the_document_is_that_of_the_program() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 2
    assert [b for b in blocks if b not in SCRIPT.read_text()] == []


def test_files_that_the_document_names_exist() -> None:
    named = set(re.findall(r"(?:tests|docs|hal)/[\w/]+\.(?:py|md)", DOCUMENT.read_text()))
    assert named == {"tests/examples/context_parallel.py", "tests/test_context_parallel.py"}
    assert [name for name in named if not (ROOT / name).exists()] == []
