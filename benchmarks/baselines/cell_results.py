"""The finished cells of one matrix for the report: figures, comparisons, targets, stages. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.base.types import JsonObject
from triptych_bench.goodput.load.client import STAGES
from triptych_bench.goodput.measure.figures import percentile
from triptych_bench.goodput.report.comparison import Ratio, ratio

#: A share of failed requests above this leaves a comparison of latencies open: they are of completed ones.
FAILED_LIMIT = 0.01
#: Cores that processes outside of this run may use; above that a cell counts as measured on a loaded machine.
OTHERS_LIMIT = 0.05
#: The system that is compared, and those with which it is.
OURS, OTHERS = "epd-shared", ("colocated", "vllm")
#: What the ratio of ours over another system's is to be: at least, or at most where less is better.
TARGETS = {
    ("reuse-50", "goodput", "vllm"): 2.0,
    ("mix", "text_tpot", "colocated"): 0.5,
    ("images-4", "goodput", "colocated"): 1.3,
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a cell; `of` gives None where the cell has none."""

    kind: str
    title: str
    more_is_better: bool
    of: Callable[[JsonObject], float | None]


def _window(field: str, scale: float = 1.0, *, streams: str = "") -> Callable[[JsonObject], float | None]:
    """A field of the first window; of one kind of its requests where `streams` names it."""

    def of(cell: JsonObject) -> float | None:
        window = cell["windows"][0]
        value = (window["by_kind"].get(streams, {}) if streams else window).get(field)
        return None if value is None else value * scale

    return of


def metrics(tail: int) -> dict[str, Metric]:
    """By a short name; `tail` is the percentile."""
    tpot = f"p{tail}_tpot_ms"
    return {
        "goodput": Metric(
            "search", "goodput by search, req/s", True, lambda cell: cell["search"]["max_request_goodput"]
        ),
        "good": Metric("fixed", "goodput at the rate, req/s", True, _window("request_goodput")),
        "attainment": Metric("fixed", "attained, %", True, _window("slo_attainment", 100.0)),
        "ttft": Metric("fixed", f"P{tail} TTFT, ms", False, _window(f"p{tail}_ttft_ms")),
        "tpot": Metric("fixed", f"P{tail} TPOT, ms", False, _window(tpot)),
        "text_tpot": Metric(
            "fixed", f"P{tail} TPOT of text streams, ms", False, _window(tpot, streams="text")
        ),
        "capacity": Metric("capacity", "closed loop, req/s", True, _window("request_throughput")),
    }


class CellResults:
    """One plan and its cells. Loads and systems are in the plan's order."""

    def __init__(self, plan: JsonObject, cells: Sequence[JsonObject]) -> None:
        self.matrix: JsonObject = plan["matrix"]
        self.planned: list[str] = list(plan["cells"])
        self.cells = list(cells)
        self.metrics = metrics(self.matrix["tail"])
        self.systems: dict[str, JsonObject] = {system["name"]: system for system in self.matrix["system"]}
        self.loads: list[str] = list(self.matrix["loads"])

    def by_repeat(self, kind: str, load: str, system: str) -> dict[int, JsonObject]:
        """The measured cells."""
        wanted = {"kind": kind, "load": load, "system": system}
        return {
            result["cell"]["repeat"]: result
            for result in self.cells
            if result["status"] == "done" and result["cell"].items() >= wanted.items()
        }

    def values(self, name: str, load: str, system: str) -> dict[int, float]:
        """A metric by repeat."""
        metric = self.metrics[name]
        result = {
            repeat: metric.of(cell) for repeat, cell in self.by_repeat(metric.kind, load, system).items()
        }
        return {repeat: value for repeat, value in result.items() if value is not None}

    def ratio(self, name: str, load: str, a: str, b: str) -> Ratio | None:
        """B over A, repeat by repeat where both were measured; None without one such repeat."""
        first, second = self.values(name, load, a), self.values(name, load, b)
        both = sorted(first.keys() & second.keys())
        if not both:
            return None
        sides = [[values[repeat] for repeat in both] for values in (first, second)]
        return ratio(name, *sides, paired=True, more_is_better=self.metrics[name].more_is_better)

    def failed_share(self, load: str, system: str) -> float:
        """Over all fixed windows of a system on a load."""
        windows = [cell["windows"][0] for cell in self.by_repeat("fixed", load, system).values()]
        sent = sum(window["num_prompts"] for window in windows)
        return sum(window["failed"] for window in windows) / sent if sent else 0.0

    def measured_loads(self, kind: str) -> list[str]:
        return [load for load in self.loads if self.measured_systems(kind, load)]

    def measured_systems(self, kind: str, load: str) -> list[str]:
        return [name for name in self.systems if self.by_repeat(kind, load, name)]

    def missing(self) -> list[str]:
        """Planned cells that are not measured yet."""
        there = {cell_name(result) for result in self.cells}
        return [name for name in self.planned if name not in there]

    def failed(self) -> list[JsonObject]:
        return [result for result in self.cells if result["status"] == "failed"]

    def loaded(self) -> list[JsonObject]:
        """Cells during which processes outside of the run used the machine."""
        return [
            result
            for result in self.cells
            if result["status"] == "done" and result["others_share"] > OTHERS_LIMIT
        ]

    def unlike_requests(self) -> list[str]:
        """Fixed cells whose requests had other lengths, by the servers' own count, than those of ours."""
        result = []
        for load in self.loads:
            mine = self.by_repeat("fixed", load, OURS)
            for system in self.measured_systems("fixed", load):
                for repeat, cell in self.by_repeat("fixed", load, system).items():
                    if repeat in mine and not _alike(mine[repeat], cell):
                        result.append(cell_name(cell))
        return result


