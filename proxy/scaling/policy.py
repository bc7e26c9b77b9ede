"""Scaling policy: how many workers a pool should have, as one pure function of what is observed.

With the backlog B and the largest outstanding item c in seconds of work, and W seconds of work arriving per
second, N_flow = ceil(W / utilization) workers keep up with the arrivals and N_slo = ceil(B / max(slo - c, c))
finish the backlog in time. The pool goes up to the larger of both at once. It goes down to what would have
been enough, with `reserve` to spare, all through the window, and to zero when it has been idle long enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingRules, WorkerGroup
from triptych.proxy.encoders.arrivals import FAST_SECONDS, SLOW_SECONDS

#: Arriving work is a burst where the fast average is at least this many times the slow one.
PANIC_RATIO = 2.0
#: A pool is idle for at least this many starts of a worker before it goes to zero.
IDLE_COLD_STARTS = 3.0
#: A start is taken for failed when it takes this many usual ones and more; further workers replace it.
START_PATIENCE = 3.0
#: Seconds that any start is given.
MIN_PATIENCE = 60.0
#: Arriving work-seconds per second that are as good as none.
NO_FLOW = 1e-4
#: Steps in which the window is remembered.
WINDOW_STEPS = 60
#: More workers than any pool has.
_MANY = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Observation:
    """A pool at one moment. `now` is of any clock; a new worker takes `cold_start` seconds to register.

    `groups` has one entry for each kind; the pool grows by the kind whose speed is 1.0 and that is not apart.
    """

    now: float
    demand: PoolDemand
    groups: Sequence[WorkerGroup] = ()
    cold_start: float = 0.0
    #: Whether work has come to this proxy since the last look; None: while the fast average is no zero. What
    #: comes to others is known by what they keep.
    came: bool | None = None


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the policy remembers of a pool between two decisions.

    `workers` is what was decided last. Times are of a clock of its own, which counts the seconds that were
    observed: a jump of the observed clock does not count.
    """

    workers: int = 0
    elapsed: float = 0.0
    #: The observed clock at the last decision; None before the first.
    seen: float | None = None
    #: (when, workers that were worth keeping), of falling need: the first is the most of the window.
    needs: tuple[tuple[float, int], ...] = ()
    #: When the pool became idle; None while it is not.
    idle_since: float | None = None
    #: Since when no further worker has become ready although some should; None while none is missing.
    short_since: float | None = None
    #: Workers that were ready at that time.
    ready: int = 0
    #: What is published to the other proxies: see PoolDemand.
    kept: int | None = None

    @classmethod
    def holding(cls, workers: int) -> ScalingState:
        """The state of a pool that has this many workers: it keeps them for a whole window at least."""
        return cls(workers=workers, needs=((0.0, workers),), kept=workers or None)

    def adopting(self, workers: int) -> ScalingState:
        """This state where another proxy has decided so: more workers are a need, as if seen here."""
        if workers <= self.workers:
            return replace(self, workers=workers)
        needs = tuple(one for one in self.needs if one[1] > workers)
        return replace(self, workers=workers, needs=(*needs, (self.elapsed, workers)))


@dataclass(frozen=True, slots=True)
class _Capacity:
    """Workers that are ready: of the kind that the pool grows by, and all others in terms of these."""

    own: int
    others: float


@dataclass(frozen=True, slots=True)
class _Need:
    """Workers of the kind that the pool grows by which demand asks for."""

    flow: int
    backlog: int
    panic: bool

    @property
    def workers(self) -> int:
        return max(self.flow, self.backlog)


def decide(
    seen: Observation, state: ScalingState, rules: ScalingRules
) -> tuple[ScalingState, ScalingDecision]:
    """The pool's number of workers from now on, and the state for the next decision."""
    demand, capacity = _checked(seen.demand), _capacity(seen.groups)
    came = demand.fast > NO_FLOW if seen.came is None else seen.came
    busy = demand.waiting > 0 or demand.backlog > 0.0 or came
    state = _advance(state, seen.now, capacity.own, rules, busy=busy)
    need = _need(demand, rules, capacity, 0.0)
    awake = busy or (state.workers > 0 and _idle_seconds(state) < _idle_limit(seen.cold_start, rules))
    active = awake or demand.kept is not None
    # The first item of an empty pool asks for a worker, whatever it is expected to cost.
    floor = 1 if awake and capacity.others <= 0.0 else 0
    target = max(need.workers, floor)
    if need.workers > capacity.own and start_failed(state, seen.cold_start):
        target += need.workers - capacity.own
    # The reserve keeps workers; it asks for none.
    spare = min(_need(demand, rules, capacity, rules.reserve).workers, state.workers)
    state = _remember(state, min(max(spare, target), rules.maximum), rules)
    kept = max(state.needs[0][1], min(state.workers, demand.kept or 0))
    workers, reason = _target(need, target, kept, state, rules) if active else (rules.minimum, "idle")
    needs = state.needs if active else ((state.elapsed, rules.minimum),)
    after = replace(state, workers=workers, needs=needs, kept=needs[0][1] if awake else None)
    # Where other kinds do all the work, this one is not asked for its first worker.
    return after, ScalingDecision(workers, reason, active and (workers > 0 or capacity.others <= 0.0))


