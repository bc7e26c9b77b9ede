"""Media in an encoder worker: one budget, taken before frames are read; who finds no room waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, OpenBench, png
from support.waiting import until
from triptych.base.rpc.channels import MEDIA_FRAME_BYTES
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.protos import encoder_pb2


def media(seed: int, size: int) -> bytes:
    """A picture with bytes behind its end, which decoders do not read."""
    data = png(picture(seed, 64, 64))
    return data + bytes(size - len(data))


def watched(b: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes held at every preparation."""
    held: list[int] = []
    prepare = b.worker._preparer.prepare

    async def note(*given: Any) -> Any:
        held.append(b.worker.media.nbytes)
        return await prepare(*given)

    monkeypatch.setattr(b.worker._preparer, "prepare", note)
    return held


SIZE = 600 << 10


@pytest.mark.parametrize("limit", [2 * SIZE, 3 * SIZE - 1, SIZE - 1, 1])
async def test_media_never_exceed_their_budget_and_every_job_is_planned(open_bench, monkeypatch, limit):
    """Sums equal to the budget, and items above it, which have it alone."""
    async with open_bench(encoder_media_memory=limit) as b:
        held = watched(b, monkeypatch)
        jobs = [Job(b, media(seed, SIZE)) for seed in range(8)]
        for job in await asyncio.gather(*(job.planned() for job in jobs)):
            assert (await job.finished()).WhichOneof("body") == "ready"
        assert len(held) == 8
        assert max(held) <= max(limit, SIZE)
        assert b.worker.media.nbytes == 0


async def test_without_room_no_frame_is_read(open_bench: OpenBench) -> None:
    async with open_bench(encoder_media_memory=SIZE) as b:
        # Its sender stops in the middle: what holds the room is not whole yet.
        first = await Job(b, media(1, SIZE)).start()
        await first.call.write(_frame(first.media[:MEDIA_FRAME_BYTES]))
        await until(lambda: b.worker.media.nbytes == SIZE)
        second = await Job(b, media(2, 40 * SIZE)).start()
        sending = asyncio.create_task(second.send_media())
        # Its job is open, and its frames fill the stream's window.
        await until(lambda: len(b.worker.jobs) == 2)
        assert b.worker.media.nbytes == SIZE
        for start in range(MEDIA_FRAME_BYTES, SIZE, MEDIA_FRAME_BYTES):
            assert not sending.done()
            await first.call.write(_frame(first.media[start : start + MEDIA_FRAME_BYTES]))
        for job in (first, second):
            assert (await job.event()).WhichOneof("body") == "planned"
        await sending
        for job in (first, second):
            assert (await job.finished()).WhichOneof("body") == "ready"


@pytest.mark.parametrize("end", ["cancelled", "other bytes", "too many bytes", "found in the store"])
async def test_jobs_that_end_early_give_their_room_back(open_bench: OpenBench, end: str) -> None:
    async with open_bench(encoder_media_memory=SIZE) as b:
        first = Job(b, media(1, SIZE))
        if end == "cancelled":
            await first.start()
            await first.call.write(_frame(first.media[:MEDIA_FRAME_BYTES]))
            await until(lambda: b.worker.media.nbytes == SIZE)
            waiting = await Job(b, media(3, SIZE)).start()
            await until(lambda: len(b.worker.jobs) == 2)
            waiting.call.cancel()
            first.call.cancel()
        elif end == "found in the store":
            await (await first.planned()).finished()
            again = await Job(b, first.media).start()
            assert (await again.last()).ready.already_stored
        else:
            first.media = media(2, SIZE) if end == "other bytes" else first.media + b"x"
            if end == "too many bytes":
                first.changes = {"media_bytes": SIZE}
            await first.start()
            await first.send_media()
            assert (await first.last()).WhichOneof("body") == "failed"
        await until(lambda: b.worker.media.nbytes == 0)
        assert (await (await Job(b, media(9, SIZE)).planned()).finished()).WhichOneof("body") == "ready"


async def test_media_asked_for_again_take_room_again(open_bench, monkeypatch):
    async with open_bench(encoder_media_memory=SIZE, prepared_memory=1) as b:
        held = watched(b, monkeypatch)
        jobs = [await Job(b, media(seed, SIZE)).planned() for seed in range(4)]
        for job in jobs:
            await job.run()
        assert {event.WhichOneof("body") for event in await asyncio.gather(*(j.last() for j in jobs))} == {
            "ready"
        }
        assert len(held) > 4
        assert max(held) <= SIZE
        assert b.worker.media.nbytes == 0


async def test_who_waits_comes_in_order_and_re_encodes_first() -> None:
    budget = MediaBudget(10)
    order: list[str] = []
    held = await budget.acquire(10)

    async def one(name: str, nbytes: int, *, first: bool = False) -> None:
        room = await budget.acquire(nbytes, first=first)
        order.append(name)
        await asyncio.sleep(0)
        room.release()
        room.release()

    works = [one("large", 25), one("small", 1), one("again", 10, first=True)]
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.sleep(0)
    held.release()
    await asyncio.gather(*tasks)
    assert order == ["again", "large", "small"]
    assert budget.nbytes == 0


def _frame(data: bytes) -> encoder_pb2.EncodeRequest:

    return encoder_pb2.EncodeRequest(media=data)
