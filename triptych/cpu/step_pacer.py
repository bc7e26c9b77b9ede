"""When the engines of one machine begin their steps, where they share its CPU cores (`--cpu-sharing`).

`free`: every step begins at once. `pace`: a PD worker keeps the beginnings of its steps apart while all
workers together want more cores than there are. A step costs nearly the same for one sequence as for several:
fewer steps with more sequences in each leave the towers the cores that many small steps would take. Requests
that wait for a tower gain, streams lose: the fewer wait for each stream, the shorter the interval.

While no other worker computes, a PD worker that computes on one thread keeps all its threads on one core
(`OwnCore`): they take turns by the interpreter's lock, and elsewhere each would first have to wake up.
"""

from __future__ import annotations

import logging
import math
import time
from types import TracebackType

from triptych.cpu.affinity import OwnCore, claim_core
from triptych.cpu.core_page import CorePage
from triptych.machine.resources import may_claim_cores

logger = logging.getLogger(__name__)

#: Seconds between two looks at the page: short against a decode step, long against the look.
_LOOK_SECONDS = 0.0005


class StepPacer:
    """What an engine calls around its steps, in mode `free`. `with pacer:` encloses those that compute."""

    def wait(self, share: float = 1.0) -> None:
        """Returns when a busy engine's next step may begin.

        `share`, of a step interval, is how much there is to win by waiting.
        """

    def __enter__(self) -> None:
        """A step begins to compute."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It has ended."""

    def close(self) -> None:
        """Gives back what the pacer holds. Idempotent."""


class SharedCores(StepPacer):
    """The pacer of mode `pace`: steps begin `interval` seconds apart while cores are short."""

    def __init__(self, page: CorePage, interval: float = 0.0, core: OwnCore | None = None) -> None:
        """`core` has the process's threads from a `wait` that finds no other worker computing until one
        that does: a tower that comes to this core would take half of it."""
        self._page = page
        self._interval = interval
        self._core = core
        self._begun = -math.inf

    def wait(self, share: float = 1.0) -> None:
        """Waits for `share`, up to 1, of the interval since the last step began, while cores are short."""
        now = time.monotonic()
        earliest = self._begun + self._interval * min(share, 1.0)
        while now < earliest and self._page.crowded:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
        self._begun = now
        if self._core is None:
            return
        if self._page.alone:
            self._core.pin()
        else:
            self._core.unpin()

    def __enter__(self) -> None:
        self._page.set_computing(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._page.set_computing(False)

    def close(self) -> None:
        if self._core is not None:
            self._core.release()


def step_pacer(
    page: str, slot: int, threads: int, *, interval: float = 0.0, own_core: bool = False
) -> StepPacer:
    """The pacer of a worker that computes on `threads`: by --core-page and --core-slot, or `free` without.

    `own_core` is for a worker of one thread: more would have to share the core.
    """
    if not page:
        return StepPacer()
    core = _own_core() if own_core and threads == 1 else None
    return SharedCores(CorePage(page, slot, threads), interval, core)


def _own_core() -> OwnCore | None:
    if not may_claim_cores():
        logger.info(
            "keeps to no core: another container may claim the same one, or a quota limits time, not cores"
        )
        return None
    core = claim_core()
    logger.info("no core to keep to is free" if core is None else f"keeps to core {core.core} where it can")
    return core
