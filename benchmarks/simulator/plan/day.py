"""A day with the scaling policy: encoder-seconds, goodput and dollars, beside static pools of encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from triptych.base.errors import ConfigError
from triptych.base.progress.progress import Progress, step
from triptych.goodput.load.workload import Workload
from triptych.simulator.autoscale.pool import TrialResult, TrialSetup, run_trial
from triptych.simulator.autoscale.scaler import FixedSize, Scaler, WorkSeconds
from triptych.simulator.autoscale.traces import UTILIZATION, Phase, Sent, Trace, requests_of, trace, work_of
from triptych.simulator.plan.estimate import estimate
from triptych.simulator.plan.question import Question
from triptych.simulator.plan.tables import Row, money, table
from triptych.simulator.run import NOT_MODELLED

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
    dollars: float | None = None


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
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    split = [(number, line.partition("#")[0].split()) for number, line in lines]
    read = [_phase(words, f"--trace {path}, line {number}") for number, words in split if words]
    if not any(share for _, share in read):
        raise ConfigError(f'--trace {path} has no load: write lines of "seconds share", like "3600 0.25"')
    ends = [share for _, share in read[1:]] + [read[-1][1]]
    phases = (Phase(seconds, share, end, workload) for (seconds, share), end in zip(read, ends, strict=True))
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
    shown, device = read_trace(name, question.workload), question.device
    # Twice the PD workers that the peak needs: encoders are what is judged.
    pd_workers = math.ceil(2 * rate / estimate(question).pd_worker)
    costs = replace(device.costs, encoder=question.encoders_on.costs.encoder)
    setup = TrialSetup(costs, device.model, pd_workers, device.limits, question.slo)
    # Encoders that are 70 % busy at the peak, which is how `requests_of` takes it.
    workers = rate * work_of(question.workload, costs.encoder, device.model) / UTILIZATION
    if not workers:
        raise ConfigError("--trace is about encoders, and this load has no pictures: give --images")
    requests = rate * shown.seconds / shown.peak_to_mean
    if requests > MOST_REQUESTS:
        raise ConfigError(
            f"--trace {name} has {requests:.0f} requests at --rate {rate:g}, at most {MOST_REQUESTS} are "
            f"simulated: use a --rate of up to {rate * MOST_REQUESTS / requests:.3g}"
        )
    sent = requests_of(shown, costs.encoder, device.model, question.seed, workers)
    rows = _rows(setup, sent, math.ceil(workers))
    priced = tuple(replace(row, dollars=_dollars(question, row, rows[0])) for row in rows)
    return DayPlan(shown, rate, len(sent[0]), pd_workers, priced)


def _rows(setup: TrialSetup, sent: Sent, peak: int) -> list[DayRow]:
    """The pool for the peak; the smallest that serves nearly as many requests well, by halves; the policy."""
    with step("simulating", 1 + peak.bit_length() + len(COLD_STARTS), "days") as running:
        top = best = _serve(setup, sent, "static peak", FixedSize(peak), peak, running, initial=peak)
        low = 1
        while low < best.encoders:
            size = (low + best.encoders) // 2
            middle = _serve(setup, sent, "static, best size", FixedSize(size), size, running, initial=size)
            if middle.good >= ENOUGH * top.good:
                best = middle
            else:
                low = middle.encoders + 1
        rows = [top, replace(best, name="static, best size")]
        for cold_start in COLD_STARTS:
            name, scaler = f"policy, cold start {cold_start:g} s", WorkSeconds(0, peak, cold_start)
            rows.append(_serve(setup, sent, name, scaler, peak, running, cold_start=cold_start))
    return rows


def _serve(
    setup: TrialSetup,
    sent: Sent,
    name: str,
    scaler: Scaler,
    encoders: int,
    running: Progress,
    *,
    cold_start: float = 0.0,
    initial: int = 1,
) -> DayRow:
    running.advance(0, note=f"{name}, {encoders} encoders")
    found: TrialResult = run_trial(setup, *sent, scaler, cold_start, initial)
    running.advance()
    return DayRow(name, encoders, found.worker_seconds, found.good, found.ttft, found.failures)


def _dollars(question: Question, row: DayRow, static: DayRow) -> float | None:
    """Of the encoders alone, for as many of them on average through 24 hours."""
    hour = question.encoders_on.hour
    if hour is None:
        return None
    return row.worker_seconds / static.worker_seconds * static.encoders * DAY_HOURS * hour


def show_day(day: DayPlan, question: Question, console: Console) -> None:
    """One row for each pool: encoders at most, encoder-seconds, shares of static peak's, TTFT, dollars."""
    shown = day.trace
    head = (
        f"{shown.name}: {shown.seconds:.0f} s as a day, {day.requests} requests of "
        f"{question.workload_name}, {day.rate:g} requests/s at the peak, {shown.peak_to_mean:.1f} "
        f"times the mean; {question.slo}\nencoders: {question.encoders_on.name}"
    )
    columns = ("pool", "most", "seconds", "share", "goodput", "P99 s", "failed", "a day")
    console.print(Text(head), table("Encoders through the day", columns, _cells(day), narrow=True), sep="\n")
    if day.rows[0].encoders == 1:
        console.print("One encoder is enough for the peak: only idle hours can be saved.", highlight=False)
    console.print(Text(f"not modelled: {NOT_MODELLED}"))


def _cells(day: DayPlan) -> Iterator[Row]:
    static = day.rows[0]
    for row in day.rows:
        seconds = f"{row.worker_seconds:,.0f}", f"{row.worker_seconds / static.worker_seconds:.0%}"
        good = f"{row.good / static.good:.2%}" if static.good else "–"
        rest = f"{row.ttft:.2f}", str(row.failures), money(row.dollars)
        yield (row.name, str(row.encoders), *seconds, good, *rest), ""
