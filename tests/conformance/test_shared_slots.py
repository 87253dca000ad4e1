"""The check of rows that share slots: one row of each slot passes, whichever; a mixture and a stray write do not."""

from __future__ import annotations

import pytest
import torch

from hal.backends.reference_kv import write_kv
from hal.conformance.shared_slots import KINDS, SharedSlots


@pytest.fixture(params=KINDS)
def call(request: pytest.FixtureRequest) -> SharedSlots:
    """Sixty rows, written by the reference."""
    built = SharedSlots.build(request.param, 60, "NHD", torch.int64, torch.device("cpu"))
    built.name_slots(torch.Generator().manual_seed(0))
    write_kv(**built.args)
    return built


def test_one_row_of_each_slot_passes(call: SharedSlots) -> None:
    call.check()


def test_first_rows_pass_too(call: SharedSlots) -> None:
    call.blank()
    mapping = call.args["slot_mapping"].clone()
    call.args["slot_mapping"].copy_(mapping.flip(0))
    for name in ("key", "value"):
        call.args[name] = call.args[name].flip(0)
    write_kv(**call.args)
    call.args["slot_mapping"].copy_(mapping)
    call.check()


@pytest.mark.parametrize("elements", [slice(1, 2), slice(200, None)], ids=["one", "many"])
def test_elements_of_another_row_fail(call: SharedSlots, elements: slice) -> None:
    first = int((call.args["slot_mapping"] == 5).nonzero()[0])
    for cache, place in ((call.pair.k, 0), (call.pair.v, 1)):
        assert not torch.equal(cache[0, 5, 2, elements], call.held[place][first, elements])
    call.pair.v[0, 5, 2, elements] = call.held[1][first, elements]
    with pytest.raises(AssertionError, match=r"v slot 5: heads \[2\] hold none of its rows whole"):
        call.check()


def test_row_of_another_slot_fails(call: SharedSlots) -> None:
    call.pair.k[0, 5] = call.pair.k[1, 5]
    with pytest.raises(AssertionError, match="k slot 5: heads"):
        call.check()


def test_write_to_a_slot_that_no_row_names_fails(call: SharedSlots) -> None:
    call.args["slot_mapping"].fill_(13)
    with pytest.raises(AssertionError):
        call.check()


def test_stray_write_fails(call: SharedSlots) -> None:
    call.pair.k[2, 0, 1, 3] = 1
    with pytest.raises(AssertionError, match="outside the named slots"):
        call.check()


def test_scale_of_another_row_fails() -> None:
    call = SharedSlots.build("int8-token", 60, "HND", torch.int64, torch.device("cpu"))
    call.name_slots(torch.Generator().manual_seed(0))
    write_kv(**call.args)
    first = int((call.args["slot_mapping"] == 5).nonzero()[0])
    call.args["k_scale"][0, 2, 5] = (first + 1) / 127
    with pytest.raises(AssertionError, match=r"k slot 5: heads \[2\]"):
        call.check()
