"""Loads that change over hours: phases of a rate and a kind of request, decided by the seed alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from triptych_bench.goodput.load.azure_lmm import lmm_workload
from triptych_bench.goodput.load.workload import PlannedRequest, Workload, plan_requests
from triptych_bench.simulator.costs.costs import EncoderCosts, ModelShape

#: Workers that are 70 % busy at the peak of a trace: the static pool that is the reference.
PEAK_WORKERS = 8
UTILIZATION = 0.7

_SIZES = ((640, 640, 0.5), (1024, 1024, 0.5))
_SMALL = ((640, 640, 0.7), (1024, 1024, 0.3))
#: A quarter of all pictures has been shown before; 60 % where pages go round.
MIXED = Workload(200, 16, ((0, 0.2), (1, 0.3), (2, 0.2), (4, 0.3)), _SIZES, 0.25, 0.5, 0.5)
FOUR_IMAGES = Workload(200, 16, ((4, 1.0),), _SMALL, 0.25, 0.5, 0.5)
REPEATED = Workload(200, 16, ((4, 1.0),), _SMALL, 0.6, 0.5, 0.5)

#: Requests, and their times in seconds.
Sent = tuple[list[PlannedRequest], list[float]]


@dataclass(frozen=True, slots=True)
class Phase:
    """`begin` and `end`: the encoders' work as a share of the trace's peak, even between them."""

    seconds: float
    begin: float
    end: float
    workload: Workload


@dataclass(frozen=True, slots=True)
class Trace:
    """`phases` one after another."""

    name: str
    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        return math.fsum(phase.seconds for phase in self.phases)

    @property
    def peak_to_mean(self) -> float:
        mean = math.fsum(phase.seconds * (phase.begin + phase.end) / 2 for phase in self.phases)
        return max(max(phase.begin, phase.end) for phase in self.phases) * self.seconds / mean

    def share(self, moment: float) -> float:
        """Of the peak, at `moment`; 0 after the end."""
        for phase in self.phases:
            if moment < phase.seconds:
                return phase.begin + (phase.end - phase.begin) * moment / phase.seconds
            moment -= phase.seconds
        return 0.0


#: Shares of the peak at each hour of a day: a night near nothing, office hours, a peak in the evening.
_MORNING = (0.04, 0.03, 0.02, 0.01, 0.01, 0.02, 0.04, 0.08, 0.14, 0.22, 0.28, 0.30)
_HOURS = (*_MORNING, 0.28, 0.24, 0.22, 0.22, 0.24, 0.28, 0.38, 0.62, 1.00, 0.72, 0.28, 0.10)


def diurnal(day: float = 3600.0) -> Trace:
    """A day squeezed into `day` seconds, of mixed requests."""
    ends = (*_HOURS[1:], _HOURS[0])
    hours = zip(_HOURS, ends, strict=True)
    return Trace("diurnal", tuple(Phase(day / 24, begin, end, MIXED) for begin, end in hours))


def burst() -> Trace:
    """40 minutes at 5 % with seven bursts of requests of four pictures, of 20 to 90 s, up to the peak."""
    bursts = ((60, 1.0), (30, 0.8), (90, 1.0), (20, 1.0), (60, 0.6), (45, 1.0), (60, 0.9))
    pauses = (180, 360, 240, 300, 420, 200, 240)
    phases: list[Phase] = []
    for (seconds, share), pause in zip(bursts, pauses, strict=True):
        phases += (Phase(pause, 0.05, 0.05, FOUR_IMAGES), Phase(seconds, share, share, FOUR_IMAGES))
    return Trace("burst", (*phases, Phase(95, 0.05, 0.05, FOUR_IMAGES)))


def step() -> Trace:
    """40 minutes: low, the peak for four minutes, low, repeated pages, nothing, half the peak, low."""
    parts = (
        *((180, 0.1, MIXED), (240, 1.0, MIXED), (660, 0.1, MIXED), (180, 0.5, REPEATED), (420, 0.0, MIXED)),
        *((180, 0.5, FOUR_IMAGES), (540, 0.1, MIXED)),
    )
    return Trace("step", tuple(Phase(seconds, share, share, load) for seconds, share, load in parts))


#: Requests of calm hours of Azure's trace, and of its bursts: hundreds of pictures in every fifth request.
_CALM = replace(lmm_workload(25), reuse=0.0)
_GRIDS = ((0, 0.45), (1, 0.25), (9, 0.08), (100, 0.02), (289, 0.05), (441, 0.05), (484, 0.04), (529, 0.06))
_BURST = replace(lmm_workload(), images=_GRIDS)
#: Of a burst's peak, minute by minute: most swings are from one minute to the next.
_SWINGS = (0.3, 0.35, 0.6, 0.2, 1.0, 0.3, 0.15, 0.7, 0.4, 0.25, 0.9, 0.45, 0.3, 0.55, 0.1, 0.8, 0.35, 0.5)


def azure_lmm() -> Trace:
    """70 minutes in the shape of Azure's LMM trace around a burst of pictures (18 October 2024, morning).

    The peak there are about 18,000 pictures a minute; here what PEAK_WORKERS can take, about a third of it.
    """
    swings = tuple(Phase(60, share, share, _BURST) for share in _SWINGS)
    return Trace("azure-lmm", (Phase(1500, 0.03, 0.04, _CALM), *swings, Phase(1620, 0.06, 0.03, _CALM)))


TRACES = {"diurnal": diurnal, "burst": burst, "step": step, "azure-lmm": azure_lmm}


def work_of(workload: Workload, costs: EncoderCosts, model: ModelShape) -> float:
    """Seconds of an encoder that a request takes on average: pictures shown before take none."""
    sizes, counts = workload.sizes, workload.images
    total = sum(weight for *_, weight in sizes)
    item = sum(weight * costs.tower(1, model.plan(w, h)[0]) for w, h, weight in sizes) / total
    images = sum(count * weight for count, weight in counts) / sum(weight for _, weight in counts)
    return item * images * (1 - workload.reuse)


def requests_of(trace: Trace, costs: EncoderCosts, model: ModelShape, seed: int = 0) -> Sent:
    """The trace's requests and their times: Poisson with the phases' rates.

    At the peak, PEAK_WORKERS are busy for UTILIZATION of their time. Phases of one kind of request show each
    other's pictures again.
    """
    sent: list[tuple[float, Workload]] = []
    begin, peak = 0.0, PEAK_WORKERS * UTILIZATION
    for index, phase in enumerate(trace.phases):
        rate = peak / work_of(phase.workload, costs, model)
        rng = random.Random(f"trace-{trace.name}-{seed}-{index}")
        sent += [(begin + at, phase.workload) for at in _arrivals(phase, rate, rng)]
        begin += phase.seconds
    workloads = list(dict.fromkeys(workload for _, workload in sent))
    plans = {load: iter(_plans(load, sent, seed + place)) for place, load in enumerate(workloads)}
    return [next(plans[load]) for _, load in sent], [at for at, _ in sent]


def _plans(load: Workload, sent: Sequence[tuple[float, Workload]], seed: int) -> list[PlannedRequest]:
    return plan_requests(load, sum(one == load for _, one in sent), seed)


def _arrivals(phase: Phase, rate: float, rng: random.Random) -> Iterable[float]:
    """Poisson at the phase's highest rate, thinned to its rate at each moment."""
    highest = rate * max(phase.begin, phase.end)
    at = 0.0
    while highest > 0 and (at := at + rng.expovariate(highest)) < phase.seconds:
        share = phase.begin + (phase.end - phase.begin) * at / phase.seconds
        if rng.random() * max(phase.begin, phase.end) < share:
            yield at
