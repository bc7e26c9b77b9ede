"""What people see: tables and sentences by rich, and lines of progress."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from triptych.base.progress import Progress
from triptych.base.types import JsonObject
from triptych_bench.goodput.load import job
from triptych_bench.goodput.measure.search import SearchResult
from triptych_bench.goodput.measure.window import MeasuredWindow
from triptych_bench.goodput.report.comparison import Ratio
from triptych_bench.goodput.report.machine import Machine

_EXPLANATION = """\
(a) requests per second that met every objective of the SLO    (b) their share of the requests sent
(c) whether the P99 of every objective is met, and TTFT does not grow; --search seeks the highest such rate
"""


def _ms(seconds: float) -> str:
    return "–" if not math.isfinite(seconds) else f"{seconds * 1000:,.1f}"


class Display:
    """Writes to the console; progress goes to standard error, so that tables can be piped."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        self._console.print(f"! {text}", style="yellow", markup=False, highlight=False)

    def table(self, table: Table) -> None:
        self._console.print(table)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[job.Progress], None]]:
        """Gives a callback for `run_window`."""
        with Progress(title, unit="requests") as window:
            window.advance(0, note="drawing pictures")
            known = 0

            def show(seen: job.Progress) -> None:
                nonlocal known
                note = f"{seen.sent - seen.done} in flight" + (f", {seen.failed} failed" * bool(seen.failed))
                window.advance(seen.done - known, total=seen.total, note=note)
                known = seen.done

            yield show

    def windows(self, windows: Sequence[MeasuredWindow]) -> None:
        self.say(_title(windows))
        counts = _table("", "load", "sent", "failed", "req/s", "good/s (a)", "attained (b)", "P99 in SLO (c)")
        latencies = _table("ms: P50, P90, P99", "load", *(["TTFT", "", "", "TPOT", "", "", "E2E", "", ""]))
        for window in windows:
            counts.add_row(*_counts(window))
            latencies.add_row(*_latencies(window))
        self.table(counts)
        self.say(_EXPLANATION)
        self.table(latencies)
        for window in windows:
            if window.verdict.why:
                self.say(f"{window.settings.label} not sustained: {window.verdict.why}")
            errors = (record.error for record in window.report.records if not record.warm_up)
            for reason, count in Counter(filter(None, errors)).most_common(3):
                self.warn(f"{window.settings.label}: {count} failed: {reason}")
            for doubt in window.doubts:
                self.warn(f"{window.settings.label}: {doubt}")

    def search(self, result: SearchResult) -> None:
        if not result.rate:
            self.say(f"Highest sustained rate (c): none; not even {result.failing:.3g} requests/s")
        elif math.isinf(result.failing):
            self.say(f"Highest sustained rate (c): at least {result.rate:.3g} requests/s, the highest tried")
        else:
            self.say(
                f"Highest sustained rate (c): {result.rate:.3g} requests/s "
                f"({result.votes[0]} of {result.votes[1]} windows; {result.failing:.3g} is too much)"
            )
        if result.drifted:
            self.warn(f"at the end the first sustained rate took {result.drift:.2f} times its time")

    def machine(self, machine: Machine) -> None:
        self.say(
            f"{machine.chip}, {machine.cores} cores; commit {machine.commit or 'unknown'}; "
            f"load {machine.load_before:g} before, {machine.load_after:g} after"
        )
        if machine.loaded:
            self.warn("this machine was loaded before the run began: no figure here is a performance claim")

    def ratios(self, title: str, ratios: Sequence[Ratio], names: tuple[str, str]) -> None:
        table = _table(title, "metric", *names, f"{names[1]} / {names[0]}", "range", "windows", "")
        for one in ratios:
            table.add_row(
                one.metric,
                f"{one.a:,.3f}",
                f"{one.b:,.3f}",
                f"{one.ratio:.3f}",
                f"{one.low:.3f} – {one.high:.3f}",
                f"{one.windows[0]}, {one.windows[1]}",
                one.reading,
            )
        self.table(table)


def _title(windows: Sequence[MeasuredWindow]) -> str:
    settings = windows[0].settings
    slo = str(settings.slo) or "no SLO"
    return f"{settings.workload_name} on {settings.target.model} at {settings.target.url}, {slo}"


def _table(title: str, first: str, *names: str) -> Table:
    table = Table(title=title or None, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column(first)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _latencies(window: MeasuredWindow) -> list[str]:
    spreads = window.figures.spreads
    ranks = [_ms(value) for name in ("ttft", "tpot", "e2el") for value in spreads[name].percentiles]
    return [window.settings.label, *ranks]


def _counts(window: MeasuredWindow) -> tuple[str, ...]:
    figures = window.figures
    return (
        window.settings.label,
        str(figures.sent),
        str(figures.failed),
        f"{figures.throughput:.2f}",
        f"{figures.goodput:.2f}",
        f"{figures.attainment:.1%}",
        "yes" if window.verdict.sustained else "no",
    )


def summary_of(result: JsonObject) -> str:
    """One line of what a result file holds."""
    machine = result["machine"]
    return (
        f"{result['name'] or result['target']['url']}: {result['workload']['name']}, "
        f"{len(result['windows'])} windows, {result['date']}, commit {machine['commit'] or 'unknown'}"
    )