def _target(need: _Need, target: int, kept: int, state: ScalingState, rules: ScalingRules) -> tuple[int, str]:
    """The number of workers while there is demand or was some lately, and the word for it."""
    workers = max(target, kept, state.workers if need.panic else 0)
    if workers > rules.maximum:
        return rules.maximum, "max"
    if workers < rules.minimum:
        return rules.minimum, "min"
    if workers < state.workers:
        return workers, "consolidate"
    if workers > target:
        return workers, "hold"
    if need.backlog > need.flow:
        return workers, "backlog"
    return workers, "panic" if need.panic else "flow"


def _need(demand: PoolDemand, rules: ScalingRules, capacity: _Capacity, reserve: float) -> _Need:
    """Workers for this demand and a share more of it. No more than there are items to work on."""
    more, largest = 1.0 + reserve, demand.largest
    panic = demand.fast > NO_FLOW and demand.fast >= PANIC_RATIO * demand.slow
    items = demand.waiting + capacity.own

    def flow(work: float, seconds: float) -> int:
        needed = _ceil(more * work / rules.utilization - capacity.others)
        # A single large item looks like many small ones.
        return min(needed, max(items, _ceil(seconds * work / largest))) if largest > 0.0 else needed

    workers = flow(demand.slow, SLOW_SECONDS)
    if panic:
        workers = max(workers, flow(demand.fast, FAST_SECONDS))
    seconds = max(rules.slo - largest, largest)
    backlog = min(_ceil(more * demand.backlog / seconds - capacity.others), items)
    return _Need(workers, backlog, panic)


def _ceil(workers: float) -> int:
    """Whole workers, none below zero; what is whole but for its rounding is not rounded up."""
    return max(math.ceil(min(workers, _MANY) - 1e-9), 0)


def _advance(state: ScalingState, now: float, ready: int, rules: ScalingRules, *, busy: bool) -> ScalingState:
    """The state at the time of this decision, before it."""
    step = 0.0 if state.seen is None else now - state.seen
    # A clock that goes back, or ahead by more than decisions are apart, was set: nothing was observed then.
    step = min(max(step, 0.0), rules.window / 4) if math.isfinite(step) else 0.0
    elapsed = state.elapsed + step
    idle_since, short_since = state.idle_since, state.short_since
    if busy:
        idle_since = None
    elif idle_since is None:
        idle_since = elapsed
    if ready >= state.workers:
        short_since = None
    elif short_since is None or ready > state.ready:
        short_since = elapsed
    return replace(
        state,
        elapsed=elapsed,
        seen=now if math.isfinite(now) else state.seen,
        idle_since=idle_since,
        short_since=short_since,
        ready=ready,
    )


def _remember(state: ScalingState, workers: int, rules: ScalingRules) -> ScalingState:
    """Notes what is needed now, and forgets what is older than the window."""
    needs = [(when, need) for when, need in state.needs if when >= state.elapsed - rules.window]
    while needs and needs[-1][1] <= workers:
        needs.pop()
    if not needs or state.elapsed - needs[-1][0] >= rules.window / WINDOW_STEPS:
        needs.append((state.elapsed, workers))
    return replace(state, needs=tuple(needs))


def _idle_seconds(state: ScalingState) -> float:
    return 0.0 if state.idle_since is None else state.elapsed - state.idle_since


def _idle_limit(cold_start: float, rules: ScalingRules) -> float:
    """Seconds without any work after which a pool is not active."""
    return max(rules.window, IDLE_COLD_STARTS * _finite(cold_start))


def start_failed(state: ScalingState, cold_start: float) -> bool:
    """Whether workers that should have become ready long ago have not."""
    patience = max(START_PATIENCE * _finite(cold_start), MIN_PATIENCE)
    return state.short_since is not None and state.elapsed - state.short_since > patience


def _capacity(groups: Sequence[WorkerGroup]) -> _Capacity:
    own = [group for group in groups if group.speed == 1.0 and not group.apart]
    others = (max(group.ready, 0) * _finite(group.speed) for group in groups if group not in own)
    return _Capacity(sum(max(group.ready, 0) for group in own), math.fsum(others))


def _checked(demand: PoolDemand) -> PoolDemand:
    """The demand with negative, NaN and infinite values as 0."""
    return PoolDemand(
        _finite(demand.backlog),
        max(demand.waiting, 0),
        _finite(demand.largest),
        _finite(demand.fast),
        _finite(demand.slow),
        demand.kept,
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0.0 else 0.0
