"""The planner of a video's segments, over a tower and a preparer that the test holds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest

from triptych.encoder_worker.jobs.segments import SegmentPlanner

ENDS = [(30, 60), (45, 90)]


class Parts:
    """Engine, preparer and places in one; `asked` is what the planner wanted of them."""

    def __init__(self, extra_rows: int | None) -> None:
        self.extra_rows = extra_rows
        self.asked: list[Any] = []

    def extra_video_rows(self) -> Future[int | None]:
        self.asked.append("tower")
        future: Future[int | None] = Future()
        future.set_result(self.extra_rows)
        return future

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        self.asked.append(f"place of {tenant}")
        yield
        self.asked.append("place given back")

    def work(self, **given: Any) -> str:
        return f"work of {given['tenant']}"

    async def segments(self, data: bytes, options: Any, frames: int, extra_rows: int, work: str) -> Any:
        self.asked.append((data, frames, extra_rows, work))
        return ENDS

    def planner(self, frames: int) -> SegmentPlanner:
        parts: Any = self
        return SegmentPlanner(parts, parts, frames, parts)


@pytest.mark.parametrize("rows", [0, 2])
async def test_a_tower_whose_frames_are_apart_has_its_videos_divided(rows: int) -> None:
    parts = Parts(rows)
    assert await parts.planner(30).ends(b"clip", {}, "t") == (ENDS, rows)
    assert parts.asked == ["tower", "place of t", (b"clip", 30, rows, "work of t"), "place given back"]


async def test_a_video_is_one_item_where_rows_depend_on_neighbours_or_nobody_wants_segments() -> None:
    parts = Parts(None)
    assert await parts.planner(30).ends(b"clip", {}) == ([], 0)
    assert parts.asked == ["tower"]
    parts = Parts(0)
    assert await parts.planner(0).ends(b"clip", {}) == ([], 0)
    assert parts.asked == []
