"""Which core each long-running thread keeps to, and how fast it goes beside the others there.

A kernel moves threads between cores seldom: what runs for some ten milliseconds shares the core on which it
was woken, however little is to do on another, and only an idle core takes work from the others at once. Short
work goes wherever a core is free, and otherwise before long work, since it has used up less of its share.
"""

from __future__ import annotations

from collections.abc import Iterable

from triptych.simulator.cluster.task import Task

#: Short work takes at most so much of a core on which a thread computes.
_MOST_SHORT = 0.5
#: Riders go at their tasks' speed, which depends on what riders take: so many rounds settle it within 1 %.
_ROUNDS = 4


class Seats:
    """The cores of one host."""

    def __init__(self, cores: int) -> None:
        self._cores: list[list[Task]] = [[] for _ in range(cores)]
        self._last: dict[object, int] = {}

    @property
    def taken(self) -> bool:
        """Whether any thread has a core."""
        return any(self._cores)

    def sit(self, task: Task) -> None:
        """On the core with the least weight; on its thread's last one where that is among them."""
        loads = [sum(other.weight for other in core) for core in self._cores]
        last = self._last.get(task.thread, 0)
        chosen = last if loads[last] <= min(loads) else loads.index(min(loads))
        self._cores[chosen].append(task)
        self._last[task.thread] = chosen

    def leave(self, task: Task) -> None:
        """Idempotent."""
        for core in self._cores:
            if task in core:
                core.remove(task)

    def level(self) -> bool:
        """Cores without a thread take one from the fullest; whether any has moved."""
        moved = False
        for index, core in enumerate(self._cores):
            fullest = max(self._cores, key=len)
            if not core and len(fullest) > 1:
                task = fullest.pop()
                core.append(task)
                self._last[task.thread] = index
                moved = True
        return moved

    def speeds(self, tasks: Iterable[Task]) -> dict[Task, float]:
        """The speed of every task of the host, at most 1."""
        short = [task for task in tasks if task.thread is None]
        seated = [task for core in self._cores for task in core]
        found = dict.fromkeys([*short, *seated], 1.0)
        busy = sum(bool(core) for core in self._cores)
        wanted = sum(task.width for task in short)
        room = len(self._cores) - busy + _MOST_SHORT * busy
        for _ in range(_ROUNDS):
            riders = sum(found[task] * (task.width - task.threads) for task in seated)
            for task in short:
                found[task] = min(1.0, max(room - riders, _MOST_SHORT) / wanted) if wanted else 1.0
            beside = max(0.0, wanted + riders - (len(self._cores) - busy)) / max(busy, 1)
            left = 1.0 - min(_MOST_SHORT, beside)
            for core in self._cores:
                weight = sum(task.weight for task in core)
                for task in core:
                    found[task] = left * task.weight / weight if weight else left
        return found
