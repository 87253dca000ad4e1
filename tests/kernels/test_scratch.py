"""Work memory: within its bound, never growing, of any content, apart between streams and threads."""

from __future__ import annotations

import math
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.naive import NAN, assert_matches, expected, make_problem

BF16 = torch.bfloat16


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, Tensor] | list[Tensor]]:
    """Empty places for the buffers in use and the retired ones, for one test."""
    from hal.kernels import scratch

    current: dict[Any, Tensor] = {}
    retired: list[Tensor] = []
    monkeypatch.setattr(scratch, "_CURRENT", current)
    monkeypatch.setattr(scratch, "_RETIRED", retired)
    return [current, retired]


def tensors(kept: list[dict[Any, Tensor] | list[Tensor]]) -> list[Tensor]:
    return [t for place in kept for t in (place.values() if isinstance(place, dict) else place)]


def partial_bytes(kept: list[dict[Any, Tensor] | list[Tensor]]) -> int:
    """Bytes of all partials; what remains are the few words of the plan."""
    return sum(t.numel() * t.element_size() for t in tensors(kept) if t.dtype.is_floating_point)


def scratch_bound(device: torch.device, rows: int, dims: tuple[int, int], itemsize: int, parts: int = 2) -> int:
    """Most bytes of partials: `parts` x programs of a call x rows of a unit x (Dv + 1) floats.

    A call has as many programs as fill the device, up to three times as many where the kv heads do not divide those,
    and as many again that are short.
    """
    from hal.kernels.decode_partition import _MOST_WAVES
    from hal.kernels.tuning import decode_config, decode_programs, packed_rows

    kernels = ("hopper", "portable")
    unit = max(packed_rows(kernel, rows, max(dims), 64) for kernel in kernels)
    configs = [decode_config(kernel, *dims, itemsize, itemsize, packed_rows(kernel, rows, max(dims), 64)) for kernel in kernels]
    programs = max(decode_programs(device, config) for config in configs) * _MOST_WAVES * (2 if device.type == "cuda" else 1)
    return parts * programs * unit * (dims[1] + 1) * 4


@pytest.mark.parametrize("dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5, 7, 8, 16, 32, 71])
def test_partials_on_an_h200_take_less_than_32_mb(dim: int, kv_heads: int) -> None:
    """Units of 16 rows, any batch and length, on 132 multiprocessors."""
    from hal.kernels.decode_partition import partition_of
    from hal.kernels.tuning import decode_config

    config = decode_config("hopper", dim if dim < 512 else 576, dim, 2, 2, 16)
    for batch in (1, 8, 64, 512):
        partition = partition_of(batch, batch, 1, 16, kv_heads, 16, 1 << 20, False, 132 * config.residents, config.residents, config.short_pieces)
        assert partition.slots * kv_heads * 16 * (dim + 1) * 4 <= 32e6


#: (heads, dims, q_len); kv heads that do and do not divide the programs of a device.
SHAPES: list[tuple[tuple[int, int], tuple[int, int], int]] = [
    ((4, 1), (64, 64), 1),
    ((32, 8), (128, 128), 1),
    ((6, 3), (128, 128), 1),
    ((10, 5), (64, 64), 3),
    ((14, 7), (64, 64), 1),
    ((8, 2), (128, 128), 4),
    ((16, 1), (576, 512), 1),
]


@pytest.mark.parametrize("invariant", [False, True], ids=["balanced", "invariant"])
@pytest.mark.parametrize(("heads", "dims", "q_len"), SHAPES, ids=str)
def test_partials_of_a_call_are_bounded(
    device: torch.device, kept: list[Any], heads: tuple[int, int], dims: tuple[int, int], q_len: int, invariant: bool
) -> None:
    """Two partials a program; eight of a batch-invariant call, whose units hold the rows of one token."""
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[600], heads=heads, dims=dims, q_len=q_len, dtype=BF16, spare_columns=8192, batch_invariant=invariant)
    assert_matches(flash_decode(**problem.args), expected(problem), BF16)
    group = heads[0] // heads[1]
    used, bound = partial_bytes(kept), scratch_bound(device, *((group, dims, 2, 8) if invariant else (q_len * group, dims, 2)))
    assert 0 < used <= bound


