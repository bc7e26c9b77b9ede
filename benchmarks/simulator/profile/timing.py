"""How often and how long a piece of work is repeated until its median is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

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


def in_time(grid: Iterable[T], effort: Effort, least: int = 4) -> list[T]:
    """What the stage has time for of a grid that measures as it is read; so many at least."""
    end = time.perf_counter() + effort.stage_seconds
    found: list[T] = []
    for sample in grid:
        found.append(sample)
        if time.perf_counter() > end and len(found) >= least:
            break
    return found


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
