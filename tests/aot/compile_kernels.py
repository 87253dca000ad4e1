"""Compile every kernel of `hal.kernels` ahead of time for sm_80, sm_90 and gfx942; no GPU is needed.

    python tests/aot/compile_kernels.py [--json FILE] [--only TEXT] [--workers N]

Prints registers, stack, spills and shared memory of each (kernel, dtype, target). The exit status is 1 when a case
fails to compile that its module does not declare refused (ARCH), when a refused one compiles, or when a case of the
main path spills. Another Triton can be tried through PYTHONPATH. Must not run under TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_KERNELS = Path(__file__).resolve().parents[2] / "kernels"
#: Kernel modules with a `compile_cases` function.
MODULES = tuple(sorted(path.stem for path in _KERNELS.glob("*.py") if "def compile_cases(" in path.read_text()))
TARGETS = ("sm_80", "sm_90", "gfx942")
#: Shared memory that a program may use (bytes).
SHARED_LIMITS = {"sm_80": 101376, "sm_90": 232448, "gfx942": 65536}


@dataclass(frozen=True)
class Result:
    """Outcome of one case on one target; sizes in bytes, spills in registers (AMD) or bytes (NVIDIA)."""

    name: str
    target: str
    status: str  #: ok | refused | failed | unexpected
    detail: str = ""
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether this outcome is the declared one."""
        return self.status in ("ok", "refused")


def all_cases() -> list[Any]:
    """The compile cases of all kernel modules."""
    return [case for name in MODULES for case in importlib.import_module(f"hal.kernels.{name}").compile_cases()]


def gpu_target(name: str) -> Any:
    """Triton's description of a target."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name.removeprefix("sm_")), 32)


def source_of(case: Any) -> Any:
    """The AST source of a case: every argument of the kernel gets its type, constant and alignment."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    missing = [n for n in names if n not in case.types and n not in case.constants]
    unknown = [n for n in (*case.types, *case.constants) if n not in names]
    if missing or unknown:
        raise ValueError(f"{case.name}: arguments without a type {missing}, unknown arguments {unknown}")
    signature = {n: case.types[n].removesuffix(":16") if n in case.types else "constexpr" for n in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if case.types.get(n, "").endswith(":16")}
    constants = {(i,): case.constants[n] for i, n in enumerate(names) if n in case.constants}
    return (GluonASTSource if case.kernel.is_gluon() else ASTSource)(case.kernel, signature, constants, attributes)


def options_of(case: Any) -> dict[str, Any]:
    """The compiler's options, as the launcher gives them."""
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": case.fp_fusion}
    if case.registers is not None:
        options["maxnreg"] = case.registers
    return options | ({"launch_pdl": True} if case.constants.get("PDL") else {})


def nvidia_usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local (spill) bytes of a cubin, by Triton's bundled cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"], "spills": found["LOCAL"]}


def amd_usage(assembly: str) -> dict[str, int]:
    """Vector registers, private segment bytes and spilled registers of AMD assembly."""
    found = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", assembly)}
    return {"registers": found["vgpr_count"], "stack": found["private_segment_fixed_size"], "spills": found["vgpr_spill_count"]}


def compile_case(index: int, target: str) -> Result:
    """Compile case number `index` for `target`."""
    import triton

    case, begin = all_cases()[index], time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Triton prints the whole assembly of a case that ptxas refuses
            compiled = triton.compile(source_of(case), target=gpu_target(target), options=options_of(case))
    except Exception as error:  # compilers raise many types; the text is the finding
        status = "refused" if target in case.refused | case.unserved else "failed"
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        lines = str(error).strip().splitlines() or ["no message"]
        text = next((line for line in lines if "error" in line.lower()), lines[-1])
        return Result(case.name, target, status, f"{type(error).__name__}: {text.strip()[:300]}", seconds=time.monotonic() - begin)
    usage = nvidia_usage(compiled.asm["cubin"]) if target.startswith("sm_") else amd_usage(compiled.asm["amdgcn"])
    shared, status, detail = int(compiled.metadata.shared), "ok", ""
    if target in case.unserved:
        status, detail = "refused", "compiles with this Triton, not with every supported one"
    elif target in case.refused:
        status, detail = "unexpected", "declared refused, but it compiles"
    elif shared > SHARED_LIMITS[target]:
        status, detail = "failed", f"{shared} bytes of shared memory, limit {SHARED_LIMITS[target]}"
    elif case.no_spills and target.startswith("sm_") and (usage["spills"] or usage["stack"]):
        status, detail = "failed", "spills on the main path"
    return Result(case.name, target, status, detail, shared=shared, seconds=time.monotonic() - begin, **usage)


def jobs(only: str) -> Iterator[tuple[int, str]]:
    """(case number, target) of every compilation."""
    for index, case in enumerate(all_cases()):
        if only in case.name:
            yield from ((index, target) for target in TARGETS if not case.targets or target in case.targets)


def main() -> int:
    """Compile all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    import triton

    begin, results = time.monotonic(), []
    print(f"triton {triton.__version__}")
    print(f"{'case':56} {'target':7} {'regs':>5} {'stack':>6} {'spills':>6} {'shared':>7} {'s':>5}  status")
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        todo = list(jobs(options.only))
        for r in pool.map(compile_case, *zip(*todo, strict=True)):
            results.append(r)
            print(
                f"{r.name:56} {r.target:7} {r.registers:5} {r.stack:6} {r.spills:6} {r.shared:7} {r.seconds:5.1f}  {r.status} {r.detail}", flush=True
            )
    bad = [r for r in results if not r.good]
    print(f"{len(results)} compilations in {time.monotonic() - begin:.0f} s: {len(bad)} not as declared")
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "results": [asdict(r) for r in results]}, indent=1))
    return 1 if bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
