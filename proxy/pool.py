"""Worker pool: follows the registry, and checks every worker by gRPC health.

A worker that the registry no longer names stays routable while it answers health checks: the store may
be down or flushed. It is forgotten when its registration is gone and its health fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.base.config import is_on_this_machine
from triptych.base.engine_beat import MOST_RESTARTS, OwnPauses
from triptych.base.errors import TriptychError
from triptych.base.log import log_fields
from triptych.base.machine.worker_load import LOAD_HEADER, WorkerLoad, decode_load
from triptych.base.rpc.channels import STORE_SERVICE
from triptych.base.rpc.internal_token import InternalToken
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.worker_connection import WorkerConnection
from triptych.base.status_server import ServiceStatus
from triptych.base.types import WorkerInfo
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.registry import RegistrySnapshot

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
HEALTH_INTERVAL = 1.0
HEALTH_TIMEOUT = 5.0
#: A worker whose answer takes longer is silent: what it has goes to others, where there are any.
SILENCE_SECONDS = 1.25
#: Health checks that a proxy makes of workers that are registered and well.
CHECKS_PER_SECOND = 16.0
PROXY_TERM = 5.0
#: How long one poll waits for the store's answer.
STORE_TIMEOUT = 2.0
#: Ignored registrations that are remembered, so that each is warned of once.
MAX_IGNORED = 256
#: Silence of the store after which a proxy leaves readiness: by then workers have said whether they reach it.
LEAVE_SECONDS = 4.0
_OTHER_PROCESS = (
    " as the process that is registered: it is another one, has another internal token, or is of a release "
    "that does not go with this proxy (docs/compatibility.md)"
)
_SERVING = health_pb2.HealthCheckResponse.SERVING


def leaves_readiness(silent: float, proxies: int, *, others_reach: bool) -> bool:
    """Whether a proxy sends its clients to others: the store has been `silent` to it for these seconds, and
    not to its workers. The only one of `proxies`, as the registry last said, never does."""
    return silent >= LEAVE_SECONDS and proxies > 1 and others_reach


_Answer = tuple[bool, bool, WorkerLoad | None, str]


class RegistryView(Protocol):
    """The registry's part that the pool reads."""

    async def poll(self, proxy_id: str, term: float, *, mark: str) -> RegistrySnapshot: ...


@dataclass(slots=True)
class _Watch:
    """Connection to a worker, and the task that checks it."""

    worker: Worker
    connection: WorkerConnection
    #: Another process than before has registered, and has not been checked yet.
    restarted: bool = False
    task: asyncio.Task[None] | None = None
    #: The registry names it no more, or names another process: it is checked at once.
    doubt: asyncio.Event = field(default_factory=asyncio.Event)
    #: Answers of a worker that a standing event loop has not read do not count as missing.
    late: OwnPauses = field(default_factory=lambda: OwnPauses(SILENCE_SECONDS))
    missing: OwnPauses = field(default_factory=lambda: OwnPauses(HEALTH_TIMEOUT))


def health_interval(workers: int) -> float:
    """Seconds between two health checks of a worker that is registered and has been well.

    They grow with the number of workers, so that a proxy never makes more than CHECKS_PER_SECOND of them.
    """
    return max(HEALTH_INTERVAL, workers / CHECKS_PER_SECOND)


def poll_interval(*, complete: bool) -> float:
    """Seconds between two polls of the registry. Where a pool is empty, requests may wait for a worker."""
    return POLL_SECONDS if complete else POLL_SECONDS / 5


