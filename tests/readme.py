"""The generated parts of README.md: the output of its example and the op x backend table.

python tests/readme.py --write      rewrites them
"""

from __future__ import annotations

import contextlib
import io
import platform
import re
import sys
from pathlib import Path

import hal.backend
from hal.ops import OPS
from hal.registry import BUILTIN_BACKENDS, discover

README = Path(__file__).parents[1] / "README.md"


def table() -> str:
    """Op x backend, from the declarations that dispatch reads."""
    backends = discover(plugins=()).backends
    assert len(backends) == len(BUILTIN_BACKENDS)
    lines = ["| op | " + " | ".join(f"`{name}`" for name in backends) + " |", "|---" * (len(backends) + 1) + "|"]
    for op in OPS:
        served = [r.spec.implementations.get(op) for r in backends.values()]
        cells = ["-" if s is None else "yes, gated" if s.gate else "yes" for s in served]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    lines += ["", '"gated": the backend judges each call\'s facts and refuses, with a reason, what its kernel does not cover.']
    return "\n".join(lines)


def example() -> str:
    """The code of the README's example."""
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    return found.group(1)


def output() -> str:
    """What the example prints on a machine without a GPU."""
    printed = io.StringIO()
    with hal.use_backend(hal.backend.build_backend(None, config="cpu")), contextlib.redirect_stdout(printed):
        exec(compile(example(), "README.md", "exec"), {})
    return printed.getvalue().replace(f"cpu {platform.machine()}", "cpu x86_64")


def renewed(text: str) -> str:
    """The README with its generated parts renewed."""
    text = re.sub(r"(<!-- table -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL)
    return re.sub(r"(<!-- output -->\n```\n).*?(```\n<!-- end -->)", lambda m: f"{m[1]}{output()}{m[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    if "--write" not in sys.argv:
        sys.exit(__doc__)
    README.write_text(renewed(README.read_text()))
