"""Each rank has a GPU of its own, all of them share the CPU, and too many of them are refused."""

from __future__ import annotations

import pytest
import torch

from triptych.base.errors import ConfigError
from triptych.base.ranks.process_group import check_ranks, device_of


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ("cpu", ["cpu", "cpu", "cpu"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:2", ["cuda:2", "cuda:3", "cuda:4"]),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_and_all_have_the_cpu(given, devices):
    assert [str(device_of(torch.device(given), rank)) for rank in range(3)] == devices


@pytest.mark.parametrize(
    ("ranks", "device", "gpus"),
    [(1, "cpu", 0), (4, "cpu", 0), (1, "cuda", 0), (4, "cuda", 4), (2, "cuda:2", 4), (1, "cuda:9", 1)],
)
def test_ranks_with_a_device_each_are_accepted(ranks, device, gpus):
    check_ranks("--tensor-parallel", ranks, torch.device(device), lambda: gpus)


@pytest.mark.parametrize(
    ("ranks", "device", "gpus", "text"),
    [
        (0, "cpu", 0, "--tensor-parallel 0: give a number of ranks from 1 to 64"),
        (65, "cpu", 0, "--tensor-parallel 65: give a number"),
        (
            4,
            "cuda",
            3,
            "--tensor-parallel 4 from --device cuda on needs GPUs 0 to 3 and 3 are there",
        ),
        (2, "cuda:3", 4, "from --device cuda:3 on needs GPUs 3 to 4 and 4 are there"),
    ],
)
def test_ranks_without_a_device_are_refused_with_the_remedy(ranks, device, gpus, text):
    with pytest.raises(ConfigError, match=text):
        check_ranks("--tensor-parallel", ranks, torch.device(device), lambda: gpus)
