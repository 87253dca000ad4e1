"""The streaming read reads every byte once, in every configuration."""

from __future__ import annotations

import pytest
import torch

from hal.kernels.stream_read import CONFIGS, stream_read


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums_are_those_of_all_words(config, device):
    x = torch.randint(-(2**31), 2**31 - 1, (3, 16384), dtype=torch.int32, device=device)
    assert (int(stream_read(x, config).long().sum()) - int(x.long().sum())) % 2**32 == 0


def test_refuses_what_it_would_not_read_whole(device):
    for bad in (torch.zeros(16385, dtype=torch.int32, device=device), torch.zeros(16384, 2, dtype=torch.int32, device=device)[:, 0]):
        with pytest.raises(ValueError, match="a contiguous tensor of a multiple of 65536 bytes"):
            stream_read(bad)


def test_nothing_to_read(device):
    assert stream_read(torch.zeros(0, dtype=torch.int32, device=device)).numel() == 0
