"""A job table full of work, for tests of what one more event costs."""

from __future__ import annotations

from triptych.base.types import ItemPlan
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, StartPlan, StartRun
from triptych.proxy.encoders.job_table import EncoderJobTable

SPACE = "n"
ITEMS_OF_A_REQUEST = 16
ENCODERS = 4


class FullTable:
    """`items` jobs of requests of 16 items each, at four encoders with few credits.

    `step` takes one item through its whole life in the table and puts another one in its place.
    """

    def __init__(self, items: int) -> None:
        self.jobs = EncoderJobTable(8)
        self.jobs.set_encoders(EncoderSlot(f"e{i}", (SPACE,), 4, 2) for i in range(ENCODERS))
        self._made = 0
        #: Jobs in preprocessing and in a tower, the oldest first.
        self._planning: list[EncoderJob] = []
        self._running: list[EncoderJob] = []
        for _ in range(items):
            self._want()
        self._pump()
        for _ in range(ITEMS_OF_A_REQUEST):
            self.step()

    def step(self) -> None:
        """The oldest item in preprocessing is planned and admitted, runs, is published and loaded."""
        self._want()
        self._pump()
        job = self._planning.pop(0)
        waiters = sorted(job.waiters)
        self.jobs.planned(job.try_id, _plan(job.mm_hash))
        self._pump()
        for request in waiters:
            self.jobs.admit(request)
        self._pump()
        job = self._running.pop(0)
        self.jobs.ready(job.try_id, _plan(job.mm_hash))
        self._pump()
        for request in waiters:
            self.jobs.loaded(request, job.mm_hash)
        self._pump()

    def _want(self) -> None:
        """Another item, of the request that is not full yet."""
        request = f"r{self._made // ITEMS_OF_A_REQUEST}"
        self.jobs.want(f"k{self._made}", request, SPACE)
        self._made += 1

    def _pump(self) -> None:
        for action in self.jobs.pump(1.0):
            if isinstance(action, StartPlan):
                self._planning.append(action.job)
            elif isinstance(action, StartRun):
                self._running.append(action.job)


class PlannedTable:
    """`items` jobs that all have their plan and wait for the admission of their requests."""

    def __init__(self, items: int) -> None:
        self.jobs = EncoderJobTable(1 << 20)
        self.jobs.set_encoders([EncoderSlot("e1", (SPACE,), items, 2)])
        self._left = items // ITEMS_OF_A_REQUEST
        for index in range(items):
            self.jobs.want(f"k{index}", f"r{index // ITEMS_OF_A_REQUEST}", SPACE)
        for action in self.jobs.pump(1.0):
            self.jobs.planned(action.job.try_id, _plan(action.job.mm_hash))

    def step(self) -> None:
        """A request is admitted, what may run runs, and the request ends."""
        self._left -= 1
        request = f"r{self._left}"
        self.jobs.admit(request)
        self.jobs.pump(1.0)
        self.jobs.end_attempt(request)
        self.jobs.leave(request)
        self.jobs.pump(1.0)


def _plan(key: str) -> ItemPlan:
    return ItemPlan(key, SPACE, "image", 1, 1, "float32", 1)
