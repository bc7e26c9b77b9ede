"""What an engine in this process reports of every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class StepLog:
    """The engine's steps so far, and the state after the last one."""

    steps: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Counts a step. Both are vLLM's, and either may be missing."""
        self.steps += 1
        if scheduler_stats is not None:
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
