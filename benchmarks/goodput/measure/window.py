"""One measured window: load, figures, verdict, queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.goodput.load.job import Progress, WindowReport
from triptych.goodput.load.processes import run_window
from triptych.goodput.measure.figures import WindowFigures, summarise
from triptych.goodput.measure.queues import QueueSample, QueueSampler
from triptych.goodput.measure.search import Verdict
from triptych.goodput.measure.settings import RunSettings, make_job
from triptych.goodput.measure.sustained import Drift, drift_of, judge

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
