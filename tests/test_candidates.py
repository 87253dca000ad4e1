"""Static reasons: each code, from a fake backend or vendor library that deserves it."""

from __future__ import annotations

import sys

import pytest

from hal import BackendSpec, Disabled, Implementation, Package, ReasonCode, Requires, ResolutionError, Source, Symbol
from hal.candidates import judge
from hal.device import DeviceInfo
from hal.ops import OPS

CPU = DeviceInfo("cpu", 0, "cpu", "x86_64")
H200 = DeviceInfo("cuda", 0, "nvidia", "NVIDIA H200", (9, 0), 132)
BI150 = DeviceInfo("cuda", 0, "iluvatar", "Iluvatar BI-V150", (7, 1), 16)
MERGE = OPS["merge_states"]


def reasons(spec, device=CPU, windows=None, op=MERGE):
    return [(r.code, r.text, r.fix) for r in judge(spec, op, device, windows or {}).reasons]


def only(found, code):
    assert [c for c, *_ in found] == [code]
    return found[0]


def test_available(fake_backend):
    answer = judge(fake_backend("fast"), MERGE, CPU, {})
    assert answer.reasons == ()
    assert answer.function is not None


def test_other_api_version(fake_backend):
    _, text, fix = only(reasons(fake_backend("fast", api_version=7)), ReasonCode.VERSION)
    assert "API version 7" in text
    assert fix


def test_not_implemented(fake_backend):
    only(reasons(fake_backend("fast"), op=OPS["write_kv"]), ReasonCode.NOT_IMPLEMENTED)


def test_wrong_device_is_device_not_installation(fake_backend):
    # The package is missing too, but a backend for other hardware must not even be looked for.
    spec = fake_backend("fast", requires=Requires(devices=("cuda",), packages=(Package("no_such_package"),)))
    _, text, _ = only(reasons(spec), ReasonCode.DEVICE)
    assert "these are on cpu" in text


def test_wrong_vendor(fake_backend):
    _, text, _ = only(reasons(fake_backend("fast", requires=Requires(vendors=("iluvatar",))), H200), ReasonCode.DEVICE)
    assert "NVIDIA H200" in text


def test_old_architecture(fake_backend):
    spec = fake_backend("fast", requires=Requires(devices=("cuda",), min_arch=(9, 0)))
    assert reasons(spec, H200) == []
    _, text, _ = only(reasons(spec, DeviceInfo("cuda", 0, "nvidia", "NVIDIA A100", (8, 0))), ReasonCode.ARCH)
    assert text == "fast needs compute capability 9.0; NVIDIA A100 has 8.0"


def test_missing_package_has_an_install_hint(fake_backend):
    spec = fake_backend("fast", requires=Requires(packages=(Package("no_such_package", install="It ships with the SDK."),)))
    _, text, fix = only(reasons(spec), ReasonCode.NOT_INSTALLED)
    assert "no_such_package" in text
    assert fix == "It ships with the SDK."


@pytest.mark.parametrize(
    ("found", "fails"),
    [("0.5.9", True), ("0.6.0", False), ("0.6.0+corex.4.4.0", False), ("0.7.0rc1", False), ("0.8.0", True), ("N/A", True), ("", True)],
)
def test_version_window(fake_backend, fake_module, found, fails):
    fake_module("vendorlib", __version__=found)
    spec = fake_backend("fast", requires=Requires(packages=(Package("vendorlib", ">=0.6,<0.8"),)))
    got = reasons(spec)
    if not fails:
        assert got == []
        return
    _, text, _ = only(got, ReasonCode.VERSION)
    assert ">=0.6,<0.8" in text
    assert found in text


def test_config_widens_a_window(fake_backend, fake_module):
    fake_module("vendorlib", __version__="3.1.0+corex.4.4.0")
    spec = fake_backend("fast", requires=Requires(packages=(Package("vendorlib", ">=3.6"),)))
    only(reasons(spec, BI150), ReasonCode.VERSION)
    assert reasons(spec, BI150, {"vendorlib": ">=3.1"}) == []


