"""When the engines of one machine begin their steps, where they share its CPU cores (`--cpu-sharing`).

`free`: every step begins at once. `pace`: a PD worker keeps the beginnings of its steps apart while all
workers together want more cores than there are. A step costs nearly the same for one sequence as for several:
fewer steps with more sequences in each leave the towers the cores that many small steps would take. Requests
that wait for a tower gain, streams lose: the fewer wait for each stream, the shorter the interval.

Threads follow the load: before each layer a worker counts those of the others that compute, and takes the
cores that they leave (`threads_beside`). A tower alone computes on all cores, a decoder beside towers on half
of its own: a thread that shares its core keeps all threads of its layer waiting.

A narrow decoder computes steps of few rows on one thread, in either mode, and steps with prompts on more, as
long as no one else takes their cores (`CoreWaits`). So does a wide one, all of its steps.

While no other worker computes, a PD worker that computes on one thread keeps all its threads on one core
(`OwnCore`): they take turns by the interpreter's lock, and elsewhere each would first have to wake up.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from types import TracebackType

from triptych.base.cpu.core_page import CorePage
from triptych.base.cpu.threads import OwnCore, claim_core, use_threads_here
from triptych.base.machine.resources import may_claim_cores

logger = logging.getLogger(__name__)

#: Seconds between two looks at the page: short against a decode step, long against the look.
_LOOK_SECONDS = 0.0005
#: Share of steps' seconds that their first thread computes at least where the others have their cores. On two
#: cores it was 0.8 to 1.0 with nothing beside, where two threads take 0.6 of the time of one, and 0.45 beside
#: a busy loop or in a flood.
_COMPUTES = 0.55
#: Seconds for which steps have fewer threads after some that have waited: doubled each time, up to the second
#: number, and halved after a step that has not.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0
#: Seconds of a step below which it says nothing: an interrupt is as long.
_SHORT_STEP = 0.005


class StepPacer:
    """What an engine calls around its steps, in mode `free`. `with pacer:` encloses those that compute."""

    #: Whether the planned step has fewer threads, since others have their cores.
    limited = False

    def wait(self, share: float = 1.0) -> None:
        """Returns when a busy engine's next step may begin.

        `share`, of a step interval, is how much there is to win by waiting.
        """

    def rest(self) -> None:
        """The engine has nothing to compute until something comes in."""

    def plan(self, rows: int) -> None:
        """Tells the rows of the next step, of prompts and of decodes."""

    def choose_threads(self) -> None:
        """Before a layer, in the thread that computes it: how many threads it has."""

    def __enter__(self) -> None:
        """A step begins to compute."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It has ended."""

    def close(self) -> None:
        """Gives back what the pacer holds. Idempotent."""