class WorkerPool(KnownWorkers):
    """Polls the registry, watches every worker, and reports what has changed."""

    def __init__(
        self,
        registry: RegistryView,
        proxy_id: str,
        token: str = "",
        *,
        certificates: Certificates | None = None,
        insecure: bool = False,
        health_timeout: float = HEALTH_TIMEOUT,
    ) -> None:
        super().__init__()
        self._registry = registry
        #: What the last poll of the registry has shown.
        self._mark = ""
        self._proxy_id = proxy_id
        self._token = token
        self._signatures = InternalToken(token) if token else None
        self._certificates = certificates
        #: Whether calls may go to other machines in clear text.
        self._clear_text = insecure
        #: Registrations that are not followed, each warned of once.
        self._ignored: set[tuple[str, str, str]] = set()
        self._health_timeout = health_timeout
        self._task: asyncio.Task[None] | None = None
        self._watches: dict[tuple[str, str], _Watch] = {}
        #: Those that the registry does not name.
        self._unregistered: dict[tuple[str, str], Worker] = {}
        self.store_ok = False
        self._answered_at = time.monotonic()
        self._store_pauses = OwnPauses(STORE_TIMEOUT)

    async def start(self) -> None:
        await self.poll()
        self._task = asyncio.create_task(self._poll_forever(), name="pool")

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *(w.task for w in self._watches.values())) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(watch.connection.close() for watch in self._watches.values()))
        self._watches.clear()
        self.workers.clear()

    def channel(self, pool: str, address: str) -> aio.Channel:
        """The channel to a known worker, for new calls."""
        return self._watches[pool, address].connection.channel

    def connection(self, pool: str, address: str) -> WorkerConnection:
        """The connection to a known worker, whose channel is another one after certificates have changed."""
        return self._watches[pool, address].connection

    @property
    def cut_off(self) -> bool:
        """Whether this proxy alone does not reach the store, and another one is there. Any thread may ask."""
        if self.store_ok:
            return False
        reach = any(w.alive and w.reaches_store for w in list(self.workers.values()))
        return leaves_readiness(time.monotonic() - self._answered_at, self.proxies, others_reach=reach)

    async def _poll_forever(self) -> None:
        while True:
            complete = bool(self.serving("encoder") and self.serving("pd"))
            await asyncio.sleep(poll_interval(complete=complete))
            try:
                await self.poll()
            except Exception:
                logger.exception("the registry could not be read; the next poll follows")

    async def poll(self) -> None:
        """One poll of the registry. Never raises: a store that is down leaves the workers as they are."""
        try:
            snapshot = await self._ask_registry()
        except (TriptychError, TimeoutError) as error:
            if self.store_ok:
                logger.warning("the store does not answer: %s", str(error) or "no reply in time")
                for watch in self._watches.values():
                    watch.doubt.set()
            self.store_ok = False
            return
        if not self.store_ok:
            logger.info("the store answers")
        self.store_ok, self._answered_at = True, time.monotonic()
        self.epoch = snapshot.epoch
        changed = self.proxies != (proxies := max(snapshot.proxies, 1))
        self.proxies = proxies
        if snapshot.workers is not None:
            changed |= self._update(snapshot.workers)
        self._mark = snapshot.mark
        gone = [worker for worker in self._unregistered.values() if not worker.alive]
        for worker in gone:
            self._remove(worker)
        if gone:
            self.match_encoders()
            changed = True
        if changed:
            self.report_change()

    async def _ask_registry(self) -> RegistrySnapshot:
        """TimeoutError where the store has not answered in STORE_TIMEOUT seconds of a loop that turns."""
        asked = asyncio.ensure_future(self._registry.poll(self._proxy_id, PROXY_TERM, mark=self._mark))
        try:
            if not await self._store_pauses.answers((asked,), STORE_TIMEOUT):
                raise TimeoutError(f"no answer in {STORE_TIMEOUT:g} s")
            return asked.result()
        finally:
            await _end((asked,))

    def _update(self, infos: Sequence[WorkerInfo]) -> bool:
        """Follows the registry; whether its workers, or what it says of them, have changed."""
        infos = [info for info in infos if self._is_ours(info)]
        named = {(info.pool, info.address): info for info in infos}
        changed = False
        for key, info in named.items():
            worker = self.workers.get(key)
            if worker is None:
                self._add(info)
                changed = True
            elif worker.info != info:
                changed |= self._renew(self._watches[key], info)
        for info in infos:
            if info.pool == "pd":
                self.declare(info)
        changed |= self.match_encoders()
        for info in infos:
            if info.pool == "encoder" and self.workers[info.pool, info.address].matched:
                self.declare(info)
        for key, worker in self.workers.items():
            if key in named:
                worker.registered = True
                self._unregistered.pop(key, None)
            elif worker.registered:
                worker.registered = False
                self._unregistered[key] = worker
                self._watches[key].doubt.set()
        return changed

    def _is_ours(self, info: WorkerInfo) -> bool:
        """Whether the worker may be called; else the registration is ignored, with one warning."""
        known = self.workers.get((info.pool, info.address))
        if known is not None and known.info == info:
            return True
        if self._signatures is not None and not self._signatures.has_signed(info):
            return self._ignore(info, "it is not signed with our --internal-token")
        if self._certificates is None and not self._clear_text and not is_on_this_machine(info.address):
            return self._ignore(
                info,
                "the token and prompts would go to another machine in clear text: give --tls-cert-file, "
                "--tls-key-file and --tls-ca-file, or say --insecure where the network itself encrypts",
            )
        return True

    def _ignore(self, info: WorkerInfo, why: str) -> bool:
        ignored = (info.pool[:64], info.address[:64], info.incarnation[:64])
        if ignored not in self._ignored:
            if len(self._ignored) >= MAX_IGNORED:
                self._ignored.clear()
            self._ignored.add(ignored)
            logger.warning(
                "a registration of %.32r worker %.64r is ignored: %s", info.pool, info.address, why
            )
        return False

    def _add(self, info: WorkerInfo) -> None:
        _log(info, "(%s) is here", info.model)
        watch = _Watch(Worker(info), WorkerConnection(info, self._token, self._certificates))
        self.workers[info.pool, info.address] = watch.worker
        self._watches[info.pool, info.address] = watch
        watch.task = asyncio.create_task(self._run(watch), name=f"watch {info.address}")

    def _renew(self, watch: _Watch, info: WorkerInfo) -> bool:
        worker = watch.worker
        if worker.info.incarnation != info.incarnation:
            _log(info, "was started again")
            worker.alive = worker.serving = watch.restarted = True
            watch.doubt.set()
        worker.info = info
        return True

    def _remove(self, worker: Worker) -> None:
        _log(worker.info, "is gone")
        key = (worker.info.pool, worker.info.address)
        del self.workers[key]
        self._unregistered.pop(key, None)
        watch = self._watches.pop(key)
        if watch.task:
            watch.task.cancel()
        self.report_loss(worker)

    async def _run(self, watch: _Watch) -> None:
        while True:
            try:
                await watch.connection.follow_certificates()
                await self._check(watch)
            except Exception:
                info = watch.worker.info
                _log(info, "could not be checked", level=logging.ERROR, exc_info=True)
            await self._pause(watch)

    async def _check(self, watch: _Watch) -> None:
        """One health check of the registered process; a change is reported."""
        worker = watch.worker
        incarnation = worker.info.incarnation
        watch.doubt.clear()
        # The channel to the process before may still be pausing between two tries to connect.
        restarted, watch.restarted = watch.restarted, False
        (alive, serving, load, why), (reported, reaches, *_) = await self._answers(watch, restarted=restarted)
        if worker.info.incarnation != incarnation:
            return  # another process has answered; `doubt` is set for the one that is registered now
        worker.load = load
        reaches = reaches if reported else worker.reaches_store
        was = (worker.alive, worker.serving, worker.reaches_store, worker.silent)
        if (alive, serving, reaches, False) != was:
            lost, worker.silent = worker.alive and not alive, False
            worker.alive, worker.serving, worker.reaches_store = alive, serving, reaches
            if lost:
                _log(worker.info, "does not answer%s", why, level=logging.WARNING)
                self.report_loss(worker)
            self.report_change()

    async def _answers(self, watch: _Watch, *, restarted: bool) -> tuple[_Answer, _Answer]:
        """What it says of itself, and of the store. Meanwhile it may become silent."""
        channel = watch.connection.channel
        process = self._ask(channel, watch.worker.info.incarnation, wait_for_ready=restarted)
        asked = [asyncio.ensure_future(one) for one in (process, self._ask(channel, STORE_SERVICE))]
        try:
            if not await watch.late.answers(asked, min(SILENCE_SECONDS, self._health_timeout)):
                longer = self._health_timeout - SILENCE_SECONDS
                if longer > 0 and not restarted and not watch.worker.silent:
                    watch.worker.silent = True
                    self.report_change()
                await watch.missing.answers(asked, max(longer, 0.0))
            missing: _Answer = (False, False, None, "")
            answers = [one.result() if one.done() else missing for one in asked]
            return answers[0], answers[1]
        finally:
            await _end(asked)

    async def _pause(self, watch: _Watch) -> None:
        """Waits until the worker's next check: not for long where the registry does not name it."""
        worker = watch.worker
        well = self.store_ok and worker.registered and worker.alive and worker.serving
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(health_interval(len(self.workers)) if well else HEALTH_INTERVAL):
                await watch.doubt.wait()

    async def _ask(self, channel: aio.Channel, service: str, *, wait_for_ready: bool = False) -> _Answer:
        """Whether the worker answers, whether the service does, its load then, and otherwise why not.

        One that does not know the registered incarnation is another process; it need not know of a store.
        """
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            # Longer than any wait for it, which a standing event loop begins anew.
            timeout = (1 + 2 * MOST_RESTARTS) * self._health_timeout
            call = stub.Check(request, timeout=timeout, wait_for_ready=wait_for_ready)
            reply, trailing = await call, await call.trailing_metadata()
        except aio.AioRpcError as error:
            unknown = error.code() is grpc.StatusCode.NOT_FOUND and service == STORE_SERVICE
            answers = unknown or error.code() is grpc.StatusCode.UNIMPLEMENTED
            other = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED)
            return (answers, answers, None, _OTHER_PROCESS if other else "")
        load = (trailing or {}).get(LOAD_HEADER)
        return (True, reply.status == _SERVING, decode_load(load) if isinstance(load, bytes) else None, "")


async def _end(asked: Sequence[asyncio.Future[Any]]) -> None:
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


def _log(
    info: WorkerInfo, text: str, *details: object, level: int = logging.INFO, exc_info: bool = False
) -> None:
    named, fields = (info.pool, info.address), log_fields(worker=info.address)
    logger.log(level, f"%s worker %s {text}", *named, *details, exc_info=exc_info, extra=fields)


class PDReadiness:
    """A listener that makes the proxy ready with the first live PD worker; it stays ready after the last one.

    Requests wait for a PD worker that comes back. A Service without any endpoint would refuse them.
    """

    def __init__(self, pool: WorkerPool, status: ServiceStatus) -> None:
        self._pool = pool
        self._status = status
        self._any_live = False

    def degraded(self) -> tuple[str, ...]:
        """What the proxy lacks. Any thread may ask."""
        missing = (("store", self._pool.store_ok), ("PD workers", self._any_live))
        return tuple(name for name, there in missing if not there)

    def workers_changed(self) -> None:
        self._any_live = bool(self._pool.serving("pd"))
        if self._any_live:
            self._status.ready()

    def worker_lost(self, worker: Worker) -> None:
        self.workers_changed()
