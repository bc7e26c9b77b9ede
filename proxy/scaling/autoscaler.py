"""Autoscaler: each second it publishes this proxy's demand, reads that of all, decides, and announces.

All proxies do so and agree: they see one sum, share the rules, and each begins with the decision in force. A
proxy that is new knows nothing of the time before, and keeps what there is for a whole window. None decides
on fewer than another one keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych.base.config.proxy import ScalingConfig
from triptych.base.errors import TriptychError
from triptych.base.metrics import ProxyMetrics
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingTarget, combined
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.scaling.cold_starts import ColdStarts
from triptych.proxy.scaling.keda import ScalerServer
from triptych.proxy.scaling.policy import Observation, ScalingState, decide, start_failed
from triptych.proxy.scaling.pools import ScaledPool, cheapest_first, make_pools, total_demand
from triptych.proxy.scaling.rules_agreement import RulesAgreement, RulesBoard
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.scaling import ScalingBoard
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
#: How long demand and decisions hold unless they are renewed.
TERM = 10.0
#: Seconds in which all workers register again with a store that has lost everything: until then a proxy that
#: finds no decision makes none.
LEARN_SECONDS = 5.0
#: How long one poll waits for the store's answers.
STORE_SECONDS = 2.0
#: Times that one poll decides again because another proxy has decided meanwhile.
_TRIES = 3


class Board(RulesBoard, Protocol):
    """The scaling board's part that the autoscaler uses."""

    async def publish(
        self, proxy_id: str, pool: str, demand: PoolDemand, term: float
    ) -> list[PoolDemand]: ...

    async def withdraw(self, proxy_id: str, pool: str) -> None: ...

    async def decision(self, pool: str) -> ScalingDecision | None: ...

    async def announce(self, pool: str, decision: ScalingDecision, term: float) -> bool: ...


@dataclass(slots=True)
class _Watched:
    """A pool with what is remembered of it."""

    pool: ScaledPool
    agreement: RulesAgreement
    state: ScalingState | None = None
    #: When the board was first read, by a proxy that has not decided yet.
    since: float | None = None
    decision: ScalingDecision | None = None
    #: When the decision ends unless it is announced again.
    until: float = 0.0
    starts: ColdStarts = field(default_factory=ColdStarts)
    #: Of all proxies, as last read, and the most workers by the rules in force.
    demand: PoolDemand = PoolDemand()
    maximum: int = 0


