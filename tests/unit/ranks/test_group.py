"""Ranks as processes, and the process group that only they can join."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.processes.cluster import wait_for
from support.ranks.groups import COMMAND, alive, obedient_group
from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.config.flags import config_from, public_values
from triptych.base.errors import ConfigError
from triptych.base.ranks.channel import RankFailed, RankLost, RankStartError
from triptych.base.ranks.group import RankGroup
from triptych.base.ranks.process_group import check_ranks, device_of, leave

Start = Callable[..., RankGroup]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts groups, which end with the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    groups: list[RankGroup] = []

    def started(size: int, *, model: str = "", token: str = "") -> RankGroup:
        groups.append(obedient_group(size, model, token))
        groups[-1].start()
        return groups[-1]

    yield started
    for group in groups:
        group.close(seconds=0)
        assert not any(pid is not None and alive(pid) for pid in group.pids)


def test_three_ranks_start_answer_in_their_order_and_end(start):
    group = start(3, token="hush")
    one, two = group.wait_ready()
    assert (one["rank"], two["rank"]) == (1, 2)
    assert "hush" not in str(one)
    assert config_from(EncoderConfig, one["config"]) == EncoderConfig()
    assert group.call({"do": "echo"}) == [
        {"rank": rank, "size": 3, "echo": {"do": "echo"}} for rank in (1, 2)
    ]
    group.send({"do": "echo"}, to=2)
    assert group.receive(2)["rank"] == 2


@pytest.mark.parametrize("config", [EncoderConfig(model="m", threads=3), PDConfig(kv_memory=7, port=1)])
def test_a_config_without_its_secrets_passes_unchanged(config):
    assert config_from(type(config), public_values(config)) == config
    assert "internal_token" not in public_values(config)


def test_a_rank_reads_what_it_is_handed_and_keeps_no_descriptor(start):
    group = start(2)
    group.wait_ready()
    with tempfile.TemporaryFile() as file:
        file.write(b"pixels")
        file.flush()
        (before,) = group.call({"do": "descriptors"})
        for _ in range(3):
            group.send({"do": "read"}, [file.fileno()])
            assert group.collect() == [{"texts": ["pixels"]}]
        assert group.call({"do": "descriptors"}) == [before]


def test_a_rank_that_raises_says_so_and_does_the_next_command(start):
    group = start(3)
    group.wait_ready()
    group.send({"do": "raise"}, to=1)
    group.send({"do": "echo"}, to=2)
    with pytest.raises(RankFailed, match="rank 1: ValueError: the test says so") as failed:
        group.collect()
    assert failed.value.rank == 1
    assert [reply["rank"] for reply in group.call({"do": "echo"})] == [1, 2]


@pytest.mark.parametrize("end", ["kill", "panic"])
def test_a_rank_that_dies_ends_the_wait_for_it_and_its_beat(start, end):
    group = start(3)
    group.wait_ready()
    if end == "kill":
        os.kill(group.pids[0], signal.SIGKILL)
    else:
        group.send({"do": "panic"}, to=1)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        group.receive(1)
    dead, alive_beat = group.beats
    wait_for("the beat's death", lambda: dead.dead)
    assert not alive_beat.dead


def test_the_beat_of_a_rank_that_is_stopped_stands_still(start):
    group = start(2)
    group.wait_ready()
    (beat,) = group.beats
    first = beat.count
    wait_for("a beat of an idle rank", lambda: beat.count > first)
    os.kill(group.pids[0], signal.SIGSTOP)
    stopped = beat.count
    group.send({"do": "echo"})
    with pytest.raises(RankLost, match="has not answered in time"):
        group.receive(1, seconds=2)
    assert beat.count <= stopped + 1, "one look may have been on its way"
    assert not beat.dead


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ("wrong", ConfigError, "rank 1: --model wrong"),
        ("broken", RankStartError, "rank 1 did not start: RuntimeError: half a checkpoint"),
        ("killed", RankStartError, "rank 1 is gone; its log says more"),
    ],
)
def test_ranks_that_do_not_start_say_why_and_leave_no_process(start, model, error, text):
    group = start(3, model=model)
    with pytest.raises(error, match=text):
        group.wait_ready()
    assert not any(alive(pid) for pid in group.pids)


def test_a_rank_that_does_not_load_in_time_is_ended(start):
    group = start(2, model="hangs")
    with pytest.raises(RankStartError, match="in time"):
        group.wait_ready(seconds=0.1)
    assert not alive(group.pids[0])


def test_a_program_that_is_not_known_is_not_imported(start):
    group = RankGroup("os", 2, EncoderConfig(), command=COMMAND)
    group.start()
    with pytest.raises(RankStartError, match="KeyError: 'os'"):
        group.wait_ready()


def test_a_rank_whose_process_cannot_be_started_is_an_error_at_once():
    group = RankGroup("test", 3, EncoderConfig(), command=("/nowhere",))
    with pytest.raises(RankStartError, match="rank 1 did not start: .*No such file"):
        group.start()


def test_a_rank_outlives_the_signals_that_end_a_service_until_rank_0_ends_it(start):
    group = start(2)
    group.wait_ready()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(group.pids[0], number)
    assert group.call({"do": "echo"})[0]["rank"] == 1
    group.close()
    assert not group.beats[0].dead


def test_ranks_of_a_rank_0_that_is_killed_end_by_themselves(start):
    with subprocess.Popen([sys.executable, "-m", "support.ranks.leader"], stdout=subprocess.PIPE) as leader:
        pids = [int(word) for word in leader.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
        leader.kill()
    assert len(pids) == 2
    wait_for("the end of a stopped rank and of one at work", lambda: not any(map(alive, pids)), 10)


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
        (4, "cuda", 3, "--tensor-parallel 4 from --device cuda on needs GPUs 0 to 3 and 3 are there"),
        (2, "cuda:3", 4, "from --device cuda:3 on needs GPUs 3 to 4 and 4 are there"),
    ],
)
def test_ranks_without_a_device_are_refused_with_the_remedy(ranks, device, gpus, text):
    with pytest.raises(ConfigError, match=text):
        check_ranks("--tensor-parallel", ranks, torch.device(device), lambda: gpus)
