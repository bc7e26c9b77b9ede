"""Tail latencies and output of both published systems at equal rates: what the report has besides goodput."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.published_epd.systems import FIGURES, Figure, PublishedSystem, systems, window
from triptych.base.progress import each
from triptych.goodput.measure.figures import summarise
from triptych.goodput.measure.slo import preset

#: Requests per second, within the published sweep from 4 to 24.
RATES = (4.0, 8.0, 12.0, 14.0, 18.0, 24.0)


@dataclass(frozen=True, slots=True)
class Latencies:
    """One whole window: P99 in seconds, output tokens per second, and whether both P99 are within limits."""

    ttft: float
    tpot: float
    output: float
    sustained: bool


def measure(system: PublishedSystem, figure: Figure, rate: float, seconds: float) -> Latencies:
    chosen = preset(f"{figure.text}-{figure.images}")
    result = summarise(window(system, chosen.workload, rate, seconds), chosen.slo)
    ttft, tpot = result.tails["ttft"], result.tails["tpot"]
    within = ttft <= chosen.slo.seconds("ttft") and tpot <= chosen.slo.seconds("tpot")
    return Latencies(ttft, tpot, result.output_tokens / result.duration, within)


def latency_rows(seconds: float) -> Iterator[str]:
    """A row of the table for each load and rate: replicas, 1E3PD, their ratio; bold where P99 miss, infinite
    where more than 1 % time out.
    """
    baseline, disaggregated = systems()[:2]
    for figure, rate in each("latencies", list(itertools.product(FIGURES, RATES)), "rates"):
        ours, theirs = (measure(system, figure, rate, seconds) for system in (disaggregated, baseline))
        words = [f"{figure.text}, {figure.images}", f"{rate:g}", *_cells(theirs), *_cells(ours)]
        ratios = (ours.ttft / theirs.ttft, ours.tpot / theirs.tpot, ours.output / theirs.output)
        yield f"| {' | '.join([*words, *(f'{x:.2f}' if x else '–' for x in ratios)])} |"


def _cells(result: Latencies) -> tuple[str, str, str]:
    mark = "" if result.sustained else "**"
    ttft, tpot = f"{result.ttft:,.2f}", f"{result.tpot * 1000:,.0f}"
    return f"{mark}{ttft}{mark}", f"{mark}{tpot}{mark}", f"{result.output:,.0f}"