class Autoscaler:
    """The autoscaler of one proxy, a `WorkersListener`; `start` begins its loop."""

    def __init__(
        self,
        board: Board,
        pools: Mapping[str, ScaledPool],
        workers: KnownWorkers,
        metrics: ProxyMetrics,
        proxy_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._workers = workers
        self._metrics = metrics
        self._proxy_id = proxy_id
        self._clock = clock
        self._watched = {
            name: _Watched(pool, RulesAgreement(name, pool.rules, TERM)) for name, pool in pools.items()
        }
        #: The targets, of those that do the same work the cheapest first.
        self._order = list(self._watched)
        self._listeners: list[Callable[[], None]] = []
        self._woken = asyncio.Event()
        self._reachable = True
        self._draining = False
        self._task: asyncio.Task[None] | None = None

    def decision(self, pool: str) -> ScalingDecision | None:
        """What is in force; None while nothing is, since the store is down or the pool is not scaled."""
        watched = self._watched.get(pool)
        if watched is None or self._clock() >= watched.until:
            return None
        return watched.decision

    def of_pool(self, pool: str) -> ScalingDecision | None:
        """The decisions in force about all targets of a pool as one; of several the reason names each."""
        found = {
            watched.pool.target: decision
            for name, watched in self._watched.items()
            if watched.pool.target.pool == pool and (decision := self.decision(name)) is not None
        }
        return combined(found)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """`listener` is called in the event loop when a decision has changed."""
        self._listeners.append(listener)

    def start(self) -> None:
        self._workers.subscribe(self)
        self._task = asyncio.create_task(self._forever(), name="autoscaler")

    def drain(self) -> None:
        """From now on the other proxies decide; this one's demand still counts."""
        self._draining = True

    async def stop(self) -> None:
        """Ends the loop; the other proxies count this one's demand no longer."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with contextlib.suppress(TriptychError, TimeoutError):
            async with asyncio.timeout(STORE_SECONDS):
                for name in self._watched:
                    await self._board.withdraw(self._proxy_id, name)

    @property
    def targets(self) -> list[str]:
        """The names of what is scaled."""
        return list(self._watched)

    def item_waits(self, model: str = "") -> None:
        """An item for encoders of this model has come. Where none is desired yet, the next poll is now."""
        asked = [
            self.decision(name)
            for name, watched in self._watched.items()
            if watched.pool.target.pool == "encoder" and watched.pool.target.model in ("", model)
        ]
        if asked and not any(each is not None and each.active and each.workers for each in asked):
            self._woken.set()

    def workers_changed(self) -> None:
        """Workers have come, gone or changed."""
        now = self._clock()
        for watched in self._watched.values():
            watched.starts.poll(watched.pool.known, now)
            for kind, seconds in watched.starts.seconds.items():
                pool = watched.pool.target.pool
                self._metrics.cold_start.labels(pool, self._metrics.kind(kind)).set(seconds)

    def worker_lost(self, worker: Worker) -> None:
        """A worker has gone or has stalled: the next poll sees it."""

    async def _forever(self) -> None:
        while True:
            self._woken.clear()
            for name in self._in_order():
                try:
                    await self.poll(name)
                except Exception:
                    logger.exception("the %s pool could not be polled; the next poll follows", name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._woken.wait()

    async def poll(self, name: str) -> None:
        """One poll of a pool. A store that is down leaves the decision as it is, until its term ends."""
        watched = self._watched[name]
        try:
            async with asyncio.timeout(STORE_SECONDS):
                decision = await self._decide(watched)
        except (TriptychError, TimeoutError) as error:
            if self._reachable:
                reason = str(error) or "no reply in time"
                logger.warning("pools keep their workers, the store does not answer: %s", reason)
            self._reachable = False
            if watched.decision is not None and self.decision(name) is None:
                watched.decision = None
                self._report()
            return
        if not self._reachable:
            logger.info("scaling goes on")
        self._reachable = True
        if decision is not None:
            self._adopt(watched, decision)

    async def _decide(self, watched: _Watched) -> ScalingDecision | None:
        """The decision that is in force from now on; None where other proxies were faster every time."""
        pool, now = watched.pool, self._clock()
        in_force = await self._board.decision(pool.name)
        state = self._state(watched, in_force, now)
        own, came = pool.demand(now), pool.came()
        demand = await self._publish(pool.name, own, state)
        watched.demand = demand
        self._show(pool.target.pool)
        for _ in range(_TRIES):
            rules = None if self._draining else await watched.agreement.poll(self._board, now)
            if rules is None or state is None:
                return in_force
            watched.maximum = rules.maximum
            cold_start = watched.starts.expected(pool.kind)
            groups = pool.groups(state.workers, self._rivals(watched))
            seen = Observation(now, demand, groups, cold_start, came)
            after, decision = decide(seen, state, rules)
            if (after.kept or 0) > (state.kept or 0):
                # Before others go below it.
                await self._publish(pool.name, own, after)
            if await self._board.announce(pool.name, decision, TERM):
                watched.state = after
                return decision
            in_force = await self._board.decision(pool.name)
            state = self._state(watched, in_force, now)
        return None

    async def _publish(self, name: str, own: PoolDemand, state: ScalingState | None) -> PoolDemand:
        """The demand of all proxies, with this one's own and the number that it keeps."""
        kept = None if state is None or self._draining else state.kept
        demand = replace(own, kept=kept)
        return total_demand(await self._board.publish(self._proxy_id, name, demand, TERM))

    def _state(self, watched: _Watched, in_force: ScalingDecision | None, now: float) -> ScalingState | None:
        """What this proxy remembers, with the number of workers in force; None while it knows none."""
        if watched.state is not None:
            return watched.state if in_force is None else watched.state.adopting(in_force.workers)
        if in_force is not None:
            return ScalingState.holding(in_force.workers)
        watched.since = now if watched.since is None else watched.since
        if now - watched.since < LEARN_SECONDS:
            return None
        return ScalingState.holding(len(watched.pool.known))

    def _adopt(self, watched: _Watched, decision: ScalingDecision) -> None:
        before, watched.decision = self.decision(watched.pool.name), decision
        now = self._clock()
        watched.until = now + TERM
        name, present = watched.pool.name, len(watched.pool.known)
        self._show(watched.pool.target.pool)
        if before is not None and decision.workers > before.workers:
            watched.starts.asked(decision.workers - max(before.workers, min(present, decision.workers)), now)
        elif decision.workers <= present:
            watched.starts.withdrawn()
        if before is None or before.workers != decision.workers:
            self._metrics.scale_decisions.labels(watched.pool.target.pool, decision.reason).inc()
            logger.info("%s pool should have %d workers (%s)", name, decision.workers, decision.reason)
        if before is None or (before.workers, before.active) != (decision.workers, decision.active):
            self._report()

    def _report(self) -> None:
        for listener in self._listeners:
            listener()

    def _in_order(self) -> list[str]:
        """All targets, of those that do the same work the one with the cheapest items first."""
        costs = {name: watched.pool.cost() for name, watched in self._watched.items()}
        groups: dict[ScalingTarget, list[str]] = {}
        for name in self._order:
            groups.setdefault(self._watched[name].pool.target.rivals, []).append(name)
        self._order = [name for group in groups.values() for name in cheapest_first(group, costs)]
        return self._order

    def _rivals(self, watched: _Watched) -> dict[str, int]:
        """The other kinds that are scaled for the same work, and their workers that this one need not be.

        Of a cheaper kind those count that there should be, unless they have failed to start; a dearer one
        takes only what the cheaper ones leave.
        """
        own, found = watched.pool.target, {}
        cheaper = True
        for name in self._order:
            other = self._watched[name]
            if other is watched:
                cheaper = False
            elif other.pool.target.rivals == own.rivals:
                state, ready = other.state, len(other.pool.known)
                late = state is not None and start_failed(state, other.starts.expected(other.pool.kind))
                asked = ready if late or state is None else state.workers
                found[other.pool.target.kind] = asked if cheaper else 0
        return found

    def _show(self, pool: str) -> None:
        """Metrics of all targets of a pool together, and of each."""
        all_watched = [each for each in self._watched.values() if each.pool.target.pool == pool]
        decided = [(each, each.decision) for each in all_watched if each.decision is not None]
        if decided:
            self._metrics.show_desired(pool, sum(decision.workers for _, decision in decided))
        for watched, decision in decided:
            target = watched.pool.target
            labels = (pool, target.model, self._metrics.kind(target.kind), target.role)
            self._metrics.target_workers.labels(*labels).set(decision.workers)
        self._metrics.workers_limit.labels(pool).set(sum(each.maximum for each in all_watched))
        if pool == "encoder":
            # Kinds that do the same work have the same demand, each in seconds of its own.
            work = {each.pool.target.rivals: each.demand for each in reversed(all_watched)}.values()
            self._metrics.encoder_backlog.set(sum(demand.backlog for demand in work))
            self._metrics.encoder_arrivals.labels("fast").set(sum(demand.fast for demand in work))
            self._metrics.encoder_arrivals.labels("slow").set(sum(demand.slow for demand in work))


async def start_scaling(
    config: ScalingConfig,
    store: EmbeddingStore,
    workers: KnownWorkers,
    dispatcher: Dispatcher,
    metrics: ProxyMetrics,
    proxy_id: str,
    stack: contextlib.AsyncExitStack,
    certificates: Certificates | None = None,
) -> Autoscaler | None:
    """Starts the autoscaler, which `stack` ends; None where no pool is scaled."""
    pools = make_pools(config, workers, dispatcher)
    if not pools:
        return None
    autoscaler = Autoscaler(ScalingBoard(store), pools, workers, metrics, proxy_id)
    dispatcher.jobs.on_arrival = workers.on_unbound = autoscaler.item_waits
    if config.scaler_port:
        scaler = ScalerServer(autoscaler, certificates)
        stack.push_async_callback(scaler.stop)
        await scaler.start(config.scaler_host, config.scaler_port)
    autoscaler.start()
    stack.push_async_callback(autoscaler.stop)
    return autoscaler
