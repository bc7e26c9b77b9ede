"""A step as a renderer follows it: its last state, since when, and the estimate."""

from __future__ import annotations

from triptych.progress.step import StepState
from triptych.progress.time_left import TimeLeft


class TrackedStep:
    """The states of one step, seen from its first one on."""

    def __init__(self, state: StepState, now: float) -> None:
        self.state = state
        self._began = now
        self._estimate = TimeLeft(now)
        self._seen = now

    def follow(self, state: StepState, now: float) -> None:
        """The step is in this state now."""
        self.state, self._seen = state, now
        self._estimate.observe(now, state.done)

    def seconds(self, now: float) -> float:
        """Since it began."""
        return max(0.0, now - self._began)

    def left(self, now: float) -> float | None:
        """Seconds, by the work's own word where it gives one, else by its pace."""
        if self.state.left is not None:
            return max(0.0, self.state.left - max(0.0, now - self._seen))
        return self._estimate.left(now, self.state.total)
