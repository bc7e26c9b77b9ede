"""A piece of work on a host, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from triptych.simulator.cluster.clock import Timer


class Task:
    """Work on a host: `left` seconds at full speed, on `threads` cores. Endless work just takes its share."""

    __slots__ = (
        "done",
        "left",
        "marks",
        "owner",
        "riders",
        "since",
        "speed",
        "thread",
        "threads",
        "timer",
        "weight",
    )

    def __init__(
        self,
        seconds: float,
        done: Callable[[], None] | None,
        threads: float,
        weight: float,
        owner: str,
        riders: Mapping[str, float],
        thread: object | None,
    ) -> None:
        self.left = seconds
        self.done = done
        self.threads = threads
        self.riders = riders
        self.thread = thread
        self.weight = weight
        self.owner = owner
        self.speed = 0.0
        self.since = 0.0
        self.timer: Timer | None = None
        #: (moment, seconds of work left) at every change of speed, where asked for.
        self.marks: list[tuple[float, float]] | None = None

    @property
    def width(self) -> float:
        """Cores at full speed, with those of its riders."""
        return self.threads + sum(self.riders.values()) if self.riders else self.threads
