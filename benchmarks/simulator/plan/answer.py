"""The whole answer to a question, and the document that holds it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from triptych.errors import ConfigError
from triptych.progress.progress import step
from triptych.simulator.plan.advice import Advice, advise
from triptych.simulator.plan.estimate import estimate, proxies_for, proxy_seconds
from triptych.simulator.plan.purchase import Purchase, cost_per_million, purchases
from triptych.simulator.plan.question import PlannedDevice, Question, check_question
from triptych.simulator.plan.ratios import Ratios, Served, best_ratio
from triptych.simulator.plan.scaling import Bottleneck, Reach, bottlenecks, curve, traffic_of
from triptych.simulator.plan.sensitivity import SensitivityPoint, sensitivity, sensitivity_searches
from triptych.simulator.plan.trials import Trials

FORMAT = "triptych-plan/1"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is answered beside the ratio. `rate`: requests per second to buy devices for; 0: none.

    `store_rate`: bytes per second of the store in both directions; 0: as measured.
    """

    rate: float = 0.0
    sensitivity: bool = True
    scale: bool = False
    store_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """`of_bound`: what waiting leaves of the bound, taken to be the same at every size."""

    of_bound: float
    curve: tuple[Reach, ...]
    bottlenecks: tuple[Bottleneck, ...]


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
        return cost_per_million(1, self.question.hourly(served.shape), served.rate)

    def per_dollar(self, served: Served) -> float | None:
        """Requests at the rate served; None without prices."""
        hourly = self.question.hourly(served.shape)
        return served.rate * 3600 / hourly if hourly else None

    @property
    def advice(self) -> Advice:
        best, baseline = (self.question.hourly(one.shape) for one in (self.ratios.best, self.ratios.baseline))
        return advise(self.ratios, estimate(self.question), best / baseline if best and baseline else 1.0)


def answer(question: Question, wanted: Wanted) -> CapacityPlan:
    """ConfigError for what cannot be answered."""
    check_question(question)
    if wanted.scale and question.device.ranks > 1:
        raise ConfigError("--scale counts workers of one rank each: leave out --pd-ranks")
    began = time.process_time()
    with step("simulating", unit="searches") as running:
        trials = Trials(question, running)
        later = sensitivity_searches(question.workload) if wanted.sensitivity else 0
        ratios = best_ratio(trials, later)
        bought = purchases(trials, ratios, wanted.rate) if wanted.rate else ()
        points = sensitivity(trials, ratios) if wanted.sensitivity else ()
    scaled = scaling(question, ratios.best, wanted.store_rate) if wanted.scale and ratios.best.rate else None
    seconds = time.process_time() - began
    return CapacityPlan(
        question, ratios, bought, points, scaled, len(trials), trials.requests, seconds, trials.hurried
    )


def scaling(question: Question, served: Served, store_rate: float = 0.0) -> Scaling:
    """The curve of shapes like the one that was `served`."""
    found = estimate(question)
    traffic = traffic_of(question, found, served, store_rate)
    return Scaling(
        served.of_bound,
        curve(found, served.of_bound, traffic),
        bottlenecks(found, served.of_bound, traffic),
    )


def document(found: CapacityPlan) -> dict[str, object]:
    """The answer as JSON has it: rates in requests per second, dollars per million requests or null."""
    question = found.question
    device = question.device
    return {
        "format": FORMAT,
        "workload": {"name": question.workload_name} | asdict(question.workload),
        "slo": dict(question.slo.limits),
        "device": _device(device),
        "encoder_device": _device(question.encoders_on),
        "devices": question.devices,
        "budget": question.budget or None,
        "seed": question.seed,
        "ratios": [_served(found, served) for served in found.ratios.apart],
        "replicas": _served(found, found.ratios.replicas),
        "in_step": _served(found, found.ratios.in_step) if found.ratios.in_step is not None else None,
        "best": found.ratios.best.name if found.ratios.best.rate else None,
        "verdict": found.ratios.verdict,
        "advice": asdict(found.advice),
        "purchases": [
            asdict(one) | {"shape": one.shape.name, "proxies": found.proxies(one.rate)}
            for one in found.purchases
        ],
        "sensitivity": [asdict(point) for point in found.points],
        "scaling": asdict(found.scaling) if found.scaling is not None else None,
        "hurried": found.hurried,
        "simulated": {"windows": found.windows, "requests": found.requests, "seconds": found.seconds},
    }


def _device(device: PlannedDevice) -> dict[str, object]:
    return {
        "name": device.name,
        "source": device.costs.source,
        "dollars_per_hour": device.hour,
        "ranks": device.ranks,
    }


def _served(found: CapacityPlan, served: Served) -> dict[str, object]:
    return {
        "shape": served.name,
        "bound": served.bound,
        "rate": served.rate if not served.skipped else None,
        "rates": list(served.rates),
        "proxies": found.proxies(served.rate) if not served.skipped else None,
        "dollars_per_million": found.dollars(served),
        "requests_per_dollar": found.per_dollar(served),
    }


def write_document(path: Path, found: CapacityPlan) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document(found)), indent=1) + b"\n")
