"""One measured window: load, figures, verdict, and the time line of the server's queues."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from triptych.goodput.load.job import Progress, WindowReport
from triptych.goodput.load.processes import run_window
from triptych.goodput.measure.figures import Drift, WindowFigures, drift_of, judge, summarise
from triptych.goodput.measure.search import Verdict
from triptych.goodput.measure.settings import RunSettings, make_job

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
        found = []
        late = self.figures.lateness.percentiles[2]
        if late > LATE_SECONDS:
            found.append(f"sent {late * 1000:.1f} ms late at P99")
        if self.report.cpu_share > BUSY_SHARE:
            found.append(f"the generator took {self.report.cpu_share:.0%} of its core")
        if self.figures.sent < FEW_REQUESTS:
            found.append(f"P99 of {self.figures.sent} requests is the slowest of them")
        if any(record.counted_by == "chunks" for record in self.report.records if record.ok):
            found.append("tokens counted by chunks: the server reports no usage")
        return tuple(found)


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
        figures=summarise(report.records, settings.slo),
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
    found: dict[str, float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in GAUGES:
                    name = GAUGES[sample.name]
                    found[name] = found.get(name, 0.0) + sample.value
    return found


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