def calls(device: torch.device, count: int, longest: int, sequences: int) -> list[dict[str, Any]]:
    """Calls of one cache that differ in batch, lengths, table width and query tokens."""
    rng, columns = random.Random(0), -(-longest // 16)
    k, v = (torch.randn(columns, 16, 2, 64, device=device).to(BF16) for _ in range(2))
    found = []
    for i in range(count):
        batch = sequences if i == 0 else rng.randint(1, sequences)
        q_len, width = (4, columns) if i == 0 else (rng.choice((1, 1, 2, 4)), rng.randint(1, columns))
        lengths = torch.tensor([rng.randint(0, 16 * width) for _ in range(batch)], dtype=torch.int32, device=device)
        table = torch.stack([torch.randperm(columns, device=device)[:width] for _ in range(batch)]).int()
        q = torch.randn(batch * q_len, 8, 64, device=device).to(BF16)
        found.append({"q": q, "k_cache": k, "v_cache": v, "seq_lens": lengths, "block_tables": table, "q_len": q_len})
    return found


def test_nothing_grows_over_many_calls(device: torch.device, kept: list[Any]) -> None:
    """10,000 calls on a GPU."""
    from hal.backends.triton_ops import flash_decode

    gpu = device.type == "cuda"
    some = calls(device, 100, 65536, 33) if gpu else calls(device, 8, 400, 3)

    def go_round() -> tuple[int, list[int]]:
        for args in some:
            flash_decode(**args)
        if gpu:
            torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device) if gpu else 0, [t.data_ptr() for t in tensors(kept)]

    first = go_round()
    for _ in range(99 if gpu else 1):
        assert go_round() == first
    used, bound = partial_bytes(kept), scratch_bound(device, 16, (64, 64), 2)
    assert 0 < used <= bound


def fill(buffers: list[Tensor], content: float) -> None:
    for buffer in buffers:
        buffer.fill_(content if buffer.dtype.is_floating_point or math.isfinite(content) else -(2**30))


@pytest.mark.parametrize("content", [NAN, float("inf"), 0.0, 1.0, 7.0])
@pytest.mark.parametrize("invariant", [False, True], ids=["balanced", "invariant"])
def test_left_overs_change_no_bit(device: torch.device, kept: list[Any], content: float, invariant: bool) -> None:
    """B10, B48, L11: whatever an earlier call, or half of one, left behind; a first call too finds memory of any content."""
    from hal.backends.triton_ops import flash_decode

    problem = make_problem(device, lengths=[5, 700, 0, 40], batch_invariant=invariant)
    first = flash_decode(**problem.args)
    assert_matches(first, expected(problem), torch.float32)
    fill(tensors(kept), content)
    again = flash_decode(**problem.args)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("nothing runs at once under the interpreter")


def two_calls(device: torch.device) -> list[tuple[dict[str, Any], Tensor]]:
    """Two calls of other shapes and their results."""
    from hal.backends.triton_ops import flash_decode

    problems = (
        make_problem(device, lengths=[3000, 7, 0], heads=(8, 2), dtype=BF16),
        make_problem(device, lengths=[900, 5], q_len=3, heads=(8, 1), dtype=BF16),
    )
    return [(p.args, flash_decode(**p.args)[0].clone()) for p in problems]


def test_streams_have_their_own(device: torch.device, kept: list[Any]) -> None:
    """B48: two streams, other shapes at once, the buffers of both filled with NaN every now and then."""
    needs_gpu(device)
    from hal.backends.triton_ops import flash_decode

    streams = [torch.cuda.Stream(device) for _ in range(2)]
    both = two_calls(device)
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in both]
    torch.cuda.synchronize(device)
    for i in range(2000):
        if i % 100 == 1:
            torch.cuda.synchronize(device)
            fill(tensors(kept), NAN)
            torch.cuda.synchronize(device)
        for stream, (args, wanted), count in zip(streams, both, wrong, strict=True):
            with torch.cuda.stream(stream):
                count += (flash_decode(**args)[0] != wanted).sum()
    torch.cuda.synchronize(device)
    assert [int(count) for count in wrong] == [0, 0]


def test_threads_have_their_own(device: torch.device, kept: list[Any]) -> None:
    """Two threads that launch into one stream, in any order."""
    needs_gpu(device)
    from hal.backends.triton_ops import flash_decode

    both = two_calls(device)
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in both]
    torch.cuda.synchronize(device)

    together = threading.Barrier(2)  # an ended thread's number may be given to the next

    def go(args: dict[str, Any], wanted: Tensor, count: Tensor) -> None:
        together.wait()
        for _ in range(1000):
            count += (flash_decode(**args)[0] != wanted).sum()

    threads = [threading.Thread(target=go, args=(*call, count)) for call, count in zip(both, wrong, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize(device)
    assert [int(count) for count in wrong] == [0, 0]
    assert len({key[-1] for key in kept[0]}) == 3  # this thread and the two


def test_counters_of_captured_calls_are_aligned_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of another alignment would compile another variant of the kernel, in the middle of a capture."""
    from hal.kernels import scratch

    class Device:
        type = "cuda"

    device: Any = Device()
    reserve = torch.zeros(200, dtype=torch.int32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(scratch, "_RESERVE", {device: (reserve, 0)})
    given = [scratch.counters(5, device) for _ in range(6)]
    offsets = [(t.data_ptr() - reserve.data_ptr()) // 4 for t in given]
    assert offsets == [0, 32, 64, 96, 128, 160]