class CoreWaits:
    """How many threads steps take while others have their cores: half of those of steps that waited.

    A proxy, a client or another program on the same cores stops one of a step's threads, and the others wait
    for it at the end of each operator: the step then takes longer than on half as many. No page shows them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`cpu_clock` has the CPU seconds of the calling thread, which computes the steps."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._began = self._cpu_began = 0.0
        self._limit: int | None = None
        self._limited = False
        self._until, self._pause = -math.inf, _FIRST_PAUSE
        #: Of a step's seconds, what its first thread has computed: half of it the last step's.
        self._share = 1.0

    @property
    def limit(self) -> int | None:
        """The most threads of the next step; None: as many as there are."""
        return self._limit if self._clock() < self._until else None

    def begin(self) -> None:
        """A step of several threads begins."""
        self._limited = self.limit is not None
        self._began, self._cpu_began = self._clock(), self._cpu_clock()

    def end(self, threads: int) -> None:
        """The step has ended; it had this many threads."""
        now, cpu = self._clock(), self._cpu_clock() - self._cpu_began
        if (seconds := now - self._began) < _SHORT_STEP:
            return
        # One step that waited is nobody's load: an event loop of the process may have had the interpreter.
        share = (self._share + cpu / seconds) / 2
        if share < _COMPUTES:
            # The next one of as many threads decides alone.
            self._share = _COMPUTES
            self._limit, self._until = max(1, threads // 2), now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif not self._limited:  # that fewer threads have their cores says nothing of all
            self._share = share
            self._pause = max(self._pause / 2, _FIRST_PAUSE)


class FollowsRows(StepPacer):
    """The pacer of a decoder in mode `free`: one thread for steps of less than `many` rows."""

    def __init__(
        self,
        threads: int,
        many: int,
        set_threads: Callable[[int], None] = use_threads_here,
        waits: CoreWaits | None = None,
    ) -> None:
        self._most, self._many, self._set_threads = threads, many, set_threads
        self._waits = waits or CoreWaits()
        self._threads = 0

    def plan(self, rows: int) -> None:
        limit = None if rows < self._many else self._waits.limit
        self.limited = limit is not None
        threads = 1 if rows < self._many else min(self._most, limit or self._most)
        if threads != self._threads:
            self._set_threads(threads)
            self._threads = threads

    def __enter__(self) -> None:
        if self._threads > 1:
            self._waits.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads > 1:
            self._waits.end(self._threads)


class SharedCores(StepPacer):
    """The pacer of mode `pace`: steps begin `interval` seconds apart while cores are short."""

    def __init__(
        self,
        page: CorePage,
        interval: float = 0.0,
        core: OwnCore | None = None,
        set_threads: Callable[[int], None] | None = None,
        many: int = 0,
        waits: CoreWaits | None = None,
    ) -> None:
        """`core` has the process's threads from a step of one thread that finds no other worker computing
        until one that does: a tower that comes to this core would take half of it.

        `set_threads` sets the number of the calling thread; None: it stays. Steps of less than `many` rows
        have one.
        """
        self._page = page
        self._many = many
        self._waits = waits or CoreWaits()
        self._most: int | None = None
        self._interval = interval
        self._core = core
        self._set_threads = set_threads
        self._threads = 0
        self._planned = False
        self._begun = -math.inf

    def wait(self, share: float = 1.0) -> None:
        """Waits for `share`, up to 1, of the interval since the last step began, while cores are short."""
        now = time.monotonic()
        earliest = self._begun + self._interval * min(share, 1.0)
        while now < earliest and self._page.crowded:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
        self._begun = now

    def rest(self) -> None:
        self._page.end()

    def plan(self, rows: int) -> None:
        limit = None if rows < self._many else self._waits.limit
        self.limited = limit is not None
        self._most = 1 if rows < self._many else limit
        self._planned = True
        if self._core is None:
            return
        if self._page.alone and (self._most == 1 or not self._many):
            self._core.pin()
        else:
            self._core.unpin()

    @property
    def _watches(self) -> bool:
        """Whether this is a decoder's step of several threads, whose number may change."""
        return self._planned and self._threads > 1

    def choose_threads(self) -> None:
        threads = self._page.begin(self._most)
        if self._set_threads is not None and threads != self._threads:
            self._set_threads(threads)
            self._threads = threads

    def __enter__(self) -> None:
        self.choose_threads()
        if self._watches:
            self._waits.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Others see this worker compute until `rest`: between two steps it needs its cores still."""
        if self._watches:
            self._waits.end(self._threads)

    def close(self) -> None:
        self._page.end()
        if self._core is not None:
            self._core.release()


def step_pacer(
    page: str,
    slot: int,
    threads: int,
    *,
    maximum: int = 0,
    interval: float = 0.0,
    own_core: bool = False,
    many: int = 0,
    follows: bool = False,
) -> StepPacer:
    """The pacer of a worker that computes on `threads`: by --core-page and --core-slot, or `free` without.

    Where other workers leave cores it computes on up to `maximum`, but steps of less than `many` rows on one
    thread. `own_core` is for a worker of one thread, in those steps: more would have to share the core.
    `follows`: without a page, the number of threads follows the rows of a step, and waits for cores.
    """
    if not page:
        return FollowsRows(maximum, many) if follows and maximum > 1 else StepPacer()
    core = _own_core() if own_core and (many or max(threads, maximum) == 1) else None
    set_threads = use_threads_here if maximum > threads else None
    return SharedCores(CorePage(page, slot, threads, maximum), interval, core, set_threads, many)


def _own_core() -> OwnCore | None:
    if not may_claim_cores():
        logger.info(
            "keeps to no core: another container may claim the same one, or a quota limits time, not cores"
        )
        return None
    core = claim_core()
    logger.info("no core to keep to is free" if core is None else f"keeps to core {core.core} where it can")
    return core
