"""How often and how long a piece of work is repeated until its median is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from triptych.progress.progress import step
from triptych.simulator.profile.fit import Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """Repeats of every measurement, and the seconds that one, and one stage, may take at most."""

    repeats: int
    sample_seconds: float
    stage_seconds: float


FULL = Effort(repeats=7, sample_seconds=3.0, stage_seconds=20.0)
QUICK = Effort(repeats=3, sample_seconds=0.4, stage_seconds=2.5)


def in_time(label: str, grid: Iterable[T], count: int, effort: Effort, least: int = 4) -> list[T]:
    """What the stage, shown as `label`, has time for of a grid that measures as it is read; so many at least.

    The grid has `count` samples at most.
    """
    began = time.perf_counter()
    found: list[T] = []
    with step(label, count, "samples") as running:
        for sample in grid:
            found.append(sample)
            seconds = time.perf_counter() - began
            running.advance(left=stage_left(seconds, len(found) / count, effort))
            if seconds > effort.stage_seconds and len(found) >= least:
                break
    return found


def stage_left(seconds: float, share: float, effort: Effort) -> float:
    """Seconds that a stage will still take, `share` of whose grid took `seconds`: the rest of it, or of its
    time.
    """
    return max(0.0, min(seconds * (1 - share) / share, effort.stage_seconds - seconds))


def timed(work: Callable[[], None], terms: dict[str, float], effort: Effort) -> Sample:
    """`work` once to warm up, then up to `effort.repeats` times, at least twice.

    `work` returns when the device is done.
    """
    work()
    repeats: list[float] = []
    began = time.perf_counter()
    while len(repeats) < effort.repeats:
        start = time.perf_counter()
        work()
        end = time.perf_counter()
        repeats.append(end - start)
        if len(repeats) > 1 and end - began > effort.sample_seconds:
            break
    return Sample(terms, statistics.median(repeats), tuple(repeats))
