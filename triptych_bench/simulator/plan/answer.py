"""The answer to a question: ratios, what to buy for a rate, sensitivity to the load, and scaling."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from triptych.base.errors import ConfigError
from triptych.base.progress import Progress
from triptych_bench.goodput.load.workload import Workload
from triptych_bench.simulator.cluster.shape import ClusterShape, colocated
from triptych_bench.simulator.plan.estimate import Estimate, estimate, proxies_for, proxy_seconds
from triptych_bench.simulator.plan.question import PlannedDevice, Question, check_question
from triptych_bench.simulator.plan.ratios import Advice, Ratios, Served, advise, advise_roles, best_ratio
from triptych_bench.simulator.plan.scaling import Scaling, scaling
from triptych_bench.simulator.plan.trials import COARSE, Trials
from triptych_bench.simulator.run import NOT_MODELLED

FORMAT = "triptych-plan/1"
#: Shapes up to so many devices are simulated before they are named; larger ones are named by their bound.
MAX_SIMULATED, MAX_BOUGHT = 32, 4096
#: Sizes that are tried before the last one is named as it is.
_TRIES = 4
SHARES, REUSES = (0.0, 0.5, 1.0), (0.0, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Purchase:
    """`shape` serves `rate`; `confirmed` in simulation. `dollars_per_million` requests, if priced."""

    shape: ClusterShape
    devices: int
    rate: float
    confirmed: bool
    dollars_per_million: float | None


@dataclass(frozen=True, slots=True)
class SensitivityPoint:
    """Sustained requests per second of the answer's two shapes where `kind` ("share" of requests with
    pictures, or "reuse") is `value`. `best`: the ratio whose bound is highest there, by costs alone.
    """

    kind: str
    value: float
    apart: float
    replicas: float
    best: str
    given: bool


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`requests` and `windows` were simulated, in `seconds` of CPU time; `hurried` as in Trials."""

    question: Question
    ratios: Ratios
    purchases: tuple[Purchase, ...]
    points: tuple[SensitivityPoint, ...]
    scaling: Scaling | None
    windows: int
    requests: int
    seconds: float
    hurried: bool = False

    def proxies(self, rate: float) -> int:
        """For `rate`, by their CPU time alone."""
        device = self.question.device
        return proxies_for(rate, proxy_seconds(self.question.workload, device.costs, device.model))

    def dollars(self, served: Served) -> float | None:
        """Per million requests at the rate served."""
        return cost_per_million(self.question.hourly(served.shape), served.rate)

    def per_dollar(self, served: Served) -> float | None:
        """Requests at the rate served; None without prices."""
        hourly = self.question.hourly(served.shape)
        return served.rate * 3600 / hourly if hourly else None

    @property
    def advice(self) -> Advice:
        best, baseline = (self.question.hourly(one.shape) for one in (self.ratios.best, self.ratios.baseline))
        return advise(self.ratios, estimate(self.question), best / baseline if best and baseline else 1.0)


def answer(
    question: Question,
    *,
    rate: float = 0.0,
    sensitivity: bool = True,
    scale: bool = False,
    store_rate: float = 0.0,
) -> CapacityPlan:
    """The ratio, and beside it devices for `rate` requests per second (0: none), sensitivity and scaling.

    `store_rate`: bytes per second of the store either way; 0: as measured. ConfigError for bad input.
    """
    check_question(question)
    if scale and question.device.ranks > 1:
        raise ConfigError("--scale counts workers of one rank each: leave out --pd-ranks")
    began = time.process_time()
    with Progress("simulating", unit="searches") as running:
        trials = Trials(question, running)
        # Two searches at each point but the load's own.
        later = 2 * sum(not own for *_, own in points(question.workload)) if sensitivity else 0
        ratios = best_ratio(trials, later)
        bought = purchases(trials, ratios, rate) if rate else ()
        moved = sensitivity_points(trials, ratios) if sensitivity else ()
    scaled = scaling(question, ratios.best, store_rate) if scale and ratios.best.rate else None
    seconds, requests = time.process_time() - began, trials.requests
    return CapacityPlan(
        question, ratios, bought, moved, scaled, len(trials), requests, seconds, trials.hurried
    )


def cost_per_million(hour: float | None, rate: float) -> float | None:
    """Dollars for a million requests at `rate` per second; None without a price or a rate."""
    return None if hour is None or rate <= 0 else hour / 3600 / rate * 1e6


def fewest_workers(
    bounds: Estimate, of_bound: float, rate: float, *, apart: bool
) -> Iterator[tuple[int, int]]:
    """(encoders, PD workers), or (0, replicas): the fewest whose bound, less what waiting takes of it, is
    `rate` requests per second; then one more at a time.

    ConfigError when that is more than MOST_BOUGHT.
    """
    asked = rate / of_bound
    needed = (asked / bounds.encoder, asked / bounds.pd_worker) if apart else (0.0, asked / bounds.replica)
    if max(needed) > MAX_BOUGHT or sum(map(math.ceil, needed)) > MAX_BOUGHT:
        raise ConfigError(f"--rate {rate:g} takes more than {MAX_BOUGHT} devices: split it")
    encoders, others = map(math.ceil, needed)
    while True:
        yield encoders, others
        # The pool that limits both grows.
        limits = bool(encoders) and encoders * bounds.encoder < others * bounds.pd_worker
        encoders, others = encoders + limits, others + (not limits)


