"""A Deployment of encoder workers: real servers with real registrations, started and drained as pods are."""

from __future__ import annotations

import asyncio

from support.fakes.fake_encoder import FakeEncoder
from triptych.ec_connector.registry.heartbeat import Heartbeat
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore


class EncoderFleet:
    """A ScaleTarget. A pod registers `cold_start` seconds after it was asked for, and drains at its end."""

    def __init__(self, store: EmbeddingStore, *, cold_start: float, tower_seconds: float) -> None:
        self._store = store
        self._cold_start = cold_start
        self._tower_seconds = tower_seconds
        self._pods: list[_Pod] = []
        self._leaving: list[_Pod] = []
        #: Replicas that were asked for, one after another.
        self.steps: list[int] = []

    @property
    def replicas(self) -> int:
        return len(self._pods)

    @property
    def registered(self) -> int:
        return sum(pod.registered for pod in self._pods)

    def scale(self, replicas: int) -> None:
        self.steps.append(replicas)
        while len(self._pods) < replicas:
            encoder = FakeEncoder(self._store)
            encoder.tower_seconds = self._tower_seconds
            self._pods.append(_Pod(encoder, self._store, self._cold_start))
        while len(self._pods) > replicas:
            pod = self._pods.pop()
            pod.stop.set()
            self._leaving.append(pod)

    async def close(self) -> None:
        """Ends all pods; an error of one of them is raised here."""
        self.scale(0)
        await asyncio.gather(*(pod.task for pod in self._leaving))


class _Pod:
    def __init__(self, encoder: FakeEncoder, store: EmbeddingStore, cold_start: float) -> None:
        self._encoder = encoder
        self._store = store
        self._cold_start = cold_start
        self.registered = False
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(self._cold_start)
        await self._encoder.start()
        heartbeat = Heartbeat(Registry(self._store), self._encoder.info)
        heartbeat.start()
        self.registered = True
        await self.stop.wait()
        # As a worker drains: it is withdrawn first, and ends when its open jobs have.
        self.registered = False
        await heartbeat.stop()
        # Proxies that have not looked at the registry yet may still send a job.
        await asyncio.sleep(1.0)
        while self._encoder.open:
            await asyncio.sleep(0.02)
        await self._encoder.kill()
