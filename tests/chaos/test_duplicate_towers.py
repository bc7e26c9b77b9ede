"""How often a picture goes through two towers: two proxies are asked for it at once, encoders come and go.

TRIPTYCH_DUPLICATES_SECONDS=600 measures for so long, TRIPTYCH_TEST_NO_LEASES=1 without leases in the store.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from support.chaos.faults import sleeping
from support.chaos.stages import hold
from support.data.traffic import Case, picture
from support.probing import probe
from support.processes.cluster import Cluster, free_port, wait_for

SECONDS = float(os.environ.get("TRIPTYCH_DUPLICATES_SECONDS", "60"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]
#: An item sleeps so long in the tower. Pictures that are under way at a time: every encoder has a queue.
TOWER_SECONDS, AT_ONCE = 0.3, 24
#: Encoders of the cluster, and seconds between two kills of one and changes of their number.
ENCODERS, TURN_SECONDS = 3, min(60.0, SECONDS / 3)


async def _ask(session: aiohttp.ClientSession, url: str, case: Case) -> int:
    body = {"messages": case.client_messages(), "max_tokens": 1, "temperature": 0}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            await reply.read()
            return reply.status
    except aiohttp.ClientError:
        return 0


async def _both(urls: list[str], end: float) -> Counter[int]:
    """The statuses of all requests: every new picture is asked of all proxies at the same moment."""
    statuses: Counter[int] = Counter()
    numbers = itertools.count()

    async def one(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < end:
            number = next(numbers)
            case = Case((0, f"what is in number {number}"), (picture(number, 64, 64),))
            statuses.update(await asyncio.gather(*(_ask(session, url, case) for url in urls)))

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(one(session) for _ in range(AT_ONCE)))
    return statuses


async def _come_and_go(cluster: Cluster, checkpoint: str, end: float, towers: Path) -> int:
    """Every turn kills an encoder of the cluster, and starts or ends one beside them; the number of kills.

    Each kill meets towers at work: pictures have begun since the one before.
    """
    kills, beside, seen = 0, None, 0
    while time.monotonic() + TURN_SECONDS < end:
        await asyncio.sleep(TURN_SECONDS)
        await hold("pictures in towers", lambda seen=seen: _begun(towers) > seen + ENCODERS)
        seen = _begun(towers)
        cluster.kill(f"encoder-{kills % ENCODERS}")
        kills += 1
        if beside is None:
            beside = cluster.add_worker("encoder", checkpoint, "--threads", "1")
        else:
            beside.terminate()
            beside = None
    return kills


def _begun(towers: Path) -> int:
    return len(towers.read_text().split())


async def test_hardly_a_picture_of_two_proxies_goes_through_two_towers_while_encoders_come_and_go(
    start, checkpoint, tmp_path, monkeypatch
) -> None:
    towers = tmp_path / "towers"
    environment = {**sleeping(tower=TOWER_SECONDS), "TRIPTYCH_TEST_TOWERS": str(towers)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # of encoders beside the cluster, too
    cluster = start("--encoders", str(ENCODERS), environment=environment)
    port = free_port()
    cluster.add_worker("proxy", "--port", str(port), "--grpc-port", str(free_port()))
    wait_for("the second proxy", lambda: probe(port, "/ready")["code"] == 200)
    urls = [cluster.url, f"http://127.0.0.1:{port}"]
    end = time.monotonic() + SECONDS
    statuses, kills = await asyncio.gather(
        _both(urls, end), _come_and_go(cluster, str(checkpoint), end, towers)
    )
    counts = Counter(towers.read_text().split())
    duplicates = counts.total() - len(counts)
    print(
        f"{SECONDS:.0f} s, {kills} kills: requests by status {dict(statuses)}, {len(counts)} pictures, "
        f"{counts.total()} towers, {duplicates} of them duplicates: {duplicates / counts.total():.2%}"
    )
    assert kills
    assert statuses[200] > 0.95 * statuses.total()
    # With each encoder that is killed go the pictures that it had begun.
    assert duplicates < 0.05 * counts.total()