def purchase(trials: Trials, served: Served, rate: float, *, apart: bool) -> Purchase:
    """The fewest devices by the bound, with what the worst of the answer's loads left of it; then simulated.

    ConfigError for a rate that cannot be served.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate {rate:g} must be above 0")
    question = trials.question
    of_bound = min(min(served.rates) / served.bound, 1.0)
    for tried, counts in enumerate(fewest_workers(estimate(question), of_bound, rate, apart=apart), 1):
        bought = question.apart(*counts) if apart else colocated(counts[1])
        devices = question.devices_in(bought)
        confirmed = devices <= MAX_SIMULATED and trials.window(bought, question.workload, rate).sustained
        if confirmed or devices >= MAX_SIMULATED or tried == _TRIES:
            break
    return Purchase(bought, devices, rate, confirmed, cost_per_million(question.hourly(bought), rate))


def purchases(trials: Trials, ratios: Ratios, rate: float) -> tuple[Purchase, ...]:
    """Apart and as replicas; what serves nothing on the question's devices is left out."""
    pairs = ((ratios.best, True), (ratios.replicas, False))
    return tuple(purchase(trials, served, rate, apart=apart) for served, apart in pairs if served.rate)


def with_share(load: Workload, share: float) -> Workload:
    """A share of requests has pictures, in the load's own proportions; one each where it has none."""
    pictures = tuple((count, weight) for count, weight in load.images if count and weight) or ((1, 1.0),)
    total = sum(weight for _, weight in pictures)
    scaled = tuple((count, weight * share / total) for count, weight in pictures if share)
    return replace(load, images=(((0, 1 - share),) if share < 1 else ()) + scaled)


def share_of(load: Workload) -> float:
    """The share of requests with pictures."""
    return sum(weight for count, weight in load.images if count) / sum(weight for _, weight in load.images)


def points(load: Workload) -> Iterator[tuple[str, float, Workload, bool]]:
    """(kind, value, workload, whether that is the load's own); reuse only where there are pictures."""
    own = share_of(load)
    for share in sorted({*SHARES, round(own, 4)}):
        yield "share", share, with_share(load, share), share == own
    for reuse in sorted({*REUSES, load.reuse}) if own else ():
        yield "reuse", reuse, replace(load, reuse=reuse), reuse == load.reuse


def sensitivity_points(trials: Trials, ratios: Ratios) -> tuple[SensitivityPoint, ...]:
    """The answer's ratio and the replicas over all points, one load each, less finely than the answer."""

    def rate(served: Served, bounds: Estimate, load: Workload) -> float:
        start = served.of_bound * bounds.of(served.shape)
        return trials.highest(served.shape, load, start, 0, COARSE) if start else 0.0

    result = []
    for kind, value, load, given in points(trials.question.workload):
        bounds = estimate(trials.question, load)
        # An answer for texts alone has no encoder, and would fail at the first picture.
        both = [
            0.0 if one is ratios.best and not one.shape.encoders
            else one.rate if given else rate(one, bounds, load)
            for one in (ratios.best, ratios.replicas)
        ]  # fmt: skip
        best = max(ratios.apart, key=lambda served, bounds=bounds: bounds.of(served.shape)).name  # type: ignore[misc]
        result.append(SensitivityPoint(kind, value, both[0], both[1], best, given))
    return tuple(result)


def document(plan: CapacityPlan) -> dict[str, object]:
    """The answer as JSON has it: rates in requests per second, dollars per million requests or null."""
    question, ratios = plan.question, plan.ratios
    return {
        "format": FORMAT,
        "workload": {"name": question.workload_name} | asdict(question.workload),
        "slo": dict(question.slo.limits),
        "device": _device(question.device),
        "encoder_device": _device(question.encoders_on),
        "devices": question.devices,
        "budget": question.budget or None,
        "seed": question.seed,
        "ratios": [_served(plan, served) for served in ratios.apart],
        "roles": [_served(plan, served) for served in ratios.roles],
        "replicas": _served(plan, ratios.replicas),
        "in_step": _served(plan, ratios.in_step),
        "best": ratios.best.name if ratios.best.rate else None,
        "verdict": ratios.verdict,
        "advice": asdict(plan.advice),
        "roles_advice": asdict(advise_roles(ratios)),
        "purchases": [
            asdict(one) | {"shape": one.shape.name, "proxies": plan.proxies(one.rate)}
            for one in plan.purchases
        ],
        "sensitivity": [asdict(point) for point in plan.points],
        "scaling": asdict(plan.scaling) if plan.scaling is not None else None,
        "hurried": plan.hurried,
        "not_modelled": NOT_MODELLED,
        "simulated": {"windows": plan.windows, "requests": plan.requests, "seconds": plan.seconds},
    }


def _device(device: PlannedDevice) -> dict[str, object]:
    source, hour = device.costs.source, device.hour
    return {"name": device.name, "source": source, "dollars_per_hour": hour, "ranks": device.ranks}


def _served(plan: CapacityPlan, served: Served) -> dict[str, object]:
    return {
        "shape": served.name,
        "bound": served.bound,
        "rate": served.rate if not served.skipped else None,
        "rates": list(served.rates),
        "proxies": plan.proxies(served.rate) if not served.skipped else None,
        "dollars_per_million": plan.dollars(served),
        "requests_per_dollar": plan.per_dollar(served),
    }


def write_document(path: Path, plan: CapacityPlan) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document(plan)), indent=1) + b"\n")
