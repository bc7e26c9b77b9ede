"""Restarts of every process of a cluster in turn, under the load of clients behind a load balancer."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
                self._judge(number, answer.token_ids)
                return
        self.tally.lost.append(f"case {number}: refused {MOST_RETRIES} times")


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
