"""View of the cluster from one proxy, polled every second, and the names of its workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from triptych import __version__
from triptych.base.machine.worker_load import WorkerLoad, resident_bytes
from triptych.base.metrics import ProxyMetrics
from triptych.base.scaling import ScalingDecision
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.live.calls import CallLog
from triptych.proxy.live.failures import FailureLog, Key, WorkerFailures, WorkerState, worker_state
from triptych.proxy.live.objects import (
    ClusterHistory,
    ClusterRates,
    ClusterSnapshot,
    EncoderState,
    PDWorkerState,
    PoolScaling,
    PoolsScaling,
    ProxyState,
    RequestRow,
    StoreState,
    short_address,
)
from triptych.proxy.live.statistics import (
    MAX_SECONDS,
    STEP_SECONDS,
    Counts,
    CountWindow,
    HistoryPoint,
    HistoryRing,
    mean,
    read_counts,
)
from triptych.proxy.pool import WorkerPool
from triptych.proxy.ports import PDLoadReport
from triptych.proxy.workers import Worker
from triptych.store.bulk import StoreMemory

#: Workers of one pool, and models, that a snapshot lists.
MAX_WORKERS = 256
MAX_MODELS = 64
#: Seconds that the snapshot's rates are of.
RATE_SECONDS = 10
_ID_CHARS = 12

#: Workers with their states and remedies; the load of each PD worker that reports one, by address.
States = Mapping[Key, tuple[Worker, WorkerState, str]]
Reports = Mapping[str, PDLoadReport]


@dataclass(frozen=True, slots=True)
class ClusterSources:
    """What a view is made from. `decision` of a pool is None where no autoscaler decides."""

    dispatcher: Dispatcher
    pool: WorkerPool
    metrics: ProxyMetrics
    calls: CallLog
    refusals: FailureLog
    names: WorkerNames
    proxy_id: str
    max_queue: int
    decision: Callable[[str], ScalingDecision | None] = lambda pool: None
    store_memory: Callable[[], StoreMemory | None] = lambda: None


class ClusterView:
    """The view: counts, states and history. `clock` is the dispatcher's, `wall` the time of day."""

    def __init__(
        self,
        sources: ClusterSources,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._wall = wall
        self._started = self._polled_at = clock()
        self._polls = 0
        self._tokens = 0.0
        self._window = CountWindow()
        self._history = HistoryRing()
        self._worker_failures = WorkerFailures(sources.pool, sources.calls.failures, wall, sources.names)

    def poll(self) -> None:
        """One poll, every second: its cost grows with the workers alone."""
        sources, now = self._sources, self._clock()
        sources.names.poll()
        states, reports = self._states(), self._reports(now)
        self._tokens += sum(r.tokens_per_second for r in reports.values()) * (now - self._polled_at)
        self._polled_at = now
        goodput = sources.calls.goodput
        sources.calls.transfers.poll(now)
        self._window.add(read_counts(sources.metrics, now, self._tokens, goodput.met, goodput.measured))
        self._worker_failures.poll(states, store_up=sources.pool.store_ok)
        sources.calls.tallies.keep([address for pool, address in states if pool == "encoder"])
        self._polls += 1
        if self._polls % STEP_SECONDS == 0:
            self._history.add(self._point(states, reports), self._wall())

    def history(self) -> ClusterHistory:
        return self._history.read()

    def snapshot(self) -> ClusterSnapshot:
        sources, now = self._sources, self._clock()
        states, reports = self._states(), self._reports(now)
        minute = self._window.last(MAX_SECONDS)
        return ClusterSnapshot(
            time=round(self._wall(), 3),
            version=__version__,
            uptime=round(now - self._started, 1),
            proxy=self._proxy(),
            proxies=sources.pool.proxies,
            store=self._store(),
            models=sources.pool.models()[:MAX_MODELS],
            encoders=self._encoders(states),
            pd_workers=self._pd_workers(states, reports),
            scaling=PoolsScaling(self._scaling("encoder", states), self._scaling("pd", states)),
            rates=self._rates(reports, minute),
            flows=sources.calls.transfers.flows(),
            goodput=sources.calls.goodput.read(now, minute.met_share),
            requests=sources.calls.rows(),
            failures=sorted(
                sources.calls.failures.read() + sources.refusals.read(), key=attrgetter("time"), reverse=True
            ),
        )

    def requests(self, tenant: str) -> list[RequestRow]:
        """The tenant's newest calls in flight."""
        return self._sources.calls.rows(tenant)

    def _states(self) -> dict[Key, tuple[Worker, WorkerState, str]]:
        links = self._sources.dispatcher.pd_links
        states = {}
        for key, worker in self._sources.pool.workers.items():
            link = links.get(key[1]) if key[0] == "pd" else None
            states[key] = (worker, *worker_state(worker, set_aside=link is not None and link.set_aside))
        return states

    def _reports(self, now: float) -> dict[str, PDLoadReport]:
        """The load of each PD worker that reports one, by address."""
        links = self._sources.dispatcher.pd_links
        loads = ((address, link.load(now)) for address, link in links.items())
        return {address: report for address, report in loads if report is not None}

    def _proxy(self) -> ProxyState:
        sources = self._sources
        dispatcher = sources.dispatcher
        return ProxyState(
            id=sources.proxy_id.removeprefix("proxy-")[:_ID_CHARS],
            draining=dispatcher.draining,
            in_flight=dispatcher.in_flight,
            queued=self._queued(),
            max_queue=sources.max_queue,
            memory_bytes=resident_bytes(),
        )

    def _queued(self) -> int:
        """Requests in flight that no PD worker has."""
        dispatcher = self._sources.dispatcher
        return max(dispatcher.in_flight - dispatcher.at_pd_workers, 0)

    def _store(self) -> StoreState:
        memory, up = self._sources.store_memory(), self._sources.pool.store_ok
        if memory is None:
            return StoreState(up)
        return StoreState(up, memory.used_bytes, memory.max_bytes, memory.evicted_keys)

    def _encoders(self, states: States) -> list[EncoderState]:
        jobs = self._sources.dispatcher.jobs
        rows: list[EncoderState] = []
        for (pool, address), (worker, state, reason) in states.items():
            if pool != "encoder" or len(rows) >= MAX_WORKERS:
                continue
            unknown, known, patches = jobs.table.owed(address)
            done, encode_ms = self._sources.calls.tallies.read(address)
            rows.append(
                EncoderState(
                    **self._worker_row(worker, state, reason),
                    jobs=unknown + known,
                    work_seconds=round(jobs.model.total(unknown, known, patches, worker.info.cost_kind), 4),
                    done=done,
                    encode_ms=encode_ms,
                )
            )
        return rows

    def _pd_workers(self, states: States, reports: Reports) -> list[PDWorkerState]:
        links = self._sources.dispatcher.pd_links
        rows: list[PDWorkerState] = []
        for (pool, address), (worker, state, reason) in states.items():
            if pool != "pd" or len(rows) >= MAX_WORKERS:
                continue
            link, load = links.get(address), reports.get(address)
            rows.append(
                PDWorkerState(
                    **self._worker_row(worker, state, reason),
                    requests=0 if link is None else link.in_flight,
                    running=None if load is None else load.running,
                    waiting=None if load is None else load.waiting,
                    kv_usage=None if load is None else round(load.kv_usage, 4),
                    cache_usage=None if load is None else round(load.cache_usage, 4),
                    tokens_per_second=0.0 if load is None else round(load.tokens_per_second, 1),
                    role=worker.role,
                )
            )
        return rows

    def _worker_row(self, worker: Worker, state: WorkerState, reason: str) -> dict[str, Any]:
        info, load = worker.info, _load(worker)
        return {
            "name": self._sources.names(info.address),
            "address": info.address,
            "model": info.model,
            "kind": info.kind,
            "state": state.value,
            "reason": reason,
            "busy": load.busy,
            "memory_bytes": load.memory_bytes or None,
            "gpu": load.gpu,
        }

    def _scaling(self, pool: str, states: States) -> PoolScaling:
        decision, live = self._sources.decision(pool), _serving(pool, states)
        return PoolScaling(live) if decision is None else PoolScaling(live, decision.workers, decision.reason)

    def _rates(self, reports: Reports, minute: Counts) -> ClusterRates:
        last, hit_rate = self._window.last(RATE_SECONDS), minute.hit_rate
        each = self._sources.calls.tallies.mean_seconds()
        return ClusterRates(
            requests=round(last.rate(last.requests), 2),
            tokens=round(sum(report.tokens_per_second for report in reports.values()), 1),
            items=round(last.rate(last.items), 2),
            errors=round(last.rate(last.errors), 2),
            refused=round(last.rate(last.refused), 2),
            hit_rate=None if hit_rate is None else round(hit_rate, 4),
            hits=int(minute.hits),
            saved_seconds=None if each is None else round(minute.hits * each, 3),
        )

    def _point(self, states: States, reports: Reports) -> HistoryPoint:
        last, decision = self._window.last(STEP_SECONDS), self._sources.decision("encoder")
        # Shares are of a minute: most steps have too few calls for one of their own.
        minute = self._window.last(MAX_SECONDS)
        return HistoryPoint(
            in_flight=self._sources.dispatcher.in_flight,
            queued=self._queued(),
            requests=last.rate(last.requests),
            tokens=last.rate(last.tokens),
            items=last.rate(last.items),
            errors=last.rate(last.errors),
            hit_rate=minute.hit_rate,
            met=minute.met_share,
            encoders=_serving("encoder", states),
            desired_encoders=None if decision is None else decision.workers,
            pd_workers=_serving("pd", states),
            kv_usage=mean(report.kv_usage for report in reports.values()),
            encoder_busy=_busy("encoder", states),
            pd_busy=_busy("pd", states),
        )


def _serving(pool: str, states: States) -> int:
    return sum(named == pool and state is WorkerState.SERVING for (named, _), (_, state, _) in states.items())


def _load(worker: Worker) -> WorkerLoad:
    """What a worker has reported; nothing of one that no longer answers, or of an earlier release."""
    return WorkerLoad() if worker.load is None or not worker.alive else worker.load


def _busy(pool: str, states: States) -> float | None:
    """The mean busy share of a pool's workers."""
    loads = (_load(worker).busy for (named, _), (worker, _, _) in states.items() if named == pool)
    return mean(busy for busy in loads if busy is not None)


#: Names that are kept of workers that have gone: records of requests name them too.
MAX_NAMES = 1024


class WorkerNames:
    """Names by address: the one that the worker reports, its short address until then.

    Two workers of one pool with one name, as on two machines, have their address behind it.
    """

    def __init__(self, workers: Mapping[tuple[str, str], Worker]) -> None:
        self._workers = workers
        self._names: dict[str, str] = {}

    def poll(self) -> None:
        """Reads the names that workers have reported."""
        loads = {key: worker.load for key, worker in self._workers.items()}
        named = {key: load.name for key, load in loads.items() if load is not None and load.name}
        counts = Counter((pool, name) for (pool, _), name in named.items())
        for (pool, address), name in named.items():
            self._names.pop(address, None)
            alone = counts[pool, name] == 1
            self._names[address] = name if alone else f"{name} ({short_address(address)})"
        while len(self._names) > max(MAX_NAMES, len(named)):
            del self._names[next(iter(self._names))]

    def __call__(self, address: str) -> str:
        return self._names.get(address) or short_address(address)
