"""HAL_* variables: known, misspelt, retired, foreign."""

from __future__ import annotations

import logging

import pytest

from hal import environment
from hal.environment import VARIABLES, Environment, in_force, read
from hal.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not warned yet."""
    monkeypatch.setattr(environment, "_said", set())


def message(environ: dict[str, str], **kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(environ, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def test_nothing_set() -> None:
    assert read({"PATH": "/bin", "hal_backend": "x"}) == Environment(None, None, None, None)


def test_everything_set() -> None:
    environ = {"HAL_BACKEND": " triton ", "HAL_CONFIG": "a b.yaml", "HAL_PLUGINS": "acme, other,acme", "HAL_CACHE_DIR": "/tmp/x"}
    assert read(environ) == Environment("triton", "a b.yaml", ("acme", "other"), "/tmp/x")


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_plugins_means_that_none_load(text: str) -> None:
    assert read({"HAL_PLUGINS": text}).plugins == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HAL_BACKND", "HAL_BACKEND"),
        ("HAL_BACKENDS", "HAL_BACKEND"),
        ("HAL_BACKENT", "HAL_BACKEND"),
        ("HAL_BAKCEND", "HAL_BACKEND"),
        ("HAL_BACKEDN", "HAL_BACKEND"),
        ("HAL__BACKEND", "HAL_BACKEND"),
        ("HAL_Backend", "HAL_BACKEND"),
        ("HAL_CONFG", "HAL_CONFIG"),
        ("HAL_ONFIG", "HAL_CONFIG"),
        ("HAL_PLUGIN", "HAL_PLUGINS"),
        ("HAL_CACHEDIR", "HAL_CACHE_DIR"),
        ("HAL_CACHE_DIRS", "HAL_CACHE_DIR"),
    ],
)
def test_one_slip_is_an_error_that_names_both(name: str, meant: str) -> None:
    assert message({name: "x"}) == f"{name}: unknown variable; did you mean {meant}? Rename it, or unset it if it belongs to another program"


@pytest.mark.parametrize("name", ["HAL_BACKND_X", "HAL_CNFG", "HAL_LOG_LEVEL", "HAL_", "HAL_BCAKEDN"])
def test_anything_else_unknown_gets_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert read({name: "x", "HAL_BACKEND": "triton"}).backend == "triton"
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("hal", logging.WARNING, f"environment variable {name} is unknown to hal and has no effect here; known are {', '.join(VARIABLES)}")
    ]


def test_each_unknown_variable_has_its_own_warning(caplog: pytest.LogCaptureFixture) -> None:
    read({"HAL_ONE": "", "HAL_TWO": ""})
    assert len(caplog.records) == 2


def test_a_retired_variable_says_what_to_set_instead() -> None:
    retired = {"HAL_KERNELS": "set HAL_BACKEND to a backend's name", "HAL_BACKENDS": "set HAL_BACKEND"}
    assert message({"HAL_KERNELS": "1"}, retired=retired) == "HAL_KERNELS: is retired and has no effect; set HAL_BACKEND to a backend's name"
    # Retired wins over one slip: the name was right once.
    assert message({"HAL_BACKENDS": "1"}, retired=retired) == "HAL_BACKENDS: is retired and has no effect; set HAL_BACKEND"


@pytest.mark.parametrize("name", ["HAL_BACKEND", "HAL_CONFIG", "HAL_CACHE_DIR"])
@pytest.mark.parametrize("text", ["", " "])
def test_set_but_empty_is_an_error(name: str, text: str) -> None:
    assert message({name: text}).startswith(f"{name}: is set but empty; give ")
    assert "unset it" in message({name: text})


def test_an_empty_name_between_commas_is_an_error() -> None:
    assert message({"HAL_PLUGINS": "acme,,other"}) == (
        "HAL_PLUGINS: 'acme,,other' has an empty name between commas; give entry-point names such as acme,other, or nothing to load none"
    )


def test_all_mistakes_come_in_one_error() -> None:
    lines = message({"HAL_BACKND": "x", "HAL_CONFIG": "", "HAL_PLUGINS": ","}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["HAL_BACKND", "HAL_CONFIG", "HAL_PLUGINS"]


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_BACKEND", "reference")
    assert read().backend == "reference"
    assert in_force() == {"HAL_BACKEND": "reference"}


def test_in_force_lists_foreign_variables_too() -> None:
    assert in_force({"HAL_Z": "1", "HOME": "/", "HAL_BACKEND": "x"}) == {"HAL_BACKEND": "x", "HAL_Z": "1"}


def test_warn_once_is_once_per_key(caplog: pytest.LogCaptureFixture) -> None:
    environment.warn_once("a", "first %s")
    environment.warn_once("a", "again")
    environment.warn_once("b", "other")
    assert [r.getMessage() for r in caplog.records] == ["first %s", "other"]
