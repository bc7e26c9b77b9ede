"""Planner of segments: the parts of a video that several encoder workers may encode at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from triptych.base.types import Options
from triptych.encoder_worker.decode_places import DecodePlace
from triptych.encoder_worker.engine import EncoderEngine
from triptych.encoder_worker.jobs.job import EncodeJob
from triptych.encoder_worker.jobs.table import JobMetrics
from triptych.encoder_worker.media.preparer import Preparer
from triptych.encoder_worker.scheduler import EncoderScheduler, Errand
from triptych.models.video.clip import SegmentEnds


class ErrandPlaces:
    """Places of processes that read an index for no job.

    `changed` is set where one waits or has ended.
    """

    def __init__(
        self, scheduler: EncoderScheduler[EncodeJob], metrics: JobMetrics, changed: asyncio.Event
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._changed = changed

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """One place, once it is the tenant's turn."""
        turn = asyncio.get_running_loop().create_future()
        errand = Errand(tenant, lambda: None if turn.done() else turn.set_result(None))
        self._scheduler.add_errand(errand)
        self._changed.set()
        try:
            await turn
            yield
        finally:
            self._scheduler.drop_errand(errand)
            self._metrics.decoded(self._scheduler.decoded(errand, time.monotonic()), DecodePlace.INDEX)
            self._changed.set()


@dataclass(frozen=True, slots=True)
class SegmentPlanner:
    """Divides videos into segments of `frames` sampled frames, where the tower allows it."""

    preparer: Preparer
    engine: EncoderEngine
    frames: int
    places: ErrandPlaces

    async def ends(self, data: bytes, options: Options, tenant: str = "") -> tuple[SegmentEnds, int]:
        """Where the segments of a video end, and the rows that the tower adds behind a video's frames.

        No ends: the video is one item. InvalidRequest for what is no video. Its process has a place of the
        tenant's.
        """
        if not self.frames:
            return [], 0
        # A batch of others may be in the tower before the trial; after it the answer is there at once.
        extra_rows = await asyncio.wrap_future(self.engine.extra_video_rows())
        if extra_rows is None:
            return [], 0
        async with self.places.place(tenant):
            work = self.preparer.work(tenant=tenant, heavy=True)
            ends = await self.preparer.segments(data, options, self.frames, extra_rows, work)
        return ends, extra_rows
