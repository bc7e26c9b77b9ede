"""The scaled pools of a proxy: what each has to do, its workers by kind, and its rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from triptych.base.config.proxy import ScalingConfig
from triptych.base.scaling import PoolDemand, ScalingRules, WorkerGroup
from triptych.proxy.encoders.job_runner import JobRunner
from triptych.proxy.encoders.loads import (
    FAST_SECONDS,
    MIN_WORK,
    SLOW_SECONDS,
    ArrivedItems,
    Items,
    OutstandingItems,
    WorkModel,
)
from triptych.proxy.workers import KnownWorkers, Worker


def encoder_demand(
    outstanding: OutstandingItems,
    arrived: ArrivedItems,
    model: WorkModel,
    *,
    now: float,
    kind: str,
    jobs: int,
    unbound: int = 0,
) -> PoolDemand:
    """Demand for encoders, in seconds of a worker of this kind.

    `jobs` are all jobs, those too that wait for memory of a PD worker and that no further encoder would help.
    `unbound` are requests whose items have no job yet, since no encoder has ever been there. While no cost is
    known items count, but no seconds: the first worker finds out.
    """
    waiting = outstanding.waiting + unbound
    if not model.kinds:
        return PoolDemand(backlog=MIN_WORK * jobs, waiting=waiting)

    def seconds(items: Items) -> float:
        return max(model.total(items.unknown, items.known, items.patches, kind), 0.0)

    size, items = outstanding.largest, outstanding.items
    largest = model.work(size, kind) if size is not None else 0.0
    if items.unknown or unbound:
        largest = max(largest, model.work(None, kind))
    backlog = seconds(items) + unbound * model.work(None, kind)
    fast, slow = arrived.rates(now)
    return PoolDemand(max(backlog, MIN_WORK * jobs), waiting, largest, seconds(fast), seconds(slow))


class PDDemand:
    """Demand for PD workers, in workers filled with requests, of which one takes `max_num_seqs` at once.

    Requests come and go by themselves, so that their number is averaged, and not their arrivals.
    """

    def __init__(self) -> None:
        self._fast = self._slow = 0.0
        self._at: float | None = None

    def poll(self, in_flight: float, waiting: int, max_num_seqs: int, now: float) -> PoolDemand:
        """`waiting` of the requests `in_flight` are at no PD worker yet."""
        level = in_flight / max(max_num_seqs, 1)
        step = 0.0 if self._at is None else max(now - self._at, 0.0)
        self._at = now
        self._fast = _towards(self._fast, level, step, FAST_SECONDS)
        self._slow = _towards(self._slow, level, step, SLOW_SECONDS)
        # While none waits, those in flight are in good hands.
        backlog = level if waiting else 0.0
        return PoolDemand(backlog, waiting, 0.0, self._fast, self._slow)


def total_demand(demands: Iterable[PoolDemand]) -> PoolDemand:
    """The demand of several proxies together."""
    found = list(demands)
    return PoolDemand(
        math.fsum(one.backlog for one in found),
        sum(one.waiting for one in found),
        max((one.largest for one in found), default=0.0),
        math.fsum(one.fast for one in found),
        math.fsum(one.slow for one in found),
        max((one.kept for one in found if one.kept is not None), default=None),
    )


def _towards(average: float, level: float, step: float, seconds: float) -> float:
    return level + (average - level) * math.exp(-step / seconds)


#: Sequences of a PD worker that does not say how many it takes, as in `proxy.pd.router`.
_DEFAULT_SEQS = 64


class ScaledPool(Protocol):
    """A pool as the autoscaler sees it. It grows by workers of `kind`, the one that it has most of."""

    name: str
    rules: ScalingRules

    @property
    def kind(self) -> str: ...

    def demand(self, now: float) -> PoolDemand:
        """What this proxy asks of the pool."""

    def groups(self, desired: int) -> list[WorkerGroup]:
        """Its workers by kind, where `desired` ones of the kind that it grows by should be there."""


class _Workers:
    """The workers of a pool by kind."""

    def __init__(self, name: str, workers: KnownWorkers) -> None:
        self.name = name
        self._workers = workers
        self.kind = ""

    def ready(self) -> Counter[str]:
        """Serving workers by kind. The pool grows by the kind with most, the first by name among equals."""
        serving = self._workers.serving(self.name)
        found = Counter(worker.info.kind for worker in serving)
        if found:
            self.kind = min(found, key=lambda kind: (-found[kind], kind))
        return found

    def groups(self, desired: int, speed: Callable[[str], float]) -> list[WorkerGroup]:
        found = self.ready()
        ready = found.pop(self.kind, 0)
        return [
            WorkerGroup(self.kind, ready, max(desired - ready, 0)),
            *(WorkerGroup(kind, count, 0, speed(kind)) for kind, count in sorted(found.items())),
        ]


class EncoderPool:
    """The encoder pool, by the work of this proxy's encoder jobs."""

    name = "encoder"

    def __init__(self, rules: ScalingRules, workers: KnownWorkers, jobs: JobRunner) -> None:
        self.rules = rules
        self._known = workers
        self._workers = _Workers(self.name, workers)
        self._jobs = jobs

    @property
    def kind(self) -> str:
        return self._workers.kind

    def demand(self, now: float) -> PoolDemand:
        self._workers.ready()
        jobs = self._jobs
        return encoder_demand(
            jobs.table.outstanding,
            jobs.arrived,
            jobs.model,
            now=now,
            kind=self.kind,
            jobs=len(jobs.table),
            unbound=self._known.unbound,
        )

    def groups(self, desired: int) -> list[WorkerGroup]:
        return self._workers.groups(desired, lambda kind: self._jobs.model.speed(kind, self.kind))


