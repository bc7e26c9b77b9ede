"""The workers that this proxy knows: the registry's word, checked by gRPC health.

A worker that the registry no longer names stays routable while it answers health checks: the store may
be down or flushed. It is forgotten when its registration is gone and its health fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.errors import InvalidRequest, NotFound, TriptychError, Unavailable
from triptych.internal_auth import InternalKey
from triptych.proxy.encoder_prompt import ModelKind
from triptych.proxy.lifecycle import RETRY_AFTER
from triptych.rpc import make_channel
from triptych.rpc_auth import WorkerSession
from triptych.types import WorkerInfo

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
HEALTH_INTERVAL = 1.0
HEALTH_TIMEOUT = 5.0
PROXY_TERM = 5.0
#: How long a caller waits for the store's answer in one poll.
STORE_TIMEOUT = 2.0
#: Forged registrations that are remembered, so that each is warned of once.
MAX_FORGED = 256
_SERVING = health_pb2.HealthCheckResponse.SERVING


class RegistryView(Protocol):
    """What the pool asks of the connector's registry."""

    async def workers(self) -> list[WorkerInfo]: ...
    async def declare_proxy(self, proxy_id: str, term: float) -> None: ...
    async def proxies(self) -> int: ...
    async def collect_dead(self, older_than: float = 600.0) -> int: ...


class EpochView(Protocol):
    """What the pool asks of the embedding store."""

    async def epoch(self) -> str: ...


@dataclass(slots=True)
class Worker:
    """A known worker. `alive`: it answered its last health check; `serving`: it takes new work."""

    info: WorkerInfo
    channel: aio.Channel
    #: Proves that the worker is the registered one; None where no internal token is in use.
    session: WorkerSession | None = None
    registered: bool = True
    alive: bool = True
    serving: bool = True
    watch: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Binding:
    """What a request keeps for life: its model's key, and the namespace of its media."""

    model_key: str
    namespace: str


@dataclass(slots=True)
class _Model:
    name: str
    kind: ModelKind
    #: Namespaces in the order in which they were first seen.
    namespaces: list[str] = field(default_factory=list)


def kind_of(info: WorkerInfo) -> ModelKind:
    """What a PD worker's registration says of its model."""
    return ModelKind(bool(info.capacity.get("encoder_decoder")), info.modality)


