"""Ranks compute together over a process group that only they can join; without one of them it is an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from support.ranks.groups import obedient_group
from triptych.ranks.group import RankGroup
from triptych.ranks.process_group import leave

CPU = torch.device("cpu")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    group = obedient_group(3)
    group.start()
    yield group
    group.close(seconds=0)
    leave()


def test_three_ranks_sum_up_and_a_collective_without_one_of_them_ends(group):
    group.wait_ready()
    group.send({"do": "sum", "value": 10.0, "seconds": 60.0})
    joined = group.join(CPU, seconds=60.0)
    mine = torch.zeros(1)
    dist.all_reduce(mine, group=joined)
    assert mine.item() == 30.0
    assert group.collect() == [{"sum": 30.0}, {"sum": 30.0}]
    assert {line.split()[1].split(":")[0] for line in _listening(group)} <= {"0100007F"}
    os.kill(group.pids[0], 9)
    with pytest.raises(RuntimeError):
        dist.all_reduce(mine, group=joined)


def test_joining_without_the_others_is_an_error_in_time(group):
    group.wait_ready()
    with pytest.raises(RuntimeError):
        group.join(CPU, seconds=0.5)


def _listening(group: RankGroup) -> list[str]:
    """The TCP ports that rank 1 listens at, as /proc/net/tcp has them."""
    pid = group.pids[0]
    sockets = {os.readlink(f"/proc/{pid}/fd/{one}") for one in os.listdir(f"/proc/{pid}/fd")}
    with open(f"/proc/{pid}/net/tcp") as table:
        lines = table.readlines()[1:]
    return [line for line in lines if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in sockets]
