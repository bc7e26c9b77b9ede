"""The workers that this proxy knows: the registry's word, checked by gRPC health.

A worker that the registry no longer names stays routable while it answers health checks: the store may
be down or flushed. It is forgotten when its registration is gone and its health fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.ec_connector.registry.registry import RegistryLook
from triptych.errors import InvalidRequest, NotFound, TriptychError, Unavailable
from triptych.proxy.call.model_kind import ModelKind
from triptych.proxy.requests.lifecycle import RETRY_AFTER
from triptych.rpc.channels import make_channel
from triptych.rpc.client_auth import WorkerSession
from triptych.rpc.proofs import InternalKey
from triptych.types import WorkerInfo

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
HEALTH_INTERVAL = 1.0
HEALTH_TIMEOUT = 5.0
#: Health checks that a proxy makes of workers that nobody doubts.
CHECKS_PER_SECOND = 16.0
PROXY_TERM = 5.0
#: How long a caller waits for the store's answer in one poll.
STORE_TIMEOUT = 2.0
#: Forged registrations that are remembered, so that each is warned of once.
MAX_FORGED = 256
_SERVING = health_pb2.HealthCheckResponse.SERVING


class RegistryView(Protocol):
    """What the pool asks of the connector's registry."""

    async def look(self, proxy_id: str, term: float, *, mark: str) -> RegistryLook: ...


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
    #: Another process than before has registered, and has not been checked yet.
    restarted: bool = False
    watch: asyncio.Task[None] | None = None
    #: The registry vouches for it no more, or names another process: it is checked at once.
    doubt: asyncio.Event = field(default_factory=asyncio.Event)


def health_interval(workers: int) -> float:
    """Seconds between two health checks of a worker that is registered and has been well.

    They grow with the number of workers, so that a proxy never makes more than CHECKS_PER_SECOND of them.
    """
    return max(HEALTH_INTERVAL, workers / CHECKS_PER_SECOND)


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
        proxy_id: str,
        token: str = "",
        *,
        health_timeout: float = HEALTH_TIMEOUT,
    ) -> None:
        self._registry = registry
        #: What the last look at the registry has shown.
        self._mark = ""
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
        #: Those that the registry does not name.
        self._unregistered: dict[tuple[str, str], Worker] = {}
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

    def serving(self, pool: str) -> list[Worker]:
        """Workers of "encoder" or "pd" that may get new work."""
        return [w for w in self.workers.values() if w.info.pool == pool and w.alive and w.serving]

    def namespaces_served(self) -> frozenset[str]:
        """Namespaces with an encoder that may get new work."""
        return frozenset(name for worker in self.serving("encoder") for name in worker.info.namespaces)

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
        live = self.namespaces_served()
        return next((name for name in reversed(names) if name in live), names[-1] if names else None)

    def max_model_lens(self, model_key: str) -> list[int]:
        """The limits of all known PD workers of the key, live or not; 0 where one names none."""
        infos = [worker.info for worker in self.workers.values() if worker.info.pool == "pd"]
        return [info.capacity.get("max_model_len", 0) for info in infos if info.model_key == model_key]

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.poll()
            except Exception:
                logger.exception("a look at the registry failed; the next one follows")

    async def poll(self) -> None:
        """One look at the registry. Never raises: a store that is down leaves the workers as they are."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT):
                look = await self._registry.look(self._proxy_id, PROXY_TERM, mark=self._mark)
        except (TriptychError, TimeoutError) as error:
            if self.store_ok:
                logger.warning("the store does not answer: %s", error)
                for worker in self.workers.values():
                    worker.doubt.set()
            self.store_ok = False
            return
        if not self.store_ok:
            logger.info("the store answers")
        self.store_ok = True
        self.epoch = look.epoch
        changed = self.proxies != (proxies := max(look.proxies, 1))
        self.proxies = proxies
        if look.workers is not None:
            changed |= self._take_in(look.workers)
        self._mark = look.mark
        for worker in [worker for worker in self._unregistered.values() if not worker.alive]:
            self._remove(worker)
            changed = True
        if changed:
            self.on_change()

    def _take_in(self, infos: Sequence[WorkerInfo]) -> bool:
        """Whether the registry names others, or says other things of them, than before."""
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
        for key, worker in self.workers.items():
            if key in named:
                worker.registered = True
                self._unregistered.pop(key, None)
            elif worker.registered:
                worker.registered = False
                self._unregistered[key] = worker
                worker.doubt.set()
        return changed

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
            logger.warning(
                "a registration of %.32r worker %.64r is ignored: its proof is not made with our "
                "--internal-token",
                info.pool,
                info.address,
            )
        return False

    def _add(self, info: WorkerInfo) -> None:
        logger.info("%s worker %s (%s) is here", info.pool, info.address, info.model)
        session = WorkerSession(self._token, info) if self._token else None
        worker = Worker(info, make_channel(info.address, session), session)
        self.workers[info.pool, info.address] = worker
        worker.watch = asyncio.create_task(self._watch(worker), name=f"watch {info.address}")

    def _renew(self, worker: Worker, info: WorkerInfo) -> bool:
        if worker.info.incarnation != info.incarnation:
            logger.info("%s worker %s was started again", info.pool, info.address)
            worker.alive = worker.serving = worker.restarted = True
            worker.doubt.set()
            if worker.session is not None:
                worker.session.expect(info)
        worker.info = info
        return True

    def _remove(self, worker: Worker) -> None:
        logger.info("%s worker %s is gone", worker.info.pool, worker.info.address)
        key = (worker.info.pool, worker.info.address)
        del self.workers[key]
        self._unregistered.pop(key, None)
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
            try:
                await self._look_at(worker, stub)
            except Exception:
                logger.exception("%s worker %s could not be checked", worker.info.pool, worker.info.address)
            await self._pause(worker)

    async def _look_at(self, worker: Worker, stub: health_pb2_grpc.HealthStub) -> None:
        """One health check, with a proof of the internal token; a change is passed on."""
        incarnation = worker.info.incarnation
        worker.doubt.clear()
        # The channel to the process before may still be pausing between two tries to connect.
        restarted, worker.restarted = worker.restarted, False
        alive, serving = await self._check(stub, wait_for_ready=restarted)
        if alive and worker.session is not None and not await worker.session.prove():
            alive = serving = False
        if worker.info.incarnation != incarnation:
            return  # it was another process that was asked; `doubt` is set for the one that is here now
        if (alive, serving) != (worker.alive, worker.serving):
            lost = worker.alive and not alive
            worker.alive, worker.serving = alive, serving
            if lost:
                logger.warning("%s worker %s does not answer", worker.info.pool, worker.info.address)
                self.on_lost(worker)
            self.on_change()

    async def _pause(self, worker: Worker) -> None:
        """Until the worker's next check: soon where the registry does not vouch for it."""
        well = self.store_ok and worker.registered and worker.alive and worker.serving
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(health_interval(len(self.workers)) if well else HEALTH_INTERVAL):
                await worker.doubt.wait()

    async def _check(
        self, stub: health_pb2_grpc.HealthStub, *, wait_for_ready: bool = False
    ) -> tuple[bool, bool]:
        request = health_pb2.HealthCheckRequest()
        try:
            reply = await stub.Check(request, timeout=self._health_timeout, wait_for_ready=wait_for_ready)
        except aio.AioRpcError as error:
            unknown = error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
            return (unknown, unknown)
        return (True, reply.status == _SERVING)
