"""The scaled pools of a proxy: what each has to do, its workers by kind, and its rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from triptych.base.config.proxy import ScalingConfig
from triptych.base.scaling import PoolDemand, ScaledTarget, WorkerGroup
from triptych.base.types import WorkerInfo
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.encoders.arrivals import FAST_SECONDS, SLOW_SECONDS, Arrivals, Items, Outstanding
from triptych.proxy.encoders.work_model import MIN_WORK, WorkModel
from triptych.proxy.pd.choice import DEFAULT_SEQS
from triptych.proxy.pd.work import PDWork, PromptWork
from triptych.proxy.workers import KnownWorkers


def item_demand(
    outstanding: Outstanding,
    arrived: Arrivals,
    model: WorkModel,
    *,
    now: float,
    kind: str,
    served: str = "",
    jobs: int = 0,
    unbound: int = 0,
) -> PoolDemand:
    """Demand for encoders by items, or for PD workers by prompts, in seconds of a worker of this kind.

    `served` is the model whose arrivals count; empty: of all.
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
    fast, slow = arrived.rates(now, served)
    return PoolDemand(max(backlog, MIN_WORK * jobs), waiting, largest, seconds(fast), seconds(slow))


class PDDemand:
    """Demand for PD workers by what they hold, in workers whose `max_num_seqs` slots or KV cache are full.

    Requests come and go by themselves, so that what they fill is averaged, and not their arrivals.
    """

    def __init__(self) -> None:
        self._fast = self._slow = 0.0
        self._at: float | None = None

    def poll(self, work: PDWork, max_num_seqs: int, now: float) -> PoolDemand:
        level = max(work.in_flight / max(max_num_seqs, 1), work.kv_usage, work.token_usage)
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
    served: str = "",
) -> PoolDemand:
    """Demand for PD workers of this kind, by what they hold or by prompts, whichever asks for more of them.

    While no worker has told what prompts take, what they hold alone counts.
    """
    arrived, model = learnt.arrived, learnt.model
    work = (
        item_demand(prompts, arrived, model, now=now, kind=kind, served=served)
        if model.kinds
        else PoolDemand()
    )
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


#: The cheapest order changes only where an item costs less than this share of what it costs before.
CHEAPER = 0.8


def cheapest_first(order: Sequence[str], costs: Mapping[str, float]) -> list[str]:
    """Targets by what an item costs there. Those that are nearly equal keep their order: it would flap."""
    found: list[str] = []
    for name in order:
        place = len(found)
        while place and costs[name] < CHEAPER * costs[found[place - 1]]:
            place -= 1
        found.insert(place, name)
    return found


class ScaledPool:
    """The workers of a scaled target as the autoscaler sees them.

    It grows by workers of `kind`, that of the target, else the one that it has most of. Workers of other
    kinds that do the same work count by their speed.
    """

    #: An item that takes longer than it may is that much dearer: slow kinds come last.
    LATE = 1000.0

    def __init__(self, scaled: ScaledTarget, workers: KnownWorkers, dispatcher: Dispatcher) -> None:
        self.target, self.rules, self.price = scaled.target, scaled.rules, scaled.price
        self.name = scaled.target.name
        self.kind = scaled.target.kind
        #: The model with which costs of that kind are learnt.
        self._of = scaled.target.model
        self._workers, self._dispatcher = workers, dispatcher

    def demand(self, now: float) -> PoolDemand:
        """What this proxy asks of the pool."""
        raise NotImplementedError

    def came(self) -> bool | None:
        """Whether work has come to this proxy since the last call; None: its demand says it."""
        return None

    def cost(self) -> float:
        """What an average item costs on a worker of its kind."""
        raise NotImplementedError

    def groups(self, desired: int, others: Mapping[str, int] | None = None) -> list[WorkerGroup]:
        """Its workers by kind, where `desired` ones of the kind that it grows by should be there.

        `others` are kinds that are scaled, too, with the workers that are to be counted of them.
        """
        ready_by_kind = self._ready()
        ready = ready_by_kind.pop(self.kind, 0)
        counted = {**ready_by_kind, **(others or {})}
        return [
            WorkerGroup(self.kind, ready, max(desired - ready, 0)),
            *(
                WorkerGroup(kind, count, 0, self._speed(kind), kind in (others or {}))
                for kind, count in sorted(counted.items())
            ),
        ]

    @property
    def known(self) -> dict[str, str]:
        """Its registered workers, their kinds by incarnation."""
        return {
            worker.info.incarnation: worker.info.kind
            for (pool, _), worker in self._workers.workers.items()
            if pool == self.target.pool
            and worker.alive
            and worker.registered
            and self.target.covers(worker.info.model, worker.role)
            and self.target.kind in ("", worker.info.kind)
        }

    def _speed(self, kind: str) -> float:
        raise NotImplementedError

    def _costs_of(self, kind: str) -> str:
        """The name that costs of a kind have for this pool's model."""
        return WorkerInfo("", "", "", "", self._of, kind=kind).cost_kind

    def _serving(self) -> list[WorkerInfo]:
        return [
            worker.info
            for worker in self._workers.serving(self.target.pool)
            if self.target.covers(worker.info.model, worker.role)
        ]

    def _ready(self) -> Counter[str]:
        """Serving workers by kind. The pool grows by the kind with most, the first by name among equals."""
        infos = self._serving()
        ready_by_kind = Counter(info.kind for info in infos)
        if ready_by_kind and not self.target.kind:
            self.kind = min(ready_by_kind, key=lambda kind: (-ready_by_kind[kind], kind))
        if infos and not self.target.model:
            self._of = next((info.model for info in infos if info.kind == self.kind), infos[0].model)
        return ready_by_kind


