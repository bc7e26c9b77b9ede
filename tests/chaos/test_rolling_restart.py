"""A rolling restart of everything, by each launcher: every answer is whole and right."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.soak import MAX_RETRIES, TOKENS, Clients
from support.data.oracle import OracleResult
from support.data.traffic import Case, ask, expected, mixed_cases
from support.processes.cluster import PATIENCE, Cluster, free_port, start_cluster, wait_for
from support.processes.ray_nodes import ray_nodes
from support.waiting import within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class BalancedClients(Clients):
    """Clients whose requests go to any proxy that takes them, as behind a load balancer.

    A proxy that cannot be connected to, or that refuses while it drains, has not got the request: it goes to
    the next one. Whatever breaks after that is a loss.
    """

    def __init__(self, urls: Sequence[str], cases: Sequence[Case], reference: Sequence[OracleResult]) -> None:
        super().__init__(urls[0], cases, reference)
        self.unreachable = 0
        #: Requests that a proxy may have.
        self.under_way = 0
        self._urls = urls
        self._choice = random.Random(7)

    async def _one(self) -> None:
        while not self._ending.is_set():
            await self._ask_any(self._choice.randrange(len(self._cases)))

    async def _ask_any(self, number: int) -> None:
        """Half of the requests repeat what is cached, half are new to the cluster."""
        salt: dict[str, Any] = (
            {"cache_salt": f"{self._choice.random()}"} if self._choice.random() < 0.5 else {}
        )
        for _ in range(MAX_RETRIES):
            try:
                with self._one_more():
                    answer = await ask(self._choice.choice(self._urls), self._cases[number], TOKENS, **salt)
            except openai.APIStatusError as error:
                if error.status_code not in (429, 503):
                    self.tally.lost.append(f"case {number}: {error.status_code} {error.message[:200]}")
                    return
                self.tally.refused[error.status_code] += 1
                await asyncio.sleep(0.2)
            except (openai.APIError, AssertionError) as error:
                # By its name: openai has changed its HTTP library.
                if type(error.__cause__).__name__ != "ConnectError":
                    self.tally.lost.append(f"case {number}: {error!r} by {error.__cause__!r}"[:300])
                    return
                self.unreachable += 1
                await asyncio.sleep(0.2)
            else:
                self._judge(number, answer.token_ids)
                return
        self.tally.lost.append(f"case {number}: refused {MAX_RETRIES} times")

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def answer_more(self) -> None:
        """Returns once each client could have had an answer since, and requests are under way again."""
        enough = self.tally.answered + CLIENTS
        wait_for("more answers", lambda: self.tally.answered >= enough and self.under_way)


@dataclass
class Restarts:
    """The names of what was restarted in one run."""

    done: list[str] = field(default_factory=list)

    def worker(self, cluster: Cluster, name: str) -> None:
        """SIGTERM to a worker; returns when another process of that name is registered."""
        pool = name.partition("-")[0]
        count = sum(worker.pool == pool for worker in cluster.workers())
        before = {worker.incarnation for worker in cluster.workers()}
        self._another(cluster, name)
        wait_for(
            f"{name} to register again",
            lambda: (
                sum(w.pool == pool for w in cluster.workers()) == count
                and any(w.pool == pool and w.incarnation not in before for w in cluster.workers())
            ),
        )
        self.done.append(name)

    def proxy(self, cluster: Cluster, name: str, url: str) -> None:
        """SIGTERM to a proxy; returns when another process of that name is ready."""
        self._another(cluster, name)
        wait_for(f"{name} to be ready", lambda: ready(url))
        self.done.append(name)

    def by(self, name: str, restart: Callable[[], None], url: str) -> None:
        """A restart that the test carries out itself; returns when the proxy at `url` is ready."""
        restart()
        wait_for(f"the proxy after {name}", lambda: ready(url))
        self.done.append(name)

    def _another(self, cluster: Cluster, name: str) -> None:
        pid = cluster.pid(name)
        os.kill(pid, signal.SIGTERM)
        wait_for(f"another {name}", lambda: cluster.pid(name) != pid)


def ready(url: str) -> bool:
    """Whether GET /ready says 200."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


CLIENTS = 6
COUNTS = ("--encoders", "3", "--pd-workers", "2")


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
    await asyncio.to_thread(_roll, rolled, restarts, clients)
    clients.end()
    await within("the last answers of the clients", asking, 2 * PATIENCE)
    await asyncio.to_thread(assert_at_rest, rolled.cluster)
    assert not clients.tally.lost
    assert not clients.tally.wrong
    assert clients.tally.ties * 100 <= clients.tally.answered
    assert len(restarts.done) == 8


def _roll(rolled: Rolled, restarts: Restarts, clients: BalancedClients) -> None:
    """Restarts everything in turn; each restart meets requests, and is followed by answers."""
    workers = ("encoder-0", "encoder-1", "encoder-2", "pd-0", "pd-1")
    turns: list[Callable[[], None]] = [partial(restarts.worker, rolled.cluster, name) for name in workers]
    turns += [partial(restart, restarts) for restart in (rolled.store, rolled.first, rolled.last)]
    for restart in turns:
        clients.answer_more()
        restart()
    clients.answer_more()
