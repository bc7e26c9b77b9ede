"""Measured against simulated: which cells there are, and how far off a simulation may be. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from triptych.simulator.cluster import shape
from triptych.simulator.cluster.shape import ClusterShape
from triptych.simulator.costs.costs import CoreCosts
from triptych.simulator.costs.speed import Speed

#: A simulated median may be off by so much, or by the spread of the measured runs where that is more.
ALLOWED = 0.15
METRICS = ("ttft", "tpot", "throughput")
KINDS = ("closed", "open")
LOADS = ("mix", "images-4")


@dataclass(frozen=True, slots=True)
class System:
    """A cluster as `triptych serve` starts it (`launch` and `words`), and as the simulator has it."""

    name: str
    launch: str
    words: tuple[str, ...]
    simulated: Callable[[float, float, CoreCosts], ClusterShape] = field(compare=False, repr=False)


_FREE = ("--cpu-sharing", "free")


def _shared(encoders: int, pd_workers: int) -> System:
    name = f"{encoders}E{pd_workers}PD"

    def simulated(cores: float, threads: float, costs: CoreCosts) -> ClusterShape:
        return shape.shared(encoders, pd_workers, cores=cores, pd_threads=threads)

    return System(f"{name.lower()}-shared", name, _FREE, simulated)


def _paced(encoders: int, pd_workers: int) -> System:
    name = f"{encoders}E{pd_workers}PD"

    def simulated(cores: float, threads: float, costs: CoreCosts) -> ClusterShape:
        return shape.paced(
            encoders,
            pd_workers,
            cores=cores,
            pd_threads=threads,
            nice_weight=costs.nice_weight,
            own_core=costs.own_core,
        )

    return System(f"{name.lower()}-pace", name, ("--cpu-sharing", "pace"), simulated)


def _colocated(replicas: int) -> System:
    def simulated(cores: float, threads: float, costs: CoreCosts) -> ClusterShape:
        return shape.colocated_on_cores(replicas, cores=cores, threads=threads)

    return System(f"{replicas}-colocated", f"{replicas}colocated", (), simulated)


#: The shapes; `simulated` takes the machine's cores, a decoder's threads and what is known of cores there.
SYSTEMS = (
    _paced(2, 1),
    System(
        "1e1pd-pinned",
        "1E1PD",
        ("--cpus-per-worker", "1"),
        lambda cores, threads, costs: shape.pinned(1, 1, cores=1.0, own_core=costs.own_core),
    ),
    _shared(1, 1),
    _shared(2, 1),
    _shared(1, 2),
    _shared(2, 2),
    _colocated(1),
    _colocated(2),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One window of one load on one system. `kind` "closed": so many at once; "open": at a fixed rate."""

    system: str
    load: str
    kind: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.system}.{self.load}.{self.kind}.{self.repeat}"


def plan_cells(systems: Sequence[str], loads: Sequence[str], repeats: int) -> list[Cell]:
    """Round by round, so that minutes in which the machine is slow meet all systems alike; closed before
    open, whose rate comes of the first round's.
    """
    return [
        Cell(system, load, kind, repeat)
        for repeat in range(repeats)
        for system in systems
        for load in loads
        for kind in KINDS
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over runs; `spread` is how far the measured run that is farthest off lies from its median."""

    metric: str
    measured: float
    spread: float
    simulated: float

    @property
    def error(self) -> float:
        return abs(self.simulated / self.measured - 1)

    @property
    def allowed(self) -> float:
        return max(ALLOWED, self.spread)

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def compare(
    metric: str, measured: Sequence[Mapping[str, float]], simulated: Sequence[Mapping[str, float]]
) -> Comparison:
    """One metric over the runs of one system on one load; ValueError without runs on both sides."""
    found = [run[metric] for run in measured]
    if not found or not simulated:
        raise ValueError(f"{metric}: no runs to compare")
    middle = statistics.median(found)
    spread = max(abs(value / middle - 1) for value in found)
    return Comparison(metric, middle, spread, statistics.median(run[metric] for run in simulated))


def table(compared: Mapping[tuple[str, str, str], Sequence[Comparison]]) -> str:
    """Markdown: a row per system, load, kind and metric; latencies in milliseconds."""
    lines = [
        "| system | load | kind | metric | measured | spread | simulated | error | allowed | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (system, load, kind), metrics in compared.items():
        for one in metrics:
            scale, unit = (1.0, "/s") if one.metric == "throughput" else (1e3, " ms")
            lines.append(
                f"| {system} | {load} | {kind} | {one.metric} | {one.measured * scale:.3g}{unit} "
                f"| {one.spread:.0%} | {one.simulated * scale:.3g}{unit} | {one.error:.0%} "
                f"| {one.allowed:.0%} | {'ok' if one.passed else 'OFF'} |"
            )
    everything = [one for metrics in compared.values() for one in metrics]
    passed = sum(one.passed for one in everything)
    lines += [
        "",
        f"{passed} of {len(everything)} within the larger of {ALLOWED:.0%} and the measured spread.",
    ]
    return "\n".join(lines)


def speed_line(found: Sequence[Speed]) -> str:
    """How far the machine was from that of the profile, over all windows."""
    steps, towers = sorted(one.steps for one in found), sorted(one.towers for one in found)
    return (
        f"Beside the windows, steps alone took {statistics.median(steps):.2f} of the profile's time "
        f"({steps[0]:.2f} to {steps[-1]:.2f}), towers {statistics.median(towers):.2f} ({towers[0]:.2f} to "
        f"{towers[-1]:.2f}); each window is simulated at its speed."
    )
