"""Pictures shown again: replicas that encode each once per replica, against one store for the cluster.

One picture of 1080p and 64 tokens of text a request, 32 tokens out, on A100s. `in-step` replicas keep what
they encoded to themselves, 4 GiB each; our replicas and encoders share the store. With affinity the router
sends requests on one picture to the worker that had it last, unless that one is much busier: there the prefix
cache has the picture's keys and values as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.result_page import table
from benchmarks.when_to_disaggregate.devices import GPU, SLO
from triptych.goodput.load.workload import Workload
from triptych.simulator.cluster.shape import ClusterShape, colocated, in_step, on_devices
from triptych.simulator.plan.estimate import best_counts, estimate
from triptych.simulator.plan.question import Question, read_device
from triptych.simulator.plan.trials import COARSE, Trials

LOAD = Workload(64, 32, ((1, 1.0),), ((1920, 1080, 1.0),))
DEVICES = (2, 8)
REUSES = (0.0, 0.5, 0.9)
SYSTEMS = (
    "in-step",
    "in-step, affinity",
    "replicas with the store, affinity",
    "encoders and PD workers",
    "encoders and PD workers, affinity",
)


@dataclass(frozen=True, slots=True)
class Point:
    """Sustained requests per second of a system."""

    devices: int
    reuse: float
    system: str
    shape: str
    rate: float


def _systems(devices: int, asked: Question, load: Workload) -> Iterator[tuple[str, ClusterShape, bool]]:
    apart = on_devices(*best_counts(estimate(asked, load), devices))
    yield SYSTEMS[0], in_step(devices), False
    yield SYSTEMS[1], in_step(devices), True
    yield SYSTEMS[2], colocated(devices), True
    yield SYSTEMS[3], apart, False
    yield SYSTEMS[4], apart, True


def points() -> Iterator[Point]:
    device = read_device(GPU)
    kept = replace(device, limits=replace(device.limits, affinity=True))
    for devices, reuse in product(DEVICES, REUSES):
        load = replace(LOAD, reuse=reuse)
        asked = Question(load, "", SLO, device, devices, repeats=1)
        rates: dict[str, float] = {}
        for name, shape, affinity in _systems(devices, asked, load):
            # Without reuse there is nothing that affinity could find.
            if not (affinity and not reuse and shape.name in rates):
                trials = Trials(replace(asked, device=kept) if affinity else asked)
                rates[shape.name] = trials.highest(shape, load, fineness=COARSE)
            yield Point(devices, reuse, name, shape.name, rates[shape.name])


def reuse_table(result: list[Point]) -> list[str]:
    rows = []
    for devices, reuse in product(DEVICES, REUSES):
        row = [one for one in result if (one.devices, one.reuse) == (devices, reuse)]
        rates = [one.rate for one in row]
        gain = max(rates[3:]) / max(rates[:2])
        words = [f"{rate:.1f}" for rate in rates]
        rows.append([str(devices), f"{reuse:.0%}", *words, row[3].shape, f"{gain:.2f}"])
    return table(["A100s", "shown before", *SYSTEMS, "ratio", "best apart / best in-step"], rows, (7,))
