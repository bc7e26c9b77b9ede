"""Ranks compute together over a process group that only they can join; without one of them it is an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks.groups import obedient_group
from triptych.base.errors import ConfigError
from triptych.base.ranks.group import RankGroup
from triptych.base.ranks.process_group import check_ranks, device_of, leave

CPU = torch.device("cpu")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    group = obedient_group(2)
    group.start()
    yield group
    group.close(seconds=0)
    leave()


@pytest.mark.timeout(300)
def test_ranks_sum_up_and_a_collective_without_one_of_them_ends(group):
    group.wait_ready()
    group.send({"do": "sum", "value": 10.0, "seconds": 250.0})
    joined = group.join(CPU, seconds=250.0)
    mine = torch.zeros(1)
    dist.all_reduce(mine, group=joined)
    assert mine.item() == 10.0
    assert group.collect() == [{"sum": 10.0}]
    assert _addresses(group.pids[0]) == {"0100007F"}, "127.0.0.1"
    os.kill(group.pids[0], 9)
    with pytest.raises(RuntimeError):
        dist.all_reduce(mine, group=joined)


def test_joining_without_the_others_is_an_error_in_time(group):
    group.wait_ready()
    with pytest.raises(RuntimeError):
        group.join(CPU, seconds=0.5)


def _addresses(pid: int | None) -> set[str]:
    """The addresses of a process's TCP sockets, listening or connected, as in /proc."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{one}") for one in os.listdir(f"/proc/{pid}/fd")}
    tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return {line[1].partition(":")[0] for line in lines if f"socket:[{line[9]}]" in sockets}


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
