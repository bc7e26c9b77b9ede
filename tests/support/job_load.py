"""A job table full of items, for tests and figures of what one more event costs."""

from __future__ import annotations

from triptych.proxy.jobs import EncoderSlot, Job, JobTable, RunJob, StartJob
from triptych.types import ItemPlan

SPACE = "n"
ITEMS_OF_A_REQUEST = 16
ENCODERS = 4


class FullTable:
    """`items` jobs of requests of 16 items each, at four encoders with few credits.

    `step` takes one item through its whole life in the table and puts another one in its place.
    """

    def __init__(self, items: int) -> None:
        self.jobs = JobTable(8)
        self.jobs.set_encoders(EncoderSlot(f"e{i}", (SPACE,), 4, 2) for i in range(ENCODERS))
        self._made = 0
        self.ended = 0
        #: Jobs in preprocessing and in a tower, the oldest first.
        self._planning: list[Job] = []
        self._running: list[Job] = []
        for _ in range(items):
            self.arrive()
        for _ in range(2 * ITEMS_OF_A_REQUEST):
            self.step()

    def arrive(self) -> None:
        """Another item, of the request that is not full yet."""
        request = f"r{self._made // ITEMS_OF_A_REQUEST}"
        self.jobs.want(f"k{self._made}", request, SPACE)
        self._made += 1
        self.pump()

    def step(self) -> None:
        """The oldest item in preprocessing is planned, the oldest in a tower is published and loaded."""
        self.arrive()
        if self._planning:
            job = self._planning.pop(0)
            self.jobs.planned(job.try_id, _plan(job))
            for request in sorted(job.waiters):
                self.jobs.admit(request)
            self.pump()
        if self._running:
            job = self._running.pop(0)
            self.ended += 1
            waiters = sorted(job.waiters)
            self.jobs.ready(job.try_id, _plan(job))
            self.pump()
            for request in waiters:
                self.jobs.loaded(request, job.mm_hash)
                self.jobs.leave(f"gone-{request}")
            self.pump()

    def pump(self) -> None:
        for action in self.jobs.pump(1.0):
            if isinstance(action, StartJob):
                self._planning.append(action.job)
            elif isinstance(action, RunJob):
                self._running.append(action.job)


def _plan(job: Job) -> ItemPlan:
    return ItemPlan(job.mm_hash, SPACE, "image", 1, 1, "float32", 1)


class PlannedTable:
    """`items` jobs that all have their plan and wait for the admission of their requests."""

    def __init__(self, items: int) -> None:
        self.jobs = JobTable(1 << 20)
        self.jobs.set_encoders([EncoderSlot("e1", (SPACE,), items, 2)])
        self._left = items // ITEMS_OF_A_REQUEST
        for index in range(items):
            self.jobs.want(f"k{index}", f"r{index // ITEMS_OF_A_REQUEST}", SPACE)
        for action in self.jobs.pump(1.0):
            self.jobs.planned(action.job.try_id, _plan(action.job))

    def step(self) -> None:
        """A request is admitted, what may run runs, and the request ends."""
        self._left -= 1
        request = f"r{self._left}"
        self.jobs.admit(request)
        self.jobs.pump(1.0)
        self.jobs.end_attempt(request)
        self.jobs.leave(request)
        self.jobs.pump(1.0)
