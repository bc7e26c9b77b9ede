"""The finished cells of one matrix for the report: figures, verdicts, the stage a loss comes from. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from triptych.base.types import JsonObject
from triptych.goodput.load.client import STAGES
from triptych.goodput.measure.figures import percentile
from triptych.goodput.report.comparison import Ratio, ratio

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
        "good": Metric("fixed", "goodput at the rate, req/s", True, _window("request_goodput")),
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


#: What a first token waits for; `decode` is what follows.
BEFORE_FIRST_TOKEN = tuple(stage for stage in STAGES if stage != "decode")


@dataclass(frozen=True, slots=True)
class RatioTarget:
    """A ratio of `ours` over the system in the role `against`; `{tail}` in the title is the matrix's.

    At least `need`; at most, where less is better.
    """

    title: str
    metric: str
    load: str
    against: str
    need: float


TARGETS = (
    RatioTarget("goodput with half of the pictures seen before", "goodput", "reuse-50", "other", 2.0),
    RatioTarget("P{tail} TPOT of text streams in the mix", "text_tpot", "mix", "colocated", 0.5),
    RatioTarget("goodput with 4 pictures", "goodput", "images-4", "colocated", 1.5),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`state`: met, missed, not measured. `by` is the distance in words."""

    state: str
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    by: str = ""


def judge_target(results: CellResults, target: RatioTarget) -> Outcome:
    """By the ratio of the medians; the range of single repeats stands beside it."""
    a, b = results.role(target.against), results.role("ours")
    metric = results.metrics[target.metric]
    found = results.ratio(target.metric, target.load, a, b)
    if found is None:
        return Outcome("not measured")
    if math.isnan(found.ratio):
        return Outcome("not measured", by=f"{a} sustained no rate at all; {b} {found.b:.3g}/s")
    met = found.ratio >= target.need if metric.more_is_better else found.ratio <= target.need
    distance = found.ratio / target.need - 1
    side = "above" if distance >= 0 else "below"
    by = f"{abs(distance):.0%} {side} {target.need:g}"
    return Outcome("met" if met else "missed", found.ratio, found.low, found.high, by)


def planned_targets(results: CellResults) -> list[RatioTarget]:
    """Those whose cells, both sides, are in the plan."""
    return [
        target
        for target in TARGETS
        if all(
            results.plans(results.metrics[target.metric].kind, target.load, results.role(role))
            for role in ("ours", target.against)
        )
    ]


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison of `ours` with another system."""

    load: str
    metric: str
    against: str
    ratio: float
    low: float
    high: float
    reading: str


def comparisons(results: CellResults) -> list[Line]:
    """Of ours with the two other roles, on every load and figure that both have."""
    ours, found = results.role("ours"), []
    for load in results.loads:
        for name in results.metrics:
            for against in (results.role("colocated"), results.role("other")):
                one = results.ratio(name, load, against, ours)
                if one is not None and against != ours:
                    reading = results.reading(name, load, against, ours)
                    found.append(Line(load, name, against, one.ratio, one.low, one.high, reading))
    return found


def stage_table(results: CellResults, load: str, system: str) -> dict[str, tuple[float, float]]:
    """(median, tail) in seconds by stage that the server reports: of completed requests, over all repeats at
    the fixed rate.
    """
    found: dict[str, list[float]] = {}
    for cell in results.by_repeat("fixed", load, system).values():
        window = cell["windows"][0]
        for stages, error in zip(window["stages"], window["errors"], strict=True):
            for stage, seconds in stages.items() if not error else ():
                found.setdefault(stage, []).append(seconds)
    return {
        stage: (statistics.median(found[stage]), percentile(found[stage], results.matrix["tail"]))
        for stage in STAGES
        if stage in found
    }


def explain_loss(results: CellResults, load: str, metric: str, against: str) -> str:
    """In words: which stage of ours a loss comes from, by its stage times. Empty without any."""
    mine = stage_table(results, load, results.role("ours"))
    if not mine:
        return ""
    if metric in ("tpot", "text_tpot", "capacity"):
        return _explain_decode(results, load, mine, stage_table(results, load, against), against)
    stages = [stage for stage in BEFORE_FIRST_TOKEN if stage in mine]
    theirs = stage_table(results, load, against)
    if not stages:
        return ""
    # Against a server without timings, the longest stage; else the one that is longer by most.
    worst = max(stages, key=lambda stage: mine[stage][1] - theirs.get(stage, (0.0, 0.0))[1])
    tail = results.matrix["tail"]
    beside = f", {theirs[worst][1] * 1000:.0f} ms there" if worst in theirs else ""
    return f"{worst}: P{tail} {mine[worst][1] * 1000:.0f} ms{beside}"


def _explain_decode(
    results: CellResults,
    load: str,
    mine: Mapping[str, tuple[float, float]],
    theirs: Mapping[str, tuple[float, float]],
    against: str,
) -> str:
    if "decode" not in mine:
        return ""
    beside = f", {theirs['decode'][0] * 1000:.0f} ms there" if "decode" in theirs else ""
    cores = [cores_used(results, load, name) for name in (results.role("ours"), against)]
    used = f"cores used {cores[0]:.2f}, {cores[1]:.2f} there"
    return f"decode: median {mine['decode'][0] * 1000:.0f} ms{beside}; {used}"


def cores_used(results: CellResults, load: str, system: str) -> float:
    """CPU seconds per second of all its processes at the fixed rate, median of the repeats."""
    sums = [sum(cell["cpu_shares"].values()) for cell in results.by_repeat("fixed", load, system).values()]
    return statistics.median(sums) if sums else math.nan


def busiest(results: CellResults, load: str, system: str, count: int = 3) -> list[tuple[str, float]]:
    """The processes that take most, by median share of a core over the repeats."""
    shares: dict[str, list[float]] = {}
    for cell in results.by_repeat("fixed", load, system).values():
        for name, share in cell["cpu_shares"].items():
            shares.setdefault(name, []).append(share)
    ranked = sorted(
        ((name, statistics.median(found)) for name, found in shares.items()), key=lambda one: -one[1]
    )
    return [(name, share) for name, share in ranked[:count] if share >= 0.005]


def best_setting(results: CellResults, load: str) -> tuple[str, float] | None:
    """The best of colocated's settings in the closed loop, and the baseline's share of it."""
    base = results.role("colocated")
    names = [base, *(name for name, system in results.systems.items() if system["variant_of"] == base)]
    middles = {
        name: statistics.median(values.values())
        for name in names
        if (values := results.values("capacity", load, name))
    }
    if base not in middles or len(middles) < 2:
        return None
    best = max(middles, key=lambda name: middles[name])
    return best, middles[base] / middles[best]
