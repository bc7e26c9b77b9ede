"""Background tasks: kept until they end, cancelled where they are left."""

from __future__ import annotations

import asyncio

from triptych.encoder_worker.jobs.loop import BackgroundTasks


async def test_tasks_run_and_those_left_are_cancelled() -> None:
    tasks, ended = BackgroundTasks(), list[str]()

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    tasks.start(work("short", 0))
    tasks.start(work("long", 60))
    await asyncio.sleep(0.01)
    assert ended == ["short"]
    await tasks.cancel()
    assert ended == ["short", "long"]
