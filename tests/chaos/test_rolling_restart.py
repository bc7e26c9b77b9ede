"""A rolling restart of everything, by each launcher: every answer is whole and right."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.rolling import BalancedClients, Restarts, ready
from support.chaos.soak import TOKENS
from support.data.traffic import expected, mixed_cases
from support.processes.cluster import PATIENCE, Cluster, free_port, start_cluster, wait_for
from support.processes.ray_nodes import ray_nodes
from support.waiting import within

CLIENTS = 6
#: Answers without any restart, before the first one and after the last.
QUIET_SECONDS = 5.0
COUNTS = ("--encoders", "3", "--pd-workers", "2")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Rolled:
    """A cluster of 2 proxies, 3 encoders and 2 PD workers.

    `first` and `last` restart the two proxies and `store` the store; each waits until that is done.
    """

    cluster: Cluster
    urls: tuple[str, str]
    first: Callable[[Restarts], None]
    last: Callable[[Restarts], None]
    store: Callable[[Restarts], None]


@pytest.fixture
def local(checkpoint: Path) -> Iterator[Rolled]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolling-")))
        cluster = start_cluster(checkpoint, folder / "run", *COUNTS, "--threads", "1")
        stack.callback(cluster.stop)
        words = ("proxy", "--port", str(free_port()), "--grpc-port", str(free_port()))
        second = f"http://127.0.0.1:{words[2]}"

        def start() -> None:
            for process in cluster.extra:
                process.terminate()
                process.wait(PATIENCE)
            cluster.extra.clear()
            cluster.add_worker(*words)

        start()
        wait_for("the second proxy", lambda: ready(second))
        yield Rolled(
            cluster,
            (cluster.url, second),
            lambda restarts: restarts.proxy(cluster, "proxy", cluster.url),
            lambda restarts: restarts.by("proxy-1", start, second),
            lambda restarts: restarts.proxy(cluster, "store", cluster.url),
        )


@pytest.fixture
def ray(checkpoint: Path, tmp_path: Path) -> Iterator[Rolled]:
    with ray_nodes(tmp_path, cpus=8) as nodes:
        cluster = nodes.start_cluster(checkpoint, tmp_path / "run", *COUNTS, "--proxies", "2")
        try:
            host, _, port = cluster.url.rpartition(":")
            second = f"{host}:{int(port) + 10}"
            wait_for("the second proxy", lambda: ready(second))
            yield Rolled(
                cluster,
                (cluster.url, second),
                lambda restarts: restarts.proxy(cluster, "proxy-0", cluster.url),
                lambda restarts: restarts.proxy(cluster, "proxy-1", second),
                lambda restarts: restarts.by("store", nodes.store.restart, cluster.url),
            )
        finally:
            cluster.stop()


@pytest.mark.parametrize("launcher", ["local", "ray"])
async def test_no_answer_is_lost_or_wrong_while_everything_is_restarted_in_turn(
    launcher: str, request: pytest.FixtureRequest, checkpoint: Path
) -> None:
    rolled: Rolled = request.getfixturevalue(launcher)
    cases = mixed_cases(24, seed=17)
    clients = BalancedClients(
        rolled.urls, cases, await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    )
    asking = asyncio.create_task(clients.run(CLIENTS))
    restarts = Restarts()
    await asyncio.sleep(QUIET_SECONDS)
    await asyncio.to_thread(_roll, rolled, restarts)
    await asyncio.sleep(QUIET_SECONDS)
    clients.end()
    await within("the last answers of the clients", asking, 2 * PATIENCE)
    await asyncio.to_thread(assert_at_rest, rolled.cluster)
    assert not clients.tally.lost
    assert not clients.tally.wrong
    assert clients.tally.ties * 100 <= clients.tally.answered
    assert len(restarts.done) == 8
    # Each restart met requests in flight.
    assert clients.tally.answered > CLIENTS * len(restarts.done)


def _roll(rolled: Rolled, restarts: Restarts) -> None:
    for name in ("encoder-0", "encoder-1", "encoder-2", "pd-0", "pd-1"):
        restarts.worker(rolled.cluster, name)
    rolled.store(restarts)
    rolled.first(restarts)
    rolled.last(restarts)
