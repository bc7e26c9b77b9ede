"""A rank of a PD worker is killed or stopped in mid-stream: every answer right, no token twice or missing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.stages import IN_THE_MIDDLE, hold
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, Case
from support.processes.cluster import Cluster
from support.processes.processes import lives, survivors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Long enough for a busy machine to compute a layer, short enough to wait for.
STALL_SECONDS = 15


def other_ranks(leader: int) -> list[int]:
    """The processes of ranks 1, 2, … of the worker whose process is `leader`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            words = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == leader and b"triptych.base.ranks.process" in words:
            found.append(int(folder.name))
    return found


def kill_other(leader: int, other: int) -> None:
    os.kill(other, signal.SIGKILL)


def stop_other(leader: int, other: int) -> None:
    os.kill(other, signal.SIGSTOP)


def kill_leader(leader: int, other: int) -> None:
    os.kill(leader, signal.SIGKILL)


@pytest.mark.parametrize("strike", [kill_other, stop_other, kill_leader])
@pytest.mark.parametrize("workers", [1, 2], ids=["restart", "takeover"])
async def test_a_rank_that_is_lost_in_mid_stream_loses_no_request(
    make_cluster: Callable[..., Cluster],
    slow_steps: tuple[str, ...],
    cases: list[Case],
    reference: list[Any],
    strike: Callable[[int, int], None],
    workers: int,
) -> None:
    flags = ("--tensor-parallel", "2", "--stall-timeout", str(STALL_SECONDS), "--max-queue", "100")
    cluster = make_cluster(workers, *slow_steps, *flags)
    leader = cluster.pid("pd-0")
    (other,) = other_ranks(leader)
    async with Streams(cluster.url, cases, STREAM_TOKENS, [strike.__name__]) as streams:
        await hold("streams in the middle", lambda: streams.in_the_middle >= IN_THE_MIDDLE, streams)
        strike(leader, other)
        got = await streams.all()
    assert_exact(reference, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    await hold("the worker to start anew", lambda: cluster.pids("pd").get("pd-0", leader) != leader)
    assert await asyncio.to_thread(survivors, [leader, other]) == [], "a rank outlives its worker"
    assert cluster.total("proxy", "triptych_resumes_total") > 0
    await asyncio.to_thread(assert_at_rest, cluster)
    (again,) = other_ranks(cluster.pid("pd-0"))
    assert lives(again)