class WorkerPool:
    """Polls the registry, watches every worker, and calls `on_change` when either has news."""

    def __init__(
        self,
        registry: RegistryView,
        store: EpochView,
        proxy_id: str,
        token: str = "",
        *,
        health_timeout: float = HEALTH_TIMEOUT,
    ) -> None:
        self._registry = registry
        self._store = store
        self._proxy_id = proxy_id
        self._token = token
        self._key = InternalKey(token) if token else None
        #: Registrations without a right proof, each warned of once.
        self._forged: set[tuple[str, str, str]] = set()
        self._health_timeout = health_timeout
        self._task: asyncio.Task[None] | None = None
        self._models: dict[str, _Model] = {}
        #: By pool and address: one process may serve both pools at one address.
        self.workers: dict[tuple[str, str], Worker] = {}
        self.store_ok = False
        #: The store's epoch at the last poll: another value later means that it was flushed or restarted.
        self.epoch = ""
        self.proxies = 1
        self.on_change: Callable[[], None] = lambda: None
        #: Called when a worker has gone or has stalled.
        self.on_lost: Callable[[Worker], None] = lambda worker: None

    async def start(self) -> None:
        await self.poll()
        self._task = asyncio.create_task(self._poll_forever(), name="pool")

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *(w.watch for w in self.workers.values())) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.channel.close() for worker in self.workers.values()))
        self.workers.clear()

    # -- questions ---------------------------------------------------------------------------------

    def serving(self, pool: str) -> list[Worker]:
        """Workers of "encoder" or "pd" that may get new work."""
        return [w for w in self.workers.values() if w.info.pool == pool and w.alive and w.serving]

    def models(self) -> list[str]:
        """Names that a request may use, whether or not a worker of theirs is live now."""
        return sorted({model.name for model in self._models.values()})

    def resolve_model(self, name: str) -> str:
        """The served name that a request means; an empty one means the only one.

        InvalidRequest or NotFound, which name what there is; Unavailable while nothing is known.
        """
        models = self.models()
        if not models:
            raise Unavailable("no PD worker has been seen yet", retry_after=RETRY_AFTER)
        if not name and len(models) == 1:
            return models[0]
        if not name:
            raise InvalidRequest(f"model must name one of {', '.join(models)}", param="model")
        if name not in models:
            raise NotFound(
                f"model {name[:80]!r} is not served here; there is {', '.join(models)}", param="model"
            )
        return name

    def live_models(self) -> list[str]:
        return sorted({worker.info.model for worker in self.serving("pd")})

    def model_key(self, model: str) -> str | None:
        """The newest key of the model that has a live PD worker, else its newest one; None: never seen."""
        keys = [key for key, known in self._models.items() if known.name == model]
        live = {worker.info.model_key for worker in self.serving("pd")}
        return next((key for key in reversed(keys) if key in live), keys[-1] if keys else None)

    def kind(self, model: str) -> ModelKind:
        """What the model takes; a decoder-only one where nothing is known."""
        key = self.model_key(model)
        return ModelKind() if key is None else self._models[key].kind

    def namespace(self, model_key: str) -> str | None:
        """The key's newest namespace with a live encoder, else its newest one; None: never seen."""
        names = self._models[model_key].namespaces
        live = {name for worker in self.serving("encoder") for name in worker.info.namespaces}
        return next((name for name in reversed(names) if name in live), names[-1] if names else None)

    def max_model_lens(self, model_key: str) -> list[int]:
        """The limits of all known PD workers of the key, live or not; 0 where one names none."""
        infos = [worker.info for worker in self.workers.values() if worker.info.pool == "pd"]
        return [info.capacity.get("max_model_len", 0) for info in infos if info.model_key == model_key]

    # -- upkeep ------------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.poll()

    async def poll(self) -> None:
        """One look at the registry. Never raises: a store that is down leaves the workers as they are."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT):
                await self._registry.declare_proxy(self._proxy_id, PROXY_TERM)
                infos = await self._registry.workers()
                self.epoch = await self._store.epoch()
                self.proxies = max(await self._registry.proxies(), 1)
        except (TriptychError, TimeoutError) as error:
            if self.store_ok:
                log.warning("the store does not answer: %s", error)
            self.store_ok = False
            return
        if not self.store_ok:
            log.info("the store answers")
        self.store_ok = True
        self._take_in(infos)

    def _take_in(self, infos: Sequence[WorkerInfo]) -> None:
        infos = [info for info in infos if self._is_ours(info)]
        named = {(info.pool, info.address): info for info in infos}
        changed = False
        for key, info in named.items():
            worker = self.workers.get(key)
            if worker is None:
                self._add(info)
                changed = True
            elif worker.info != info:
                changed |= self._renew(worker, info)
        for info in sorted(infos, key=lambda info: info.pool != "pd"):
            self._declare(info)
        for key, worker in list(self.workers.items()):
            worker.registered = key in named
            if not worker.registered and not worker.alive:
                self._remove(worker)
                changed = True
        if changed:
            self.on_change()

    def _is_ours(self, info: WorkerInfo) -> bool:
        """Whether somebody who knows the internal token wrote this registration; no other one is followed."""
        known = self.workers.get((info.pool, info.address))
        if self._key is None or (known is not None and known.info == info) or self._key.has_signed(info):
            return True
        who = (info.pool[:64], info.address[:64], info.incarnation[:64])
        if who not in self._forged:
            if len(self._forged) >= MAX_FORGED:
                self._forged.clear()
            self._forged.add(who)
            log.warning(
                "a registration of %.32r worker %.64r is ignored: its proof is not made with our "
                "--internal-token",
                info.pool,
                info.address,
            )
        return False

    def _add(self, info: WorkerInfo) -> None:
        log.info("%s worker %s (%s) is here", info.pool, info.address, info.model)
        session = WorkerSession(self._token, info) if self._token else None
        worker = Worker(info, make_channel(info.address, session), session)
        self.workers[info.pool, info.address] = worker
        worker.watch = asyncio.create_task(self._watch(worker), name=f"watch {info.address}")

    def _renew(self, worker: Worker, info: WorkerInfo) -> bool:
        if worker.info.incarnation != info.incarnation:
            log.info("%s worker %s was started again", info.pool, info.address)
            worker.alive = worker.serving = True
            if worker.session is not None:
                worker.session.expect(info)
        worker.info = info
        return True

    def _remove(self, worker: Worker) -> None:
        log.info("%s worker %s is gone", worker.info.pool, worker.info.address)
        del self.workers[worker.info.pool, worker.info.address]
        if worker.watch:
            worker.watch.cancel()
        self.on_lost(worker)

    def _declare(self, info: WorkerInfo) -> None:
        """Keys are known from a PD worker on; namespaces of a key come from its encoders."""
        model = self._models.get(info.model_key)
        if model is None:
            if info.pool != "pd":
                return
            model = self._models[info.model_key] = _Model(info.model, kind_of(info))
        model.namespaces += [name for name in info.namespaces if name not in model.namespaces]

    async def _watch(self, worker: Worker) -> None:
        stub = health_pb2_grpc.HealthStub(worker.channel)
        while True:
            incarnation = worker.info.incarnation
            alive, serving = await self._check(stub)
            if alive and worker.session is not None and not await worker.session.prove():
                alive = serving = False
            if worker.info.incarnation != incarnation:
                continue  # it was another process that was asked
            if (alive, serving) != (worker.alive, worker.serving):
                lost = worker.alive and not alive
                worker.alive, worker.serving = alive, serving
                if lost:
                    log.warning("%s worker %s does not answer", worker.info.pool, worker.info.address)
                    self.on_lost(worker)
                self.on_change()
            await asyncio.sleep(HEALTH_INTERVAL)

    async def _check(self, stub: health_pb2_grpc.HealthStub) -> tuple[bool, bool]:
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._health_timeout)
        except aio.AioRpcError as error:
            unknown = error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
            return (unknown, unknown)
        return (True, reply.status == _SERVING)
