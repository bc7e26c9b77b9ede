"""Measured against simulated: which cells there are, and how far off a simulation may be. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.simulator.cluster.shape import ClusterShape, colocated, on_devices

#: A simulated median may be off by so much, or by the spread of the measured runs where that is more.
ALLOWED = 0.15
METRICS = ("ttft", "tpot", "throughput")
KINDS = ("closed", "open")
LOADS = ("mix", "images-4")


@dataclass(frozen=True, slots=True)
class ValidatedSystem:
    """A cluster as `triptych serve` starts it (`launch` and `words`), and as the simulator has it."""

    name: str
    launch: str
    words: tuple[str, ...]
    shape: ClusterShape


def _pinned(encoders: int, pd_workers: int) -> ValidatedSystem:
    """Every worker has a core of its own, as it has a device of its own in the simulator."""
    shape = on_devices(encoders, pd_workers)
    name = f"{shape.name.lower()}-pinned"
    return ValidatedSystem(name, shape.name, ("--cpus-per-worker", "1"), shape)


#: Two processes on one core are not simulated, so each worker has its own; a replica takes turns in itself.
SYSTEMS = (
    _pinned(1, 1),
    _pinned(2, 1),
    _pinned(1, 2),
    _pinned(2, 2),
    ValidatedSystem("1-colocated", "1colocated", (), colocated(1)),
)


def systems_for(cores: int) -> tuple[ValidatedSystem, ...]:
    """Those whose workers find a core each."""
    return tuple(system for system in SYSTEMS if len(system.shape.workers) <= cores)


@dataclass(frozen=True, slots=True)
class ValidationCell:
    """One window of one load on one system. `kind` "closed": so many at once; "open": at a fixed rate."""

    system: str
    load: str
    kind: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.system}.{self.load}.{self.kind}.{self.repeat}"


def plan_cells(systems: Sequence[str], loads: Sequence[str], repeats: int) -> list[ValidationCell]:
    """Round by round, so that minutes in which the machine is slow meet all systems alike; closed before
    open, whose rate comes of the first round's.
    """
    return [
        ValidationCell(system, load, kind, repeat)
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
