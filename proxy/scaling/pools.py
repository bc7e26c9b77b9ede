"""The scaled pools of a proxy: what each has to do, its workers by kind, and its rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from triptych.base.config.proxy import ScalingConfig
from triptych.base.scaling import PoolDemand, ScalingRules, WorkerGroup
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.encoders.arrivals import FAST_SECONDS, SLOW_SECONDS, ArrivedItems, Items, Outstanding
from triptych.proxy.encoders.work_model import MIN_WORK, WorkModel
from triptych.proxy.pd.choice import DEFAULT_SEQS
from triptych.proxy.pd.prompt_work import PDWork, PromptWork
from triptych.proxy.workers import KnownWorkers


def item_demand(
    outstanding: Outstanding,
    arrived: ArrivedItems,
    model: WorkModel,
    *,
    now: float,
    kind: str,
    jobs: int = 0,
    unbound: int = 0,
) -> PoolDemand:
    """Demand for encoders by items, or for PD workers by prompts, in seconds of a worker of this kind.

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
    """Demand for PD workers by what they hold, in workers whose `max_num_seqs` slots or KV cache are full.

    Requests come and go by themselves, so that what they fill is averaged, and not their arrivals.
    """

    def __init__(self) -> None:
        self._fast = self._slow = 0.0
        self._at: float | None = None

    def poll(self, work: PDWork, max_num_seqs: int, now: float) -> PoolDemand:
        level = max(work.in_flight / max(max_num_seqs, 1), work.kv_usage)
        step = 0.0 if self._at is None else max(now - self._at, 0.0)
        self._at = now
        self._fast = _towards(self._fast, level, step, FAST_SECONDS)
        self._slow = _towards(self._slow, level, step, SLOW_SECONDS)
        # While each is at a worker, those in flight are in good hands.
        backlog = level if work.unplaced else 0.0
        return PoolDemand(backlog, work.unplaced, 0.0, self._fast, self._slow)


def pd_demand(
    held: PoolDemand,
    prompts: Outstanding,
    learnt: PromptWork,
    *,
    now: float,
    kind: str,
    slo: float,
) -> PoolDemand:
    """Demand for PD workers of this kind, by what they hold or by prompts, whichever asks for more of them.

    While no worker has told what prompts take, what they hold alone counts.
    """
    arrived, model = learnt.arrived, learnt.model
    work = item_demand(prompts, arrived, model, now=now, kind=kind) if model.kinds else PoolDemand()
    # A full worker is as much as one can finish in time.
    full = max(slo - work.largest, work.largest)
    return PoolDemand(
        max(held.backlog * full, work.backlog),
        max(held.waiting, work.waiting),
        work.largest,
        max(held.fast, work.fast),
        max(held.slow, work.slow),
    )


def total_demand(demands: Iterable[PoolDemand]) -> PoolDemand:
    """The demand of several proxies together."""
    all_demands = list(demands)
    return PoolDemand(
        math.fsum(one.backlog for one in all_demands),
        sum(one.waiting for one in all_demands),
        max((one.largest for one in all_demands), default=0.0),
        math.fsum(one.fast for one in all_demands),
        math.fsum(one.slow for one in all_demands),
        max((one.kept for one in all_demands if one.kept is not None), default=None),
    )


def _towards(average: float, level: float, step: float, seconds: float) -> float:
    return level + (average - level) * math.exp(-step / seconds)


class ScaledPool:
    """A pool as the autoscaler sees it. It grows by workers of `kind`, the one that it has most of."""

    name: str

    def __init__(self, rules: ScalingRules, workers: KnownWorkers, dispatcher: Dispatcher) -> None:
        self.rules = rules
        self.kind = ""
        self._workers, self._dispatcher = workers, dispatcher

    def demand(self, now: float) -> PoolDemand:
        """What this proxy asks of the pool."""
        raise NotImplementedError

    def groups(self, desired: int) -> list[WorkerGroup]:
        """Its workers by kind, where `desired` ones of the kind that it grows by should be there."""
        ready_by_kind = self._ready()
        ready = ready_by_kind.pop(self.kind, 0)
        return [
            WorkerGroup(self.kind, ready, max(desired - ready, 0)),
            *(
                WorkerGroup(kind, count, 0, self._speed(kind))
                for kind, count in sorted(ready_by_kind.items())
            ),
        ]

    def _speed(self, kind: str) -> float:
        raise NotImplementedError

    def _ready(self) -> Counter[str]:
        """Serving workers by kind. The pool grows by the kind with most, the first by name among equals."""
        ready_by_kind = Counter(worker.info.kind for worker in self._workers.serving(self.name))
        if ready_by_kind:
            self.kind = min(ready_by_kind, key=lambda kind: (-ready_by_kind[kind], kind))
        return ready_by_kind


class EncoderPool(ScaledPool):
    """The encoder pool, by the work of this proxy's encoder jobs."""

    name = "encoder"

    def demand(self, now: float) -> PoolDemand:
        self._ready()
        jobs, unbound = self._dispatcher.jobs, self._workers.unbound
        items, count = jobs.table.outstanding, len(jobs.table)
        return item_demand(
            items, jobs.arrived, jobs.model, now=now, kind=self.kind, jobs=count, unbound=unbound
        )

    def _speed(self, kind: str) -> float:
        return self._dispatcher.jobs.model.speed(kind, self.kind)


class PDPool(ScaledPool):
    """The PD pool, by the requests of this proxy that are at its workers or wait for one."""

    name = "pd"

    def __init__(self, rules: ScalingRules, workers: KnownWorkers, dispatcher: Dispatcher) -> None:
        super().__init__(rules, workers, dispatcher)
        self._held = PDDemand()

    def demand(self, now: float) -> PoolDemand:
        self._ready()
        work = self._dispatcher.pd_work
        held = self._held.poll(work, self._seqs(self.kind), now)
        return pd_demand(
            held, work.prompts, self._dispatcher.prompts, now=now, kind=self.kind, slo=self.rules.slo
        )

    def _speed(self, kind: str) -> float:
        return self._seqs(kind) / self._seqs(self.kind)

    def _seqs(self, kind: str) -> int:
        """Sequences that a worker of the kind takes at once."""
        infos = [worker.info for worker in self._workers.serving(self.name)]
        reported = (info.capacity.get("max_num_seqs", DEFAULT_SEQS) for info in infos if info.kind == kind)
        return max(max(reported, default=DEFAULT_SEQS), 1)


#: Target seconds of a prompt at the PD workers, queueing included: as the default of --encoder-slo.
PROMPT_SLO = 2.0


def make_pools(config: ScalingConfig, workers: KnownWorkers, dispatcher: Dispatcher) -> dict[str, ScaledPool]:
    """The pools that the flags let scale, by name."""
    pools: dict[str, ScaledPool] = {}
    window = config.scale_window
    if config.max_encoders:
        rules = ScalingRules(config.min_encoders, config.max_encoders, config.encoder_slo, window=window)
        pools["encoder"] = EncoderPool(rules, workers, dispatcher)
    if config.max_pd_workers:
        rules = ScalingRules(config.min_pd_workers, config.max_pd_workers, PROMPT_SLO, window=window)
        pools["pd"] = PDPool(rules, workers, dispatcher)
    return pools