def _alike(one: JsonObject, other: JsonObject) -> bool:
    """Mean prompt length of completed requests within 1 %."""
    windows = (one["windows"][0], other["windows"][0])
    means = [window["total_input_tokens"] / window["completed"] for window in windows]
    return bool(abs(means[0] - means[1]) <= 0.01 * max(means))


def cell_name(result: JsonObject) -> str:
    return "{kind}.{load}.{system}.{repeat}".format(**result["cell"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of ours over that of the system `against`. `reading`: better, worse or open, and why.

    `target`: what the ratio is to be, and whether it is; empty where it has none.
    """

    load: str
    metric: Metric
    against: str
    ratio: Ratio
    reading: str
    target: str


def comparisons(results: CellResults) -> list[Comparison]:
    """Of ours with the other two, on every load and figure that both have."""
    result = []
    for load in results.loads:
        for name, metric in results.metrics.items():
            for against in OTHERS:
                one = results.ratio(name, load, against, OURS)
                if one is None:
                    continue
                failed = max(results.failed_share(load, against), results.failed_share(load, OURS))
                # Latencies are of completed requests.
                open_ = failed > FAILED_LIMIT and not metric.more_is_better
                reading = "open: requests failed" if open_ else one.reading
                target = _judged(one, TARGETS.get((load, name, against)))
                result.append(Comparison(load, metric, against, one, reading, target))
    return result


def _judged(result: Ratio, need: float | None) -> str:
    """By the ratio of the medians; a system that sustained no rate at all cannot be compared with."""
    if need is None:
        return ""
    sign = "≥" if result.more_is_better else "≤"
    if math.isnan(result.ratio):
        return f"{sign} {need:g}: no rate to compare with"
    met = result.ratio >= need if result.more_is_better else result.ratio <= need
    return f"{sign} {need:g}: " + ("met" if met else f"**missed** by {abs(result.ratio / need - 1):.0%}")


def stage_times(results: CellResults, load: str, system: str) -> dict[str, tuple[float, float]]:
    """(median, tail) in seconds by stage that the server reports: of completed requests, over all repeats at
    the fixed rate.
    """
    result: dict[str, list[float]] = {}
    for cell in results.by_repeat("fixed", load, system).values():
        window = cell["windows"][0]
        for stages, error in zip(window["stages"], window["errors"], strict=True):
            for stage, seconds in stages.items() if not error else ():
                result.setdefault(stage, []).append(seconds)
    return {
        stage: (statistics.median(result[stage]), percentile(result[stage], results.matrix["tail"]))
        for stage in STAGES
        if stage in result
    }


def cores_used(results: CellResults, load: str, system: str) -> tuple[float, dict[str, float]]:
    """CPU seconds per second at the fixed rate, medians of the repeats: of all processes, and by name of the
    three that take most.
    """
    cells = [cell["cpu_shares"] for cell in results.by_repeat("fixed", load, system).values()]
    names = {name for shares in cells for name in shares}
    medians = {name: statistics.median(s[name] for s in cells if name in s) for name in names}
    busiest = sorted(medians, key=lambda name: medians[name], reverse=True)[:3]
    total = statistics.median(sum(shares.values()) for shares in cells)
    return total, {name: medians[name] for name in busiest if medians[name] >= 0.005}
