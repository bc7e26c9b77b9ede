"""Where work takes its time: cores that tasks share by weight, and devices that their users take in turn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.seats import Seats
from triptych.simulator.cluster.task import Task


class Host:
    """`cores` shared as by a fair scheduler: in proportion to weight times threads, nobody above its threads.

    A task that gets half of its threads goes at half its speed; what threads lose by waiting for each other
    is not modelled. Riders are other processes' work that a task makes as it goes, such as reading what it
    tells: they take cores at its speed. Infinite `cores` are a machine that is never short of them.
    """

    def __init__(self, clock: Clock, cores: float, name: str = "host") -> None:
        self.cores = cores
        self.name = name
        self._clock = clock
        self._tasks: dict[Task, None] = {}
        self._demand = 0.0
        self._crowded = False
        self._seats = Seats(int(cores)) if 1 < cores < math.inf and cores == int(cores) else None
        #: Core-seconds by owner.
        self.used: dict[str, float] = {}

    @property
    def crowding(self) -> float:
        """How likely a thread that is woken finds no core: 0 while one is free, 1 while all compute."""
        if self.cores == math.inf:
            return 0.0
        return min(1.0, max(0.0, self._demand - self.cores + 1.0))

    @property
    def used_seconds(self) -> float:
        return math.fsum(self.used.values())

    def start(
        self,
        seconds: float,
        done: Callable[[], None] | None,
        *,
        threads: float = 1.0,
        weight: float = 1.0,
        owner: str = "",
        marks: bool = False,
        riders: Mapping[str, float] = MappingProxyType({}),
        thread: object | None = None,
    ) -> Task:
        """Calls `done` when `seconds` of work at full speed are through; never for infinite ones.

        `riders` are cores at full speed by their owners. `thread` is whose long work this is, on one thread:
        it keeps to a core as long as no other is free.
        """
        if thread is not None and (threads != 1 or self._seats is None):
            thread = None
        task = Task(seconds, done, min(threads, self.cores), weight, owner, riders, thread)
        if thread is not None and self._seats is not None:
            self._seats.sit(task)
        task.since = self._clock.now
        if marks:
            task.marks = []
        self._tasks[task] = None
        self._demand += task.width
        self._changed(task)
        return task

    def stop(self, task: Task) -> None:
        """The task ends without its `done`. Idempotent."""
        if task in self._tasks:
            self._account(task)
            if self._seats is not None:
                self._seats.leave(task)
                self._seats.level()
            self._remove(task)

    def left(self, task: Task) -> float:
        """Seconds of work at full speed that the task still has."""
        return max(0.0, task.left - task.speed * (self._clock.now - task.since))

    def shorten(self, task: Task, seconds: float) -> None:
        """The task has `seconds` of work less to do from now on."""
        self._account(task)
        task.left = max(0.0, task.left - seconds)
        if task.marks is not None:
            task.marks = [(moment, left - seconds) for moment, left in task.marks]
        self._schedule(task)

    def _changed(self, task: Task) -> None:
        crowded = self._demand > self.cores * (1 + 1e-9)
        if crowded or self._crowded:
            self._crowded = crowded
            self._share()
        elif task in self._tasks:
            self._pace(task, 1.0)

    def _share(self) -> None:
        """Everybody's speed anew: those that need less than their due leave the rest to the others."""
        cores, waiting = self.cores, dict.fromkeys(self._tasks, 1.0)
        if self._crowded and self._seats is not None and self._seats.taken:
            waiting = self._seats.speeds(self._tasks)
        elif self._crowded:
            # By weight, the heaviest first: whoever's due is above its threads gets just these.
            total = math.fsum(task.weight * task.width for task in waiting)
            for task in sorted(waiting, key=lambda task: -task.weight):
                due = cores * task.weight * task.width / total if total > 0 else 0.0
                got = min(task.width, due)
                waiting[task] = got / task.width if task.width else 1.0
                cores -= got
                total -= task.weight * task.width
        for task, speed in waiting.items():
            if speed != task.speed or task.timer is None:
                self._pace(task, speed)

    def _pace(self, task: Task, speed: float) -> None:
        self._account(task)
        task.speed = speed
        if task.marks is not None:
            task.marks.append((self._clock.now, task.left))
        self._schedule(task)

    def _schedule(self, task: Task) -> None:
        if task.timer is not None:
            task.timer.cancel()
        if task.left < math.inf:
            end = task.left / task.speed if task.speed > 0 else math.inf
            task.timer = self._clock.after(end, self._end, task)

    def _account(self, task: Task) -> None:
        now = self._clock.now
        worked = task.speed * (now - task.since)
        if worked:
            self.used[task.owner] = self.used.get(task.owner, 0.0) + worked * task.threads
            for owner, cores in task.riders.items():
                self.used[owner] = self.used.get(owner, 0.0) + worked * cores
            task.left -= worked
        task.since = now

    def _end(self, task: Task) -> None:
        self._account(task)
        if task.thread is None or self._seats is None:
            self._remove(task)
            if task.done is not None:
                task.done()
            return
        # Its next work, if it goes on at once, finds its core as it was: others move only after that.
        self._seats.leave(task)
        self._remove(task)
        if task.done is not None:
            task.done()
        if self._seats.level() and self._crowded:
            self._share()

    def _remove(self, task: Task) -> None:
        if task.timer is not None:
            task.timer.cancel()
        if task.marks is not None:
            task.marks.append((self._clock.now, max(0.0, task.left)))
        del self._tasks[task]
        self._demand = self._demand - task.width if self._tasks else 0.0
        self._changed(task)


class Turn:
    """A device, or a loop, with one user at a time; whoever has waited longest is next.

    Whoever holds it may `listen` for somebody who begins to wait, and end early.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._held_since: float | None = None
        self._wanted: Callable[[], None] | None = None
        #: Seconds in which somebody held it.
        self.held_seconds = 0.0

    @property
    def contended(self) -> bool:
        return bool(self._waiting)

    def take(self, granted: Callable[[], None]) -> None:
        """Calls `granted` now if nobody holds it, else in its turn."""
        if self._held_since is None:
            self._held_since = self._clock.now
            granted()
            return
        self._waiting.append(granted)
        if self._wanted is not None:
            self._wanted()

    def listen(self, wanted: Callable[[], None]) -> None:
        """What the holder has called when somebody begins to wait, from now on."""
        self._wanted = wanted

    def give(self) -> None:
        """The holder is done."""
        assert self._held_since is not None, "nobody holds it"
        self.held_seconds += self._clock.now - self._held_since
        self._held_since = self._wanted = None
        if self._waiting:
            self._held_since = self._clock.now
            self._waiting.popleft()()
