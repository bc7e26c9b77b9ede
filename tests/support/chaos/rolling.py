"""Restarts of every process of a cluster in turn, under the load of clients behind a load balancer."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import openai

from support.chaos.soak import MOST_RETRIES, TOKENS, Clients
from support.data.oracle import OracleResult
from support.data.traffic import Case, ask
from support.processes.cluster import Cluster, wait_for


class BalancedClients(Clients):
    """Clients whose requests go to any proxy that takes them, as behind a load balancer.

    A proxy that cannot be connected to, or that refuses while it drains, has not got the request: it goes to
    the next one. Whatever breaks after that is a loss.
    """

    def __init__(self, urls: Sequence[str], cases: Sequence[Case], reference: Sequence[OracleResult]) -> None:
        super().__init__(urls[0], cases, reference)
        #: When each answer came, and the seconds that it took.
        self.answers: list[tuple[float, float]] = []
        self.unreachable = 0
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
        began = time.monotonic()
        for _ in range(MOST_RETRIES):
            try:
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
                now = time.monotonic()
                self.answers.append((now, now - began))
                self._judge(number, answer.token_ids)
                return
        self.tally.lost.append(f"case {number}: refused {MOST_RETRIES} times")


@dataclass
class Restarts:
    """The restarts of one run: (name, begin, end) on the monotonic clock."""

    done: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.done.append((name, began, time.monotonic()))

    def worker(self, cluster: Cluster, name: str) -> None:
        """SIGTERM to a worker; returns when another process of that name is registered."""
        pool = name.partition("-")[0]
        count = sum(worker.pool == pool for worker in cluster.workers())
        before = {worker.incarnation for worker in cluster.workers()}
        with self.timed(name):
            self._another(cluster, name)
            wait_for(
                f"{name} to register again",
                lambda: (
                    sum(w.pool == pool for w in cluster.workers()) == count
                    and any(w.pool == pool and w.incarnation not in before for w in cluster.workers())
                ),
            )

    def proxy(self, cluster: Cluster, name: str, url: str) -> None:
        """SIGTERM to a proxy; returns when another process of that name is ready."""
        with self.timed(name):
            self._another(cluster, name)
            wait_for(f"{name} to be ready", lambda: ready(url))

    def by(self, name: str, restart: Callable[[], None], url: str) -> None:
        """A restart that the test carries out itself; returns when the proxy at `url` is ready."""
        with self.timed(name):
            restart()
            wait_for(f"the proxy after {name}", lambda: ready(url))

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


def figures(clients: BalancedClients, restarts: Restarts) -> list[Any]:
    """A row of the table: what the clients saw, and how long restarts took."""
    tally, seconds = clients.tally, sorted(taken for _, taken in clients.answers)
    took = [end - begin for _, begin, end in restarts.done]
    return [
        tally.answered,
        len(tally.lost),
        len(tally.wrong),
        tally.ties,
        sum(tally.refused.values()) + clients.unreachable,
        f"{median(seconds):.2f} / {seconds[-1]:.2f}",
        len(took),
        f"{median(took):.1f} / {max(took):.1f}",
    ]


def draw(path: Path, title: str, clients: BalancedClients, restarts: Restarts) -> None:
    """A time line: each answer at its end with the seconds it took, and each restart as a bar."""
    from matplotlib.figure import Figure

    start = min(begin for _, begin, _ in restarts.done) - 5.0
    figure = Figure(figsize=(10, 6), layout="constrained")
    bars, answers = figure.subplots(2, 1, sharex=True, height_ratios=[1.2, 1])
    for row, (_, begin, end) in enumerate(restarts.done):
        bars.barh(row, end - begin, left=begin - start, color="#d95f02", height=0.6)
    bars.set_yticks(range(len(restarts.done)), [name for name, _, _ in restarts.done])
    bars.invert_yaxis()
    bars.set_title(f"{title}: restarts, from SIGTERM to the next process at work")
    moments = [moment - start for moment, _ in clients.answers]
    answers.scatter(moments, [seconds for _, seconds in clients.answers], s=6, color="#1b9e77")
    answers.set_xlim(left=0)
    answers.set_ylim(bottom=0)
    answers.set_xlabel("seconds")
    answers.set_ylabel("request, seconds")
    answers.set_title("answers, each at its end")
    figure.savefig(path, dpi=100)