class EncoderPool(ScaledPool):
    """An encoder pool, by the work of this proxy's encoder jobs."""

    _arrived = 0

    def came(self) -> bool:
        before, self._arrived = self._arrived, self._dispatcher.jobs.arrived.total(self.target.model)
        return self._arrived > before

    def demand(self, now: float) -> PoolDemand:
        self._ready()
        jobs, model = self._dispatcher.jobs, self.target.model
        unbound = self._workers.unbound[model] if model else self._workers.unbound.total()
        return item_demand(
            jobs.table.outstanding(model),
            jobs.arrived,
            jobs.model,
            now=now,
            kind=self._costs_of(self.kind),
            served=model,
            jobs=len(jobs.table.jobs(model)),
            unbound=unbound,
        )

    def cost(self) -> float:
        seconds = self._dispatcher.jobs.model.work(None, self._costs_of(self.kind))
        return self.price * seconds * (self.LATE if seconds > self.rules.slo else 1.0)

    def _speed(self, kind: str) -> float:
        return self._dispatcher.jobs.model.speed(self._costs_of(kind), self._costs_of(self.kind))


class PDPool(ScaledPool):
    """A PD pool, by the requests of this proxy that are at its workers or wait for one."""

    def __init__(self, scaled: ScaledTarget, workers: KnownWorkers, dispatcher: Dispatcher) -> None:
        super().__init__(scaled, workers, dispatcher)
        self._held = PDDemand()

    def demand(self, now: float) -> PoolDemand:
        self._ready()
        work = self._dispatcher.pd_work(self.target, self.rules)
        held = self._held.poll(work, self._seqs(self.kind), now)
        if self.target.role == "decode":
            return held
        prompts, kind = self._dispatcher.prompts, self._costs_of(self.kind)
        if self.target.role == "prefill" and prompts.model.kinds:
            # A prompt leaves with its KV cache: what it holds is no measure.
            held = PoolDemand(0.0, held.waiting)
        return pd_demand(
            held, work.prompts, prompts, now=now, kind=kind, slo=self.rules.slo, served=self.target.model
        )

    def cost(self) -> float:
        return self.price / self._seqs(self.kind)

    def _speed(self, kind: str) -> float:
        return self._seqs(kind) / self._seqs(self.kind)

    def _seqs(self, kind: str) -> int:
        """Sequences that a worker of the kind takes at once."""
        reported = (
            info.capacity.get("max_num_seqs", DEFAULT_SEQS) for info in self._serving() if info.kind == kind
        )
        return max(max(reported, default=DEFAULT_SEQS), 1)


def make_pools(config: ScalingConfig, workers: KnownWorkers, dispatcher: Dispatcher) -> dict[str, ScaledPool]:
    """What the flags let scale, by name."""
    kinds: dict[str, type[ScaledPool]] = {"encoder": EncoderPool, "pd": PDPool}
    pools = (kinds[one.target.pool](one, workers, dispatcher) for one in config.targets())
    return {pool.name: pool for pool in pools}
