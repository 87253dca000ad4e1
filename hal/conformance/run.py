"""The suite as a function, for the command line."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

__all__ = ["run"]

_ENTRY = "hal_conformance"
_MODULE = "hal.conformance.plugin"


def run(
    backend: str,
    *,
    device: str | None = None,
    json_path: Path | None = None,
    markdown_path: Path | None = None,
    waivers: Path | None = None,
    seed: int | None = None,
    keyword: str | None = None,
) -> int:
    """Run the conformance suite and print its summary.

    Args:
        backend: name of the backend under test.
        device: where all tensors live; default cuda if there is one, else cpu.
        json_path: where to write the report.
        markdown_path: where to write a short summary.
        waivers: waiver file in addition to the one that ships.
        seed: seed of the suite; default 0.
        keyword: run only cases that match, as with `pytest -k`.

    Returns:
        pytest's exit status: 0 the backend conforms; 1 it does not, or nothing was shown; 2 the suite could not be
        collected; 4 wrong usage, an unknown backend for instance.
    """
    import pytest

    # The user's own pytest settings have no say here.
    args = ["--pyargs", "hal.conformance", "-c", os.devnull, "--rootdir", str(Path(__file__).parent), "-p", "no:cacheprovider", "-q"]
    args += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this process may have imported parts of the suite already
    if not any(entry.name == _ENTRY for entry in entry_points(group="pytest11")):
        args += ["-p", _MODULE]
    paths = {"--hal-json": json_path, "--hal-markdown": markdown_path, "--hal-waivers": waivers}
    options = {"--hal-device": device, **paths, "--hal-seed": seed, "-k": keyword}
    args += ["--hal-backend", backend]
    for option, value in options.items():
        if value is not None:
            args += [option, str(value)]
    return int(pytest.main(args))
