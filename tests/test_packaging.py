"""What is packaged is what is on disk, and importing it costs nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCES = ("hal", "backends", "kernels", "overlap", "configs")


def declared() -> dict[str, str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]


def test_packaged_folders_equal_folders_on_disk():
    on_disk = {
        str(folder.relative_to(ROOT))
        for top in SOURCES
        for folder in [ROOT / top, *(ROOT / top).rglob("*")]
        if folder.is_dir() and folder.name != "__pycache__" and any(f.suffix in (".py", ".yaml", ".md") for f in folder.iterdir())
    }
    assert set(declared().values()) == on_disk
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(declared())


def test_folders_beside_hal_are_no_regular_packages():
    # An __init__.py here would shadow Hugging Face's `kernels` for everyone who runs from the root.
    assert [str(p) for top in SOURCES[1:] for p in (ROOT / top).rglob("__init__.py")] == []


def test_nothing_imports_the_folders_by_their_top_level_names():
    import re

    bad = re.compile(r"^\s*(from|import) (kernels|backends|overlap|configs)\b", re.MULTILINE)
    found = [str(p) for top in (*SOURCES, "tests") for p in (ROOT / top).rglob("*.py") if bad.search(p.read_text())]
    assert found == []


ROOMS = {  # who may import whom: folder -> what must not appear in its import lines
    "hal": r"(triton|ixformer|transformers)\b",
    "kernels": r"(hal\.(?!kernels)|ixformer|transformers)\b|hal import",
    "overlap": r"(triton|ixformer|hal\.(?!overlap))\b",
}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room):
    import re

    allowed = {"hal/integrations", "hal/conformance"}
    bad = re.compile(rf"^(from|import) {ROOMS[room]}", re.MULTILINE)  # at module level
    found = [
        str(p.relative_to(ROOT)) for p in (ROOT / room).rglob("*.py") if bad.search(p.read_text()) and str(p.parent.relative_to(ROOT)) not in allowed
    ]
    assert found == []


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy():
    out = run(
        """
        import sys, torch
        before = set(sys.modules)
        import hal.backend
        hal.backend.registry()
        new = {m.partition(".")[0] for m in set(sys.modules) - before}
        print(sorted(new & {"triton", "ixformer", "transformers", "pydantic", "yaml", "typer", "rich", "pytest"}), torch.cuda.is_initialized())
        """
    )
    assert out.split() == ["[]", "False"]


def test_every_public_name_is_there_and_typed():
    import hal

    listed = (ROOT / "hal" / "__init__.py").read_text().partition("#: Public name")[0]
    assert set(hal.__all__) == set(hal._EXPORTS)
    for name in hal.__all__:
        assert getattr(hal, name) is not None
        assert name in listed, f"{name} is not imported for type checkers"


def test_pytest_plugin_does_not_load_torch():
    assert run("import sys, hal.conformance.plugin; print('torch' in sys.modules)").strip() == "False"


def test_import_takes_little_longer_than_torch():
    # The median of a few processes: a loaded machine slows both imports.
    code = "from time import perf_counter as now; t = now(); import torch; a = now(); import hal.backend; print((now() - a) / (a - t))"
    ratios = sorted(float(run(code)) for _ in range(5))
    assert ratios[2] < 0.15, f"import hal takes {ratios[2]:.0%} of import torch"


def test_reference_works_where_triton_and_vendor_libraries_cannot_be_imported():
    out = run(
        """
        import sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("triton", "ixformer", "transformers"):
                    raise ImportError(f"{name} is refused in this test")
        sys.meta_path.insert(0, Refuse())
        import torch, hal
        a, b = torch.randn(2, 4, 16), torch.randn(2, 4)
        print(hal.get_backend().merge_states(a, b, a, b)[0].shape, "triton" in sys.modules)
        """
    )
    assert out.strip().endswith("torch.Size([2, 4, 16]) False")


@pytest.mark.parametrize("module", ["hal", "hal.cli", "hal.conformance.plugin", "hal.backends.triton", "hal.backends.reference"])
def test_modules_that_others_load_stay_light(module):
    out = run(f"import sys, {module}; print([m for m in ('triton', 'transformers', 'ixformer') if m in sys.modules])")
    assert out.strip() == "[]"


#: Names with an underscore that another module may take: (module, name).
TAKEN_PRIVATE = {("hal.kernels.numerics", "_LOG2E")}


def modules() -> dict[str, ast.Module]:
    """Module -> its syntax tree."""
    found = {}
    for top in ("hal", "backends", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if top == "hal" else ("hal", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def listed(tree: ast.Module) -> set[str] | None:
    """Names in `__all__`; None without one that is a literal."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, (ast.List, ast.Tuple)):
            return set(ast.literal_eval(node.value))
    return None


def taken(tree: ast.Module, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """(module, name) of what a module takes from others: by name, or as an attribute of a module imported here under one."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for name in node.names:
                if f"{node.module}.{name.name}" in known:
                    aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                elif node.module in known:
                    yield str(node.module), name.name
        elif isinstance(node, ast.Import):
            aliases |= {name.asname: name.name for name in node.names if name.asname and name.name in known}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


def test_modules_take_from_others_what_those_list():
    trees = modules()
    assert {"hal", "hal.ops.op", "hal.backends.triton", "hal.kernels.route"} < set(trees)
    exports = {module: listed(tree) for module, tree in trees.items()}
    found = {(module, name) for tree in trees.values() for module, name in taken(tree, trees)}
    private = {(module, name) for module, name in found if name.startswith("_") and not name.startswith("__")}
    assert private == TAKEN_PRIVATE
    unlisted = {(module, name) for module, name in found - private if (names := exports[module]) is not None and name not in names}
    assert unlisted == set()
