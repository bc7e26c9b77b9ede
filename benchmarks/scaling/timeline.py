"""What a cluster's encoder pool does over time: sampled from its metrics, its supervisor and its registry."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.control import StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.goodput.launch import Launched, processes_of

EVERY = 0.25
_BACKLOG = "triptych_encoder_backlog_seconds"
_IN_FLIGHT = "triptych_requests_in_flight"
_DESIRED = "triptych_encoder_workers_desired"
_CHANGE = re.compile(r"encoder pool of (\d+) \((\w+)\): (start|drain)(.*)")


@dataclass(frozen=True, slots=True)
class PoolSample:
    """One look: seconds since the first; workers wanted, running as processes, and registered."""

    at: float
    desired: float
    running: int
    ready: int
    backlog: float
    in_flight: float


@dataclass(slots=True)
class Timeline:
    """All looks at one cluster, and when bursts began."""

    samples: list[PoolSample] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)
    #: "up" and "down" for each change of the pool, by burst.
    changes: list[list[str]] = field(default_factory=list)

    def most(self) -> int:
        """The most encoder processes at once."""
        return max((sample.running for sample in self.samples), default=0)

    def turns(self) -> list[int]:
        """How often the direction changed, by burst."""
        return [max(len(list(groupby(words))) - 1, 0) for words in self.changes]


class Sampler:
    """Looks at a cluster until stopped."""

    def __init__(self, cluster: Launched) -> None:
        self._cluster = cluster
        self._began = time.monotonic()
        self.timeline = Timeline()

    def now(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> None:
        while True:
            self.timeline.samples.append(await asyncio.to_thread(self._look, await self._registered()))
            await asyncio.sleep(EVERY)

    def encoders(self) -> int:
        """Encoder processes that run or drain."""
        return sum(name.startswith("encoder-") for name in processes_of(self._cluster.run_dir))

    async def _registered(self) -> int:
        """Encoders in the registry; none while the store does not answer."""
        try:
            store = await EmbeddingStore.connect(self._cluster.store_url)
        except StoreUnavailable:
            return 0
        try:
            return sum(worker.pool == "encoder" for worker in await Registry(store).workers())
        finally:
            await store.close()

    def _look(self, ready: int) -> PoolSample:
        at, values = self.now(), scrape(f"{self._cluster.url}/metrics")
        return PoolSample(
            at,
            desired=values.get(_DESIRED, 0.0),
            running=self.encoders(),
            ready=ready,
            backlog=values.get(_BACKLOG, 0.0),
            in_flight=values.get(_IN_FLIGHT, 0.0),
        )


def scrape(url: str) -> dict[str, float]:
    """The samples of a /metrics page by name, labels summed up."""
    with urllib.request.urlopen(url, timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    values: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def changes(log: Path, since: int) -> list[str]:
    """ "up" or "down" for each change of the encoder pool that the log names after `since` characters."""
    found: Sequence[tuple[str, ...]] = _CHANGE.findall(log.read_text(errors="replace")[since:])
    return ["up" if word == "start" else "down" for _, _, word, _ in found]
