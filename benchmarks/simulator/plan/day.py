"""A day with the scaling policy: encoder-seconds, goodput and dollars, beside static pools of encoders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.errors import ConfigError
from triptych.goodput.load.workload import PlannedRequest, Workload
from triptych.progress.progress import Progress, step
from triptych.simulator.autoscale.ours import WorkSeconds
from triptych.simulator.autoscale.scaler import FixedSize
from triptych.simulator.autoscale.traces import UTILIZATION, Phase, Trace, requests_of, trace, work_of
from triptych.simulator.autoscale.trial import TrialResult, TrialSetup, run_trial
from triptych.simulator.plan.estimate import estimate
from triptych.simulator.plan.question import Question

COLD_STARTS = (5.0, 60.0)
DAY_HOURS = 24.0
#: Requests that a trace may have: more would take many minutes.
MOST_REQUESTS = 30_000
#: Share of the requests that the best static pool must serve as well as the one for the peak.
ENOUGH = 0.99


@dataclass(frozen=True, slots=True)
class DayRow:
    """One pool of encoders through the day. `encoders` at most; `dollars` a day, None without a price."""

    name: str
    encoders: int
    worker_seconds: float
    good: int
    ttft: float
    failures: int
    dollars: float | None


@dataclass(frozen=True, slots=True)
class DayPlan:
    """`rows`: static pools for the peak and of the best size, then the policy with each cold start."""

    trace: Trace
    rate: float
    requests: int
    pd_workers: int
    rows: tuple[DayRow, ...]


def read_trace(name: str, workload: Workload) -> Trace:
    """A trace by its name, or a file of lines "seconds share", all with requests of one workload.

    A phase goes from its share of the peak to that of the next line; the last one stays at its own.
    """
    path = Path(name)
    if not path.is_file():
        known = trace(name)
        return Trace(name, tuple(replace(phase, workload=workload) for phase in known.phases))
    found: list[tuple[float, float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_phase(words, f"--trace {path}, line {number}"))
    if not any(share for _, share in found):
        raise ConfigError(f'--trace {path} has no load: write lines of "seconds share", like "3600 0.25"')
    ends = [share for _, share in found[1:]] + [found[-1][1]]
    phases = (Phase(seconds, share, end, workload) for (seconds, share), end in zip(found, ends, strict=True))
    return Trace(path.stem, tuple(phases))


def _phase(words: Sequence[str], where: str) -> tuple[float, float]:
    try:
        seconds, share = map(float, words)
    except ValueError:
        raise ConfigError(f'{where}: write "seconds share", like "3600 0.25"') from None
    if not (0 < seconds < math.inf and 0 <= share <= 1):
        raise ConfigError(f"{where}: seconds must be above 0, and the share of the peak between 0 and 1")
    return seconds, share


def day_of(question: Question, rate: float, name: str) -> DayPlan:
    """The trace with `rate` requests per second at its peak. ConfigError for what cannot be simulated."""
    if not rate:
        raise ConfigError("--trace needs --rate, the requests per second at the peak")
    if not question.slo.limits:
        raise ConfigError('--slo is empty: say what a good request keeps to, like "ttft:10000 tpot:100"')
    shown, load = read_trace(name, question.workload), question.workload
    setup, peak = _setup(question, rate), _peak(question, rate)
    # `requests_of` takes the peak in busy workers.
    workers = rate * work_of(load, setup.costs.encoder, setup.model) / UTILIZATION
    requests = rate * shown.seconds / shown.peak_to_mean
    if requests > MOST_REQUESTS:
        raise ConfigError(
            f"--trace {name} has {requests:.0f} requests at --rate {rate:g}, at most {MOST_REQUESTS} are "
            f"simulated: use a --rate of up to {rate * MOST_REQUESTS / requests:.3g}"
        )
    sent = requests_of(shown, setup.costs.encoder, setup.model, question.seed, workers)
    # The best static size is found by halves.
    with step("simulating", 1 + peak.bit_length() + len(COLD_STARTS), "days") as running:
        rows = list(_static(setup, sent, peak, running))
        for cold_start in COLD_STARTS:
            running.advance(0, note=f"the policy, cold start {cold_start:g} s")
            scaler = WorkSeconds(0, peak, cold_start)
            found = run_trial(setup, *sent, scaler, cold_start)
            running.advance()
            rows.append(_row(f"policy, cold start {cold_start:g} s", peak, found))
    priced = tuple(replace(row, dollars=_dollars(question, row, rows[0])) for row in rows)
    return DayPlan(shown, rate, len(sent[0]), setup.pd_workers, priced)


def _setup(question: Question, rate: float) -> TrialSetup:
    """The question's devices, with twice the PD workers that the peak needs: encoders are what is judged."""
    device = question.device
    pd_workers = math.ceil(2 * rate / estimate(question).pd_worker)
    costs = replace(device.costs, encoder=question.encoders_on.costs.encoder)
    return TrialSetup(costs, device.model, pd_workers, device.limits, question.slo)


def _peak(question: Question, rate: float) -> int:
    """Encoders that are 70 % busy at the peak."""
    seconds = work_of(question.workload, question.encoders_on.costs.encoder, question.device.model)
    if not seconds:
        raise ConfigError("--trace is about encoders, and this load has no pictures: give --images")
    return math.ceil(rate * seconds / UTILIZATION)


def _static(
    setup: TrialSetup,
    sent: tuple[list[PlannedRequest], list[float]],
    peak: int,
    running: Progress,
) -> Sequence[DayRow]:
    """The pool for the peak, and the smallest one that serves nearly as many requests well."""

    def serve(size: int) -> DayRow:
        running.advance(0, note=f"{size} static encoders")
        found = run_trial(setup, *sent, FixedSize(size), 0.0, size)
        running.advance()
        return _row(f"static, {size}", size, found)

    top = serve(peak)
    best, low = top, 1
    while low < best.encoders:
        middle = serve((low + best.encoders) // 2)
        if middle.good >= ENOUGH * top.good:
            best = middle
        else:
            low = middle.encoders + 1
    return replace(top, name="static peak"), replace(best, name="static, best size")


def _row(name: str, encoders: int, found: TrialResult) -> DayRow:
    return DayRow(name, encoders, found.worker_seconds, found.good, found.ttft, found.failures, dollars=None)


def _dollars(question: Question, row: DayRow, static: DayRow) -> float | None:
    """Of the encoders alone, for as many of them on average through 24 hours."""
    hour = question.encoders_on.hour
    if hour is None:
        return None
    return row.worker_seconds / static.worker_seconds * static.encoders * DAY_HOURS * hour
