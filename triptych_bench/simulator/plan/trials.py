"""Simulated windows: definition (c) of goodput for a shape, with as few and as short ones as will do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from triptych.base.progress import Progress
from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests
from triptych_bench.goodput.measure.figures import MATTERS, SURE, drift_of, judge
from triptych_bench.goodput.measure.search import SearchLimits, Verdict, search
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.simulator.cluster.shape import ClusterShape
from triptych_bench.simulator.costs.costs import CostModel, ProxyCosts
from triptych_bench.simulator.plan.estimate import Estimate, estimate, proxies_for, proxy_seconds
from triptych_bench.simulator.plan.question import Question
from triptych_bench.simulator.run import simulate

#: Measured part of a window in seconds, and its least and most requests.
SECONDS, MINIMUM, MAXIMUM = 5.0, 250, 1000
#: Before it, as many stays of a request: a cluster that is nearly full takes longer than one to be as full as
#: it will be. At most so many requests.
STAYS, WARMEST = 2.0, 1500
#: A growth of TTFT is judged as if it went on for a window of the harness; but not one that is slower than
#: the queue of a cluster that gets so much more than it can serve: a few seconds differ by that.
MINUTE, OVERLOAD = 60.0, 0.03
#: Records that are looked at for growth.
POINTS = 150
#: Where the first window of a search is, and below which rates are none, as shares of the bound.
FIRST, LOWEST = 0.92, 0.02
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Fineness:
    """`resolution`, as a factor minus 1, and the first `step` away from a search's start, as a factor.

    `most`: requests that a window measures at most.
    """

    resolution: float = 0.06
    step: float = 1.12
    maximum: int = MAXIMUM


FINE = Fineness()
COARSE = Fineness(0.12, 1.12, 300)


class Trials:
    """Windows of one question, each simulated once. `progress` counts the searches.

    `hurried`: some began before two stays were over, for their rate is high; they may be too kind.
    """

    def __init__(self, question: Question, progress: Progress | None = None) -> None:
        self.question = question
        self.requests = self.searches = 0
        self.hurried = False
        self._progress = progress or Progress("simulating")
        self._known: dict[tuple[str, Workload, float, int, int], Verdict] = {}

    def __len__(self) -> int:
        return len(self._known)

    def window(
        self, shape: ClusterShape, load: Workload, rate: float, repeat: int = 0, maximum: int = MAXIMUM
    ) -> Verdict:
        """`repeat` draws another load of the same kind; `most` requests are measured."""
        key = (shape.name, load, rate, repeat, maximum)
        if key not in self._known:
            self._progress.advance(0, note=f"{shape.name} at {rate:.3g} requests/s")
            self._known[key] = self._simulate(shape, load, rate, repeat, maximum)
        return self._known[key]

    def highest(
        self,
        shape: ClusterShape,
        load: Workload,
        start: float = 0.0,
        repeat: int = 0,
        fineness: Fineness = FINE,
    ) -> float:
        """The highest sustained rate, looked for from `start` or near the bound; 0 when there is none."""
        bound, rate = estimate(self.question, load).of(shape), 0.0
        if bound > 0:
            limits = SearchLimits(
                start=min(start or FIRST * bound, bound),
                lowest=LOWEST * bound,
                # Without reuse nothing is cheaper than its costs: a rate above them is too short a window.
                highest=100 * bound if load.reuse else bound,
                resolution=fineness.resolution,
                windows=1,
                confirmations=0,
                step=fineness.step,
            )
            rate = search(
                lambda tried: self.window(shape, load, tried, repeat, fineness.maximum), limits
            ).rate
        self.searches += 1
        self._progress.advance()
        return rate

    def expect(self, searches: int) -> None:
        """So many searches are to come, as far as one knows."""
        self._progress.advance(0, total=self.searches + searches)

    def _simulate(
        self, shape: ClusterShape, load: Workload, rate: float, repeat: int, maximum: int
    ) -> Verdict:
        question, device = self.question, self.question.device
        seed = question.seed * _SEED_STEP + repeat
        bounds = estimate(question, load)
        warm_up, measured = window_counts(bounds, load, rate, shape.pd_workers, question.slo, maximum)
        count = warm_up + measured
        self.hurried |= warm_up >= WARMEST
        self.requests += count
        proxies = proxies_for(rate, proxy_seconds(load, device.costs, device.model))
        result = simulate(
            plan_requests(load, count, seed),
            arrival_times(Arrivals(rate=rate), count, seed),
            shape,
            with_proxies(device.costs, proxies),
            device.model,
            device.limits,
            seed,
            warm_up=warm_up,
            enough=Doomed(question.slo, measured),
        )
        return verdict_of(result.records, question.slo)


def window_counts(
    bounds: Estimate, load: Workload, rate: float, pd_workers: int, slo: Slo, maximum: int = MAXIMUM
) -> tuple[int, int]:
    """Requests that warm the cluster up, as long as two stay in it, and requests that are measured."""
    step = min(bounds.step_seconds(rate / pd_workers), slo.seconds("tpot"))
    warm_up = math.ceil(rate * (STAYS * load.output_tokens * step + 0.5))
    measured = max(MINIMUM, math.ceil(rate * max(SECONDS, load.output_tokens * step)))
    return min(warm_up, WARMEST), min(measured, maximum)


def with_proxies(costs: CostModel, count: int) -> CostModel:
    """`count` proxies as one that is so many times as fast: it sees every worker, as each of them does."""
    quicker = {name: seconds / count for name, seconds in asdict(costs.proxy).items()}
    return replace(costs, proxy=ProxyCosts(**quicker))


class Doomed:
    """Whether so many measured requests have missed one objective that its P99 will be over the limit."""

    def __init__(self, slo: Slo, measured: int) -> None:
        self._slo = slo
        # With one more late than these, the lower neighbour of P99 is late too.
        max_late = measured - 1 - math.floor((measured - 1) * 0.99)
        self._left = {name: max_late for name, _ in slo.limits}

    def __call__(self, record: RequestRecord) -> bool:
        if record.warm_up:
            return False
        for name in self._slo.misses(record.latencies()):
            self._left[name] -= 1
        return min(self._left.values()) < 0


def verdict_of(records: tuple[RequestRecord, ...], slo: Slo, points: int = POINTS) -> Verdict:
    """The harness's verdict, and none of a growth that would be too much within its minute.

    At most `points` records are looked at for growth.
    """
    # Gaps between single tokens are in no verdict, and sorting them would cost most.
    records = tuple(replace(record, itls=()) for record in records)
    measured = [record for record in records if not record.warm_up]
    if not measured:
        return Verdict(False, math.inf, "nothing ended")
    drift = drift_of(measured[:: math.ceil(len(measured) / points)], slo)
    result = judge(records, slo, drift)
    sent = [record.sent for record in measured]
    slope, limit = drift.growth / max(max(sent) - min(sent), 1e-9), slo.seconds("ttft")
    grows = drift.z > SURE and slope > OVERLOAD and slope * MINUTE > MATTERS * limit
    if result.sustained and math.isfinite(limit) and grows:
        return Verdict(False, result.reference, f"TTFT grows by {slope * MINUTE * 1000:.0f} ms in a minute")
    return result
