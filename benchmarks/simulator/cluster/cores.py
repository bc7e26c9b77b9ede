"""The core page in virtual time: which workers of a machine compute, and who waits for that to change."""

from __future__ import annotations

import math
from collections.abc import Callable

from triptych.cpu.core_page import crowded


class SharedCores:
    """`triptych/cpu/core_page.py` for all workers of one host, whose looks take no time."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._computing: dict[object, int] = {}
        self._watching: dict[object, Callable[[], None]] = {}

    def begin(self, worker: object, threads: float) -> None:
        """The worker's threads compute from now on."""
        self._computing[worker] = math.ceil(threads)
        self._tell(worker)

    def end(self, worker: object) -> None:
        """They do not any more."""
        self._computing.pop(worker, None)
        self._tell(worker)

    def crowded(self, worker: object, threads: float) -> bool:
        """Whether the worker's threads and those of the others that compute are more than the cores."""
        if self._cores == math.inf:
            return False
        others = bytes(count for other, count in self._computing.items() if other is not worker)
        return crowded(others, math.ceil(threads), int(self._cores))

    def alone(self, worker: object) -> bool:
        """Whether no other worker computes."""
        return all(other is worker for other in self._computing)

    def watch(self, worker: object, changed: Callable[[], None] | None) -> None:
        """`changed` is called whenever another worker begins or ends, until it is set to None."""
        if changed is None:
            self._watching.pop(worker, None)
        else:
            self._watching[worker] = changed

    def _tell(self, worker: object) -> None:
        for other, changed in list(self._watching.items()):
            if other is not worker:
                changed()
