"""The finished cells of one matrix, looked up for the report. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.goodput.report.comparison import Ratio, ratio
from triptych.types import JsonObject

Found = JsonObject
#: A share of failed requests above this leaves a comparison of latencies open: they are of completed ones.
FAILED_LIMIT = 0.01
#: Cores that processes outside of this run may use; above that a cell counts as measured on a loaded machine.
OTHERS_LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a cell; `of` gives None where the cell has none."""

    kind: str
    title: str
    more_is_better: bool
    of: Callable[[Found], float | None]
    latency: bool = False


def _window(field: str, scale: float = 1.0) -> Callable[[Found], float | None]:
    def of(cell: Found) -> float | None:
        value = cell["windows"][0].get(field)
        return None if value is None else value * scale

    return of


def _text_streams(field: str) -> Callable[[Found], float | None]:
    def of(cell: Found) -> float | None:
        value = cell["windows"][0].get("by_kind", {}).get("text", {}).get(field)
        return None if value is None else float(value)

    return of


def _searched(cell: Found) -> float | None:
    return float(cell["search"]["max_request_goodput"]) if cell["search"] else None


def metrics(tail: int) -> dict[str, Metric]:
    """By a short name; `tail` is the percentile."""
    return {
        "goodput": Metric("search", "goodput by search, req/s", True, _searched),
        "attainment": Metric("fixed", "attained, %", True, _window("slo_attainment", 100.0)),
        "ttft": Metric("fixed", f"P{tail} TTFT, ms", False, _window(f"p{tail}_ttft_ms"), True),
        "tpot": Metric("fixed", f"P{tail} TPOT, ms", False, _window(f"p{tail}_tpot_ms"), True),
        "text_tpot": Metric(
            "fixed", f"P{tail} TPOT of text streams, ms", False, _text_streams(f"p{tail}_tpot_ms"), True
        ),
        "capacity": Metric("capacity", "closed loop, req/s", True, _window("request_throughput")),
    }


class CellResults:
    """One plan and its cells. Loads and systems are in the plan's order."""

    def __init__(self, plan: Found, cells: Sequence[Found]) -> None:
        self.matrix: Found = plan["matrix"]
        self.planned: list[str] = list(plan["cells"])
        self.cells = list(cells)
        self.metrics = metrics(self.matrix["tail"])
        self.systems: dict[str, Found] = {system["name"]: system for system in self.matrix["system"]}
        self.loads: list[str] = list(self.matrix["loads"])

    def role(self, name: str) -> str:
        """The system that is `ours`, `colocated` or `other`."""
        return str(self.matrix["roles"][name])

    def by_repeat(self, kind: str, load: str, system: str) -> dict[int, Found]:
        """The measured cells."""
        return {
            found["cell"]["repeat"]: found
            for found in self.cells
            if found["status"] == "done"
            and (found["cell"]["kind"], found["cell"]["load"], found["cell"]["system"])
            == (kind, load, system)
        }

    def values(self, name: str, load: str, system: str) -> dict[int, float]:
        """A metric by repeat."""
        metric = self.metrics[name]
        found = {
            repeat: metric.of(cell) for repeat, cell in self.by_repeat(metric.kind, load, system).items()
        }
        return {repeat: value for repeat, value in found.items() if value is not None}

    def ratio(self, name: str, load: str, a: str, b: str) -> Ratio | None:
        """B over A, repeat by repeat where both were measured; None without one such repeat."""
        first, second = self.values(name, load, a), self.values(name, load, b)
        both = sorted(first.keys() & second.keys())
        if not both:
            return None
        metric = self.metrics[name]
        sides = [[values[repeat] for repeat in both] for values in (first, second)]
        return ratio(name, sides[0], sides[1], paired=True, more_is_better=metric.more_is_better)

    def reading(self, name: str, load: str, a: str, b: str) -> str:
        """ "better", "worse", "open" of B against A; "not measured"."""
        found = self.ratio(name, load, a, b)
        if found is None:
            return "not measured"
        if (
            self.metrics[name].latency
            and max(self.failed_share(load, a), self.failed_share(load, b)) > FAILED_LIMIT
        ):
            return "open: requests failed"
        return found.reading

    def failed_share(self, load: str, system: str) -> float:
        """Over all fixed windows of a system on a load."""
        windows = [cell["windows"][0] for cell in self.by_repeat("fixed", load, system).values()]
        sent = sum(window["num_prompts"] for window in windows)
        return sum(window["failed"] for window in windows) / sent if sent else 0.0

    def measured_loads(self, kind: str) -> list[str]:
        return [load for load in self.loads if self.measured_systems(kind, load)]

    def measured_systems(self, kind: str, load: str) -> list[str]:
        return [name for name in self.systems if self.by_repeat(kind, load, name)]

    def plans(self, kind: str, load: str, system: str) -> bool:
        return any(name.startswith(f"{kind}.{load}.{system}.") for name in self.planned)

    def missing(self) -> list[str]:
        """Planned cells that are not measured yet."""
        there = {cell_name(found) for found in self.cells}
        return [name for name in self.planned if name not in there]

    def failed(self) -> list[Found]:
        return [found for found in self.cells if found["status"] == "failed"]

    def loaded(self) -> list[Found]:
        """Cells during which processes outside of the run used the machine."""
        return [
            found
            for found in self.cells
            if found["status"] == "done" and found["others_share"] > OTHERS_LIMIT
        ]

    def unlike_requests(self) -> list[str]:
        """Fixed cells whose requests had other lengths, by the servers' own count, than those of `ours`."""
        found = []
        for load in self.loads:
            mine = self.by_repeat("fixed", load, self.role("ours"))
            for system in self.measured_systems("fixed", load):
                for repeat, cell in self.by_repeat("fixed", load, system).items():
                    if repeat in mine and not _alike(mine[repeat], cell):
                        found.append(cell_name(cell))
        return found


def _alike(one: Found, other: Found) -> bool:
    """Mean prompt length of completed requests within 1 %."""
    means = []
    for cell in (one, other):
        lengths = [length for length in cell["windows"][0].get("input_lens", ()) if length]
        means.append(statistics.fmean(lengths) if lengths else 0.0)
    return abs(means[0] - means[1]) <= 0.01 * max(means)


def cell_name(found: Found) -> str:
    cell = found["cell"]
    return f"{cell['kind']}.{cell['load']}.{cell['system']}.{cell['repeat']}"
