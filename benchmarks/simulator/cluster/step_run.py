"""Decode steps under way as one task: how many are through, and when each ended."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.simulator.cluster.task import Task


@dataclass(slots=True)
class StepRun:
    """`steps` decode steps under way: step i takes `first` + i · `slope` seconds of work."""

    task: Task
    started: float
    steps: int
    first: float
    slope: float

    def work(self, steps: int) -> float:
        return steps * self.first + self.slope * steps * (steps - 1) / 2

    def steps_in(self, work: float) -> int:
        """Whole steps that `work` seconds are enough for."""
        low, high = 0, self.steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.work(middle) <= work + 1e-12 else (low, middle - 1)
        return low

    def ends(self, now: float) -> list[float]:
        """When each step ended, the last one `now`, by the speeds that the task has had."""
        marks = self.task.marks or []
        works = [self.work(step) for step in range(1, self.steps + 1)]
        changes = [(moment, left) for moment, left in marks if moment < now]
        if len(changes) <= 1 and abs(now - self.started - works[-1]) < 1e-9:
            ends = [self.started + work for work in works]
        else:
            ends = _along(changes, works, now)
        ends[-1] = now
        return ends


def _along(changes: list[tuple[float, float]], works: list[float], now: float) -> list[float]:
    begun = changes[0][1]
    points = [(moment, begun - left) for moment, left in changes] + [(now, works[-1])]
    ends, at = [], 0
    for work in works:
        while at + 2 < len(points) and points[at + 1][1] < work:
            at += 1
        (t0, w0), (t1, w1) = points[at], points[at + 1]
        ends.append(t0 + (t1 - t0) * (work - w0) / (w1 - w0) if w1 > w0 else t1)
    return ends