class PDPool:
    """The PD pool, by the requests of this proxy that are at its workers or wait for one.

    `requests` counts both, and those that wait.
    """

    name = "pd"

    def __init__(
        self, rules: ScalingRules, workers: KnownWorkers, requests: Callable[[], tuple[int, int]]
    ) -> None:
        self.rules = rules
        self._known = workers
        self._workers = _Workers(self.name, workers)
        self._requests = requests
        self._demand = PDDemand()

    @property
    def kind(self) -> str:
        return self._workers.kind

    def demand(self, now: float) -> PoolDemand:
        self._workers.ready()
        in_flight, waiting = self._requests()
        return self._demand.poll(in_flight, waiting, self._seqs(self.kind), now)

    def groups(self, desired: int) -> list[WorkerGroup]:
        return self._workers.groups(desired, lambda kind: self._seqs(kind) / self._seqs(self.kind))

    def _seqs(self, kind: str) -> int:
        """Sequences that a worker of the kind takes at once."""
        seqs = [_seqs(worker) for worker in self._known.serving(self.name) if worker.info.kind == kind]
        return max(seqs, default=_DEFAULT_SEQS)


def make_pools(
    config: ScalingConfig,
    workers: KnownWorkers,
    jobs: JobRunner,
    requests: Callable[[], tuple[int, int]],
) -> Mapping[str, ScaledPool]:
    """The pools that the flags let scale, by name."""
    pools: dict[str, ScaledPool] = {}
    if config.max_encoders:
        rules = ScalingRules(
            config.min_encoders, config.max_encoders, config.encoder_slo, window=config.scale_window
        )
        pools["encoder"] = EncoderPool(rules, workers, jobs)
    if config.max_pd_workers:
        # A PD worker's work is counted in workers, not in seconds: one filled with requests is done in 1.
        rules = ScalingRules(config.min_pd_workers, config.max_pd_workers, 1.0, window=config.scale_window)
        pools["pd"] = PDPool(rules, workers, requests)
    return pools


def _seqs(worker: Worker) -> int:
    return max(worker.info.capacity.get("max_num_seqs", _DEFAULT_SEQS), 1)
