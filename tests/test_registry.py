"""Discovery: broken plug-ins cost nobody else anything and are never silent."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint

import pytest

import hal
from hal import ResolutionError, UnknownBackendError
from hal.registry import ENTRY_POINT_GROUP, discover

GOOD = """
from hal import BackendSpec, Implementation, hookimpl
@hookimpl
def hal_backends():
    return [BackendSpec("acme", 1, {"merge_states": Implementation("acme_ops:merge_states")})]
"""
BROKEN = {
    "import_error": ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
    "os_error": ("raise OSError('libvendor.so: cannot open shared object file')", "libvendor.so"),
    "syntax_error": ("def (", "SyntaxError"),
    "system_exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "no_hook": ("x = 1", "no `hal_backends` hook"),
    "misspelt_hook": ("from hal import hookimpl\n@hookimpl\ndef hal_backend(): return []", "unknown hook 'hal_backend'"),
    "not_a_spec": ("from hal import hookimpl\n@hookimpl\ndef hal_backends(): return ['triton']", "returned str 'triton'"),
    "raises": ("from hal import hookimpl\n@hookimpl\ndef hal_backends(): return 1 / 0", "ZeroDivisionError"),
    "taken_name": (GOOD.replace('"acme"', '"reference"'), "'reference' exists already, from hal"),
    "upper_case": (GOOD.replace('"acme"', '"Acme"'), "not a lower-case identifier"),
    "unknown_op": (GOOD.replace("acme", "other").replace('"merge_states":', '"merge_state":'), "did you mean 'merge_states'"),
    "bad_target": (GOOD.replace("acme", "other").replace("other_ops:merge_states", "other_ops.merge_states"), "not 'package.module:function'"),
    "bad_layout": (
        GOOD.replace("acme", "other").replace("})]", "}, kv_cache=hal.KVCachePreference('NDH'))]").replace("from hal", "import hal\nfrom hal"),
        "layouts are NHD",
    ),
    "bad_window": (
        GOOD.replace("acme", "other")
        .replace("})]", "}, requires=hal.Requires(packages=(hal.Package('torch', '2.1'),)))]")
        .replace("from hal", "import hal\nfrom hal"),
        "no version window",
    ),
    "absent_package": (None, "No module named 'absent_package'"),
}


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Install fake plug-ins: entry-point name -> source of its module (None: the module does not exist)."""
    monkeypatch.syspath_prepend(tmp_path)
    entries: list[EntryPoint] = []
    monkeypatch.setattr("hal.registry.entry_points", lambda group: entries if group == ENTRY_POINT_GROUP else [])

    def make(**sources):
        for name, source in sources.items():
            if source is not None:
                (tmp_path / f"{name}_plugin.py").write_text(source)
            entries.append(EntryPoint(name, name if source is None else f"{name}_plugin", ENTRY_POINT_GROUP))
        return entries

    return make


def test_builtins_are_there_without_installation(install):
    assert set(discover().backends) >= {"reference", "triton", "ixformer"}


def test_third_party_backend_is_found(install):
    install(acme=GOOD)
    found = discover()
    assert found.backends["acme"].spec.name == "acme"
    assert found.broken == ()


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plugin_is_one_warning_and_a_record(install, caplog, kind):
    source, text = BROKEN[kind]
    install(**{kind: source}, acme=GOOD)
    with caplog.at_level(logging.WARNING, logger="hal"):
        found = discover()
    assert [p.name for p in found.broken] == [kind]
    assert text in str(found.broken[0])
    assert len(caplog.records) == 1
    assert text in caplog.text
    assert "acme" in found.backends  # the good one survives
    assert "reference" in found.backends


def test_explicit_request_of_a_broken_plugin_has_its_cause(install, states):
    install(os_error=BROKEN["os_error"][0])
    backend = hal.get_backend("os_error")
    with pytest.raises(ResolutionError, match="LOAD_ERROR: plug-in 'os_error'.*libvendor.so") as caught:
        backend.merge_states(*states)
    assert isinstance(caught.value.__cause__, OSError)


def test_automatic_choice_survives_a_broken_plugin(install, states):
    install(system_exit=BROKEN["system_exit"][0])
    out, _ = hal.get_backend().merge_states(*states)
    assert out.shape == states[0].shape


def test_hal_plugins_limits_loading(install, monkeypatch):
    install(acme=GOOD, os_error=BROKEN["os_error"][0])
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    assert "acme" in hal.backend.registry().backends
    assert hal.backend.registry().left_out == ("os_error",)
    hal.backend.reset()
    monkeypatch.setenv("HAL_PLUGINS", "")
    assert "acme" not in hal.backend.registry().backends
    with pytest.raises(UnknownBackendError, match="HAL_PLUGINS leaves out: acme, os_error"):
        hal.get_backend("acme")


def test_unknown_backend_lists_the_known(install):
    with pytest.raises(UnknownBackendError, match=r"unknown backend 'tritn' .*did you mean 'triton'\? Registered are: ixformer, reference, triton"):
        hal.get_backend("tritn")
