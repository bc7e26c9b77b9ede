"""The trial that tells whether a tower's videos may be divided: asked for by streams, made by the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fakes.encoder_engine import Bench, SlowTower, item


async def test_who_asks_about_segments_may_leave_while_a_batch_is_in_the_tower() -> None:
    tower = SlowTower()
    tower.extra_video_rows = lambda: 2  # type: ignore[method-assign]
    with Bench(tower) as bench:
        bench.encode([item("a")])
        bench.take(3)
        bench.encode([item("b")])
        assert await asyncio.to_thread(tower.in_second.wait, 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(bench.engine.extra_video_rows()), 0.01)
        tower.let_go.set()
        asked = asyncio.wrap_future(bench.engine.extra_video_rows())
        assert await asyncio.wait_for(asked, 30) == 2
        bench.take(3)
        bench.encode([item("c")])
        assert {told.mm_hash for told in bench.take(3)} >= {"c"}
        assert not bench.engine.beat.dead


def test_a_trial_of_segments_that_has_failed_is_made_again() -> None:
    answers: list[Any] = [RuntimeError("out of memory"), 2]

    def trial() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with Bench() as bench:
        bench.tower.extra_video_rows = trial  # type: ignore[method-assign]
        assert bench.engine.extra_video_rows().result(30) is None
        assert [bench.engine.extra_video_rows().result(30) for _ in range(2)] == [2, 2]
    assert answers == []
