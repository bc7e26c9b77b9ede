"""Sampling: whether a request's trace is recorded, decided once where the request enters the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampler:
    """A parent-based sampler. `ratio` is the part of the requests without a parent that are recorded.

    With `trusts_parent` the caller's sampled flag decides, as among services that belong together. Without,
    as for clients that are told apart by API keys, neither the flag nor the trace id does: a client chooses
    both, and could have each of its requests recorded. A ratio of 0 records nothing, whatever a caller says.
    """

    ratio: float
    trusts_parent: bool = True

    def decide(self, parent_sampled: bool | None, draw: float) -> bool:
        """Whether to record; `draw` is random, from 0 up to but not including 1."""
        if self.ratio <= 0.0:
            return False
        if parent_sampled is not None and self.trusts_parent:
            return parent_sampled
        return draw < self.ratio
