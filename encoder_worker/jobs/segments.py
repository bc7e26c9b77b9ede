"""Planner of segments: the parts of a video that several encoder workers may encode at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from triptych.base.types import Options
from triptych.encoder_worker.engine import EncoderEngine
from triptych.encoder_worker.media.preparer import Preparer
from triptych.models.video.clip import SegmentEnds


@dataclass(frozen=True, slots=True)
class SegmentPlanner:
    """Divides videos into segments of `frames` sampled frames, where the tower allows it."""

    preparer: Preparer
    engine: EncoderEngine
    frames: int

    async def ends(self, data: bytes, options: Options) -> tuple[SegmentEnds, int]:
        """Where the segments of a video end, and the rows that the tower adds behind a video's frames.

        No ends: the video is one item. InvalidRequest for what is no video.
        """
        if not self.frames:
            return [], 0
        # A batch of others may be in the tower before the trial; afterwards the answer is there at once.
        extra_rows = await asyncio.wrap_future(self.engine.extra_video_rows())
        if extra_rows is None:
            return [], 0
        return await self.preparer.segments(data, options, self.frames, extra_rows), extra_rows
