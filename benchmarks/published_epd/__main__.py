"""The published comparison of 1E3PD with four replicas, simulated next to its own figures.

    python -m benchmarks published_epd --write

vLLM's report of its encoder disaggregation (blog.vllm.ai, 15 December 2025): four A100 80GB,
Qwen3-VL-4B-Instruct, 400 (short) or 2000 (long) tokens of text, 1 to 4 pictures of 640x640, 150 tokens out;
sustained requests per second with P99 TTFT within 20 s and P99 TPOT within 100 ms, swept from 4 to 24.

The roofline of `published` does not explain its baseline: by FLOPs, four A100 could encode hundreds of such
pictures per second, and the report has 23 or 24 with short texts, alone or four to a request. What fits is a
front door that tokenises and preprocesses for all replicas, at a cost per picture and per token of text.
In 1E3PD the encoder has a front door of its own. That it is the door is our reading, not the report's.

Three constants are fitted, each to figures named beside it; all other figures test the simulator. The same
loads are simulated with the cost models that `triptych plan --gpu a100` has, without a front door.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from benchmarks.published_epd.latencies import latency_rows
from benchmarks.published_epd.systems import (
    FIGURES,
    SYSTEMS,
    WARM_UP,
    Figure,
    PublishedSystem,
    systems,
    window,
)
from benchmarks.result_page import RESULTS, fill, page_parser, publish
from triptych.base.progress import Progress
from triptych.goodput.measure.figures import MAX_POINTS
from triptych.goodput.measure.search import SearchLimits, Verdict, search
from triptych.goodput.measure.slo import preset
from triptych.simulator.plan.trials import Doomed, verdict_of
from triptych.simulator.run import NOT_MODELLED

RESULT = RESULTS / "published_epd.md"
#: Seconds of a window that are measured.
SECONDS = 30.0
#: The published sweep ends at 24 requests per second; a search looks a little further.
LOWEST, HIGHEST = 1.0, 28.0


def sustained(
    system: PublishedSystem, figure: Figure, seconds: float, say: Callable[[str], None]
) -> tuple[float, float, str]:
    """The highest rate, the lowest that was too much, and why that was."""
    chosen = preset(f"{figure.text}-{figure.images}")
    stated = figure.stated[SYSTEMS.index(system.name.partition(",")[0])]
    reasons: dict[float, str] = {}

    def measure(rate: float) -> Verdict:
        doomed = Doomed(chosen.slo, math.ceil(rate * seconds))
        records = window(system, chosen.workload, rate, seconds, doomed)
        verdict = verdict_of(records, chosen.slo, MAX_POINTS)
        reasons[rate] = verdict.why
        return verdict

    limits = SearchLimits(
        start=min(stated or 8.0, 24.0),
        lowest=LOWEST,
        highest=HIGHEST,
        resolution=0.05,
        windows=1,
        confirmations=0,
        step=1.15,
    )
    result = search(measure, limits)
    say(f"{figure.text}-{figure.images}, {system.name}: {result.rate:.1f}, {len(result.trials)} windows")
    return result.rate, result.failing, reasons.get(result.failing, "")


Cells = dict[tuple[str, int, str], tuple[float, float, str]]


def shown(rate: float, failing: float) -> str:
    """A rate; a lower bound where the highest of the search was sustained."""
    return f"≥ {rate:.0f}" if math.isinf(failing) else f"{rate:.1f}"


def rows(cells: Cells) -> list[str]:
    """Of the table: simulated next to published, and the ratios of both."""
    lines = []
    for figure in FIGURES:
        load = f"{figure.text}, {figure.images}"
        stated = figure.stated
        words, result = [load], []
        for name, value in zip(SYSTEMS, stated, strict=True):
            rate, failing, _ = cells[figure.text, figure.images, name]
            mark = "*" if name in figure.fitted else ""
            words += [f"{value:g}" if value else "–", f"**{shown(rate, failing)}**{mark}"]
            result.append(rate)
        ratio = f"{stated[1] / stated[0]:.2f}" if stated[0] and stated[1] else "–"
        words += [ratio, f"**{result[1] / result[0]:.2f}**" if result[0] else "–"]
        free = [cells[figure.text, figure.images, f"{name}, no door"] for name in SYSTEMS]
        words += [shown(rate, failing) for rate, failing, _ in free]
        lines.append(f"| {' | '.join(words)} |")
    return lines


def errors(cells: Cells) -> list[tuple[str, float]]:
    """(load and system, simulated over published − 1) of every figure that nothing was fitted to."""
    result = []
    for figure in FIGURES:
        for name, stated in zip(SYSTEMS, figure.stated, strict=True):
            if stated is not None and name not in figure.fitted:
                rate = cells[figure.text, figure.images, name][0]
                result.append((f"{figure.text}-{figure.images} {name}", rate / stated - 1))
    return result


def report(cells: Cells, latencies: str, seconds: float) -> str:
    off = errors(cells)
    worst = max(off, key=lambda one: abs(one[1]))
    ends = (
        f"- {text}-{images}, {name}: {why or 'nothing up to the end of the search'}"
        for (text, images, name), (_, _, why) in cells.items()
    )
    return fill(
        "published_epd",
        seconds=f"{seconds:g}",
        not_modelled=NOT_MODELLED,
        warm_up=f"{WARM_UP:g}",
        rows="\n".join(rows(cells)),
        count=len(off),
        within_15=sum(abs(error) <= 0.15 for _, error in off),
        within_30=sum(abs(error) <= 0.30 for _, error in off),
        worst=f"{worst[0]} ({worst[1]:+.0%})",
        latencies=latencies,
        ends="\n".join(ends),
    )


def main() -> None:
    parser = page_parser(__doc__, RESULT, seconds=SECONDS)
    options = parser.parse_args()
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g} must be above 0")
    cells: Cells = {}
    pairs = list(itertools.product(FIGURES, systems()))
    with Progress("cells", len(pairs)) as running:
        for figure, system in pairs:
            key = (figure.text, figure.images, system.name)
            cells[key] = sustained(
                system, figure, options.seconds, lambda line: running.advance(0, note=line)
            )
            running.advance()
    latencies = "\n".join(latency_rows(options.seconds))
    publish(report(cells, latencies, options.seconds), RESULT, write=options.write)
