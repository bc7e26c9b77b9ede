"""The settings of one run of the harness, and the load of each of its windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from triptych.base.errors import ConfigError
from triptych.goodput.load.arrivals import Arrivals, arrival_times, mean_rate
from triptych.goodput.load.job import LoadJob, Target
from triptych.goodput.load.trace import read_trace
from triptych.goodput.load.workload import PlannedRequest, Workload, plan_requests
from triptych.goodput.measure.slo import Slo

#: A window below this says nothing of a P99.
_LEAST_REQUESTS = 5
#: The warm-up's arrivals differ from those of every measured window.
_WARM_UP_SEED = 1 << 40


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`seconds` and `warm_up` are of every window; `requests` above 0 sets the measured number instead.

    One of `arrivals`, `trace` and `concurrency` decides when requests are sent.
    """

    target: Target
    workload: Workload
    workload_name: str
    slo: Slo
    arrivals: Arrivals = Arrivals()
    trace: str = ""
    trace_speed: float = 1.0
    concurrency: int = 0
    seconds: float = 60.0
    requests: int = 0
    warm_up: float = 5.0
    timeout: float = 120.0
    seed: int = 0
    words_per_token: float = 1.0

    def at(self, rate: float) -> RunSettings:
        """The same at another rate; a ramp keeps its steepness."""
        scaled = self.arrivals.ramp_to * rate / self.arrivals.rate
        return replace(self, arrivals=replace(self.arrivals, rate=rate, ramp_to=scaled))

    @property
    def label(self) -> str:
        if self.trace:
            return f"trace {Path(self.trace).name}"
        if self.concurrency:
            return f"{self.concurrency} at once"
        return f"{self.arrivals.rate:.4g}/s"


def make_job(settings: RunSettings, seed: int) -> LoadJob:
    """The window that `seed` decides: requests, pictures and times."""
    if settings.trace:
        schedule = read_trace(Path(settings.trace), settings.trace_speed, seed)
        warm_up = sum(time < settings.warm_up for time, _ in schedule)
    else:
        warm_up, measured = _counts(settings)
        planned = plan_requests(settings.workload, warm_up + measured, seed)
        times = _times(settings, warm_up, measured, seed)
        schedule = list(zip(times, planned, strict=True))
    return _job(settings, schedule, warm_up)


def _counts(settings: RunSettings) -> tuple[int, int]:
    """Requests of the warm-up, and measured ones."""
    if settings.concurrency:
        return settings.concurrency, settings.requests or max(10 * settings.concurrency, 20)
    warm_up = round(settings.arrivals.rate * settings.warm_up)
    measured = settings.requests or round(mean_rate(settings.arrivals) * settings.seconds)
    return warm_up, max(measured, _LEAST_REQUESTS)


def _times(settings: RunSettings, warm_up: int, measured: int, seed: int) -> list[float]:
    """Both parts offer their rate exactly; a ramp begins after its warm-up."""
    if settings.concurrency:
        return [0.0] * (warm_up + measured)
    steady = (
        replace(settings.arrivals, kind="poisson") if settings.arrivals.kind == "ramp" else settings.arrivals
    )
    before = arrival_times(steady, warm_up, seed + _WARM_UP_SEED) if warm_up else []
    begin = before[-1] if before else 0.0
    return before + [begin + time for time in arrival_times(settings.arrivals, measured, seed)]


def _job(settings: RunSettings, schedule: list[tuple[float, PlannedRequest]], warm_up: int) -> LoadJob:
    if warm_up >= len(schedule):
        raise ConfigError(f"--warm-up {settings.warm_up:g} leaves no request of the trace to measure")
    return LoadJob(
        target=settings.target,
        schedule=tuple(schedule),
        warm_up=warm_up,
        concurrency=settings.concurrency,
        timeout=settings.timeout,
        words_per_token=settings.words_per_token,
    )
