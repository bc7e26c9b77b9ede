"""One measured window: load, figures, verdict, and the time line of the server's queues."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.azure_lmm import read_azure_csv
from triptych_bench.goodput.load.generator import run_window
from triptych_bench.goodput.load.job import LoadJob, Progress, Target, WindowReport
from triptych_bench.goodput.load.workload import (
    Arrivals,
    Workload,
    arrival_times,
    mean_rate,
    plan_requests,
    read_trace,
)
from triptych_bench.goodput.measure.figures import Drift, WindowFigures, drift_of, judge, summarise
from triptych_bench.goodput.measure.search import Verdict
from triptych_bench.goodput.measure.slo import Slo

#: A window below this says nothing of a P99.
_MIN_REQUESTS = 5
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
        path = Path(settings.trace)
        read = read_azure_csv if path.suffix == ".csv" else read_trace
        schedule = read(path, settings.trace_speed, seed)
        warm_up = sum(time < settings.warm_up for time, _ in schedule)
    else:
        warm_up, measured = _counts(settings)
        planned = plan_requests(settings.workload, warm_up + measured, seed)
        times = _times(settings, warm_up, measured, seed)
        schedule = list(zip(times, planned, strict=True))
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


def _counts(settings: RunSettings) -> tuple[int, int]:
    """Requests of the warm-up, and measured ones."""
    if settings.concurrency:
        return settings.concurrency, settings.requests or max(10 * settings.concurrency, 20)
    warm_up = round(settings.arrivals.rate * settings.warm_up)
    measured = settings.requests or round(mean_rate(settings.arrivals) * settings.seconds)
    return warm_up, max(measured, _MIN_REQUESTS)


def _times(settings: RunSettings, warm_up: int, measured: int, seed: int) -> list[float]:
    """Both parts offer their rate exactly; a ramp begins after its warm-up."""
    if settings.concurrency:
        return [0.0] * (warm_up + measured)
    kind = "poisson" if settings.arrivals.kind == "ramp" else settings.arrivals.kind
    steady = replace(settings.arrivals, kind=kind)
    before = arrival_times(steady, warm_up, seed + _WARM_UP_SEED) if warm_up else []
    begin = before[-1] if before else 0.0
    return before + [begin + time for time in arrival_times(settings.arrivals, measured, seed)]


#: A generator that sends later than this at P99, or takes more of its core, may itself be what is measured.
LATE_SECONDS = 0.002
BUSY_SHARE = 0.8
#: P99 of fewer requests is their slowest one.
FEW_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    settings: RunSettings
    seed: int
    report: WindowReport
    figures: WindowFigures
    drift: Drift
    verdict: Verdict
    queues: tuple[QueueSample, ...] = ()

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why these figures may say less of the server than they seem to; empty when there is no reason."""
        result = []
        late = self.figures.lateness.percentiles[2]
        if late > LATE_SECONDS:
            result.append(f"sent {late * 1000:.1f} ms late at P99")
        if self.report.cpu_share > BUSY_SHARE:
            result.append(f"the generator took {self.report.cpu_share:.0%} of its core")
        if self.figures.sent < FEW_REQUESTS:
            result.append(f"P99 of {self.figures.sent} requests is the slowest of them")
        if any(record.counted_by == "chunks" for record in self.report.records if record.ok):
            result.append("tokens counted by chunks: the server reports no usage")
        return tuple(result)


def measure(
    settings: RunSettings,
    seed: int,
    metrics_urls: Sequence[str] = (),
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> MeasuredWindow:
    """Runs the window that `seed` decides."""
    job = make_job(settings, seed)
    with QueueSampler(metrics_urls) as sampler:
        report = run_window(job, on_progress)
    return MeasuredWindow(
        settings=settings,
        seed=seed,
        report=report,
        figures=summarise(report.records, settings.slo, closed=bool(settings.concurrency)),
        drift=drift_of(report.records, settings.slo),
        verdict=judge(report.records, settings.slo),
        queues=tuple(sampler.samples),
    )


#: Gauges by the name they get in results and plots; of several sources the sum counts.
GAUGES = {
    "triptych_requests_in_flight": "in flight",
    "triptych_waiting_items": "items waiting for an encoder",
    "triptych_encoder_queue_items": "items waiting for the tower",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_running": "running",
}
_PERIOD = 1.0


@dataclass(frozen=True, slots=True)
class QueueSample:
    """`at`: Unix time."""

    at: float
    depths: dict[str, float]


def depths_of(pages: Sequence[str]) -> dict[str, float]:
    """The sums of known gauges over several /metrics pages."""
    result: dict[str, float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in GAUGES:
                    name = GAUGES[sample.name]
                    result[name] = result.get(name, 0.0) + sample.value
    return result


class QueueSampler:
    """Samples within a `with`. A page that cannot be read is left out: servers need have none."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[QueueSample] = []

    def __enter__(self) -> QueueSampler:
        if self._urls:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            at = time.time()
            depths = depths_of([page for url in self._urls if (page := _read(url)) is not None])
            if depths:
                self.samples.append(QueueSample(at, depths))
            self._stop.wait(max(_PERIOD - (time.time() - at), 0.05))


def _read(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as reply:
            return str(reply.read().decode())
    except (OSError, ValueError):
        return None