def test_import_failure_keeps_the_loaders_words(fake_backend, tmp_path, monkeypatch):
    (tmp_path / "brokenlib.py").write_text("raise ImportError('libfoo.so: undefined symbol x')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = fake_backend("fast", implementations={"merge_states": Implementation("brokenlib:merge_states")})
    _, text, _ = only(reasons(spec), ReasonCode.LOAD_ERROR)
    assert "libfoo.so: undefined symbol x" in text
    packaged = fake_backend("fast", requires=Requires(packages=(Package("brokenlib", ">=1"),)))
    _, text, _ = only(reasons(packaged), ReasonCode.LOAD_ERROR)
    assert "libfoo.so: undefined symbol x" in text


def test_one_missing_symbol_costs_one_op(fake_backend, fake_module):
    symbols = {"merge_states": "vendorlib:merge", "plan_decode": "vendorlib:plan"}
    for missing, symbol in symbols.items():
        fake_module("vendorlib", **{s.partition(":")[2]: print for op, s in symbols.items() if op != missing})
        declared = {op: Implementation(f"fake_fast:{op}", Requires(symbols=(Symbol(s),))) for op, s in symbols.items()}
        spec = fake_backend("fast", implementations=declared)
        for op in symbols:
            found = reasons(spec, op=OPS[op])
            if op == missing:
                assert repr(symbol.partition(":")[2]) in only(found, ReasonCode.SYMBOL_MISSING)[1]
            else:
                assert found == []


def test_symbol_of_another_release_is_named_with_its_parameters(fake_backend, fake_module):
    fake_module("vendorlib", norm=lambda x, weight, output=None, eps=1e-6: None)
    for parameters, fails in ((("x", "eps"), False), (("x", "residual"), True)):
        spec = fake_backend("fast", requires=Requires(symbols=(Symbol("vendorlib:norm", parameters),)))
        found = reasons(spec)
        assert bool(found) == fails
    assert only(found, ReasonCode.SIGNATURE)[1] == "vendorlib:norm does not take residual; it takes x, weight, output, eps"


def test_other_signature_is_named(fake_backend, fake_module):
    fake_module("vendorlib", merge_states=lambda out_a, lse_a, out_b, lse_b, *, sink=None, out=None, lse=None: None)
    spec = fake_backend("fast", implementations={"merge_states": Implementation("vendorlib:merge_states")})
    _, text, _ = only(reasons(spec), ReasonCode.SIGNATURE)
    assert text.endswith("differs from the contract in: sink, sinks")


def test_vendor_library_is_not_imported_for_another_device(fake_backend, tmp_path, monkeypatch):
    (tmp_path / "heavylib.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = fake_backend("fast", requires=Requires(vendors=("iluvatar",), packages=(Package("heavylib"),)))
    only(reasons(spec, H200), ReasonCode.DEVICE)
    assert "heavylib" not in sys.modules


def test_disabled_by_config(fake_backend, make_hal, states):
    entry = Disabled("fast", "merge_states", Source("file", "test.yaml:9"), "wrong on this card")
    backend = make_hal(fake_backend("fast"), chain=("fast",), disabled=(entry,))
    with pytest.raises(ResolutionError, match=r"DISABLED_BY_CONFIG: disabled by file \(test.yaml:9\): wrong on this card"):
        backend.merge_states(*states)
    assert backend.explain("plan_decode").chosen == "fast"


def test_backends_outside_the_chain_are_shown(fake_backend, make_hal):
    report = make_hal(fake_backend("fast"), fake_backend("slow"), chain=("fast",)).explain("merge_states")
    other = report.candidates[1]
    assert (other.backend, other.listed, other.reasons[0].code) == ("slow", False, ReasonCode.DISABLED_BY_CONFIG)
    assert report.to_dict()["candidates"][1]["reasons"][0]["code"] == "DISABLED_BY_CONFIG"


def test_cuda_only_backend_leaves_the_cpu_to_the_next(fake_backend, make_hal, states):
    specs = fake_backend("gpu", requires=Requires(devices=("cuda",))), fake_backend("reference")
    assert make_hal(*specs, chain=("gpu", "reference")).merge_states(*states)[0] == "reference"
    with pytest.raises(ResolutionError, match="DEVICE"):
        make_hal(*specs, chain=("gpu",), explicit=True).merge_states(*states)


def test_declaration_only_backend_has_reasons():
    spec = BackendSpec("bare", 1, {})
    only(reasons(spec), ReasonCode.NOT_IMPLEMENTED)
