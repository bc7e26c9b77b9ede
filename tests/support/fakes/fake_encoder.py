"""An encoder worker that follows a script, as a real gRPC server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from support.fakes.fake_workers import NAMESPACE, ROWS, WIDTH, FakeWorker
from triptych.protos import common_pb2, encoder_pb2, encoder_pb2_grpc
from triptych.protos.convert import plan_from_proto
from triptych.store.embedding_store import EmbeddingStore


class FakeEncoder(FakeWorker, encoder_pb2_grpc.EncoderServiceServicer):
    """Plans at once and saves to the real store. `gate` holds plans, `tower` holds runs, while cleared.

    It ends, and is started again, when it is at `ends_at[mm_hash]` ("plan", "tower") with such an item.
    """

    pool = "encoder"

    def __init__(self, store: EmbeddingStore) -> None:
        super().__init__()
        self.store = store
        self.jobs: list[encoder_pb2.EncodeJob] = []
        #: The metadata of each stream.
        self.metadata: list[dict[str, str | bytes]] = []
        self.media: list[bytes] = []
        self.runs = 0
        #: The items of these runs.
        self.run_items: list[str] = []
        self.cancelled = 0
        self.open = 0
        self.failures: list[encoder_pb2.JobFailed] = []
        self.ask_media_again = False
        self.ends_at: dict[str, str] = {}
        #: Seconds that the tower takes for an item, one after another; 0: no time.
        self.tower_seconds = 0.0
        self._turn = asyncio.Lock()
        #: An item's part of its batch; 0: not told.
        self.work_seconds = 0.0
        #: Of every audio file.
        self.frames = 400
        self.restarts: set[asyncio.Task[None]] = set()
        self.gate = asyncio.Event()
        self.tower = asyncio.Event()
        self.gate.set()
        self.tower.set()

    def add_to(self, server: Any) -> None:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(self, server)

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        self.open += 1
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for event in self._encode(requests):
                yield event
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _encode(self, requests: Any) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        messages = aiter(requests)
        job = (await anext(messages)).job
        self.jobs.append(job)
        media = b""
        while len(media) < job.media_bytes:
            media += (await anext(messages)).media
        self.media.append(media)
        if self.failures:
            yield encoder_pb2.EncodeEvent(failed=self.failures.pop(0))
            return
        await self.gate.wait()
        await self._end_at("plan", job.mm_hash)
        plan = fake_plan(job.mm_hash, self.namespace)
        if self.encoder_decoder:
            plan = cross_plan(job, self.namespace, self.frames)
        yield encoder_pb2.EncodeEvent(planned=plan)
        missing = 0
        if self.ask_media_again:
            self.ask_media_again = False
            missing = job.media_bytes
            yield encoder_pb2.EncodeEvent(need_media=encoder_pb2.NeedMedia())
        permitted = False
        while missing or not permitted:  # the permission may come before, between or after the frames
            message = await anext(messages)
            permitted |= message.HasField("run")
            if message.media:
                self.media.append(message.media)
                missing -= len(message.media)
        self.runs += 1
        self.run_items.append(job.mm_hash)
        await self._end_at("tower", job.mm_hash)
        await self.tower.wait()
        if self.tower_seconds:
            async with self._turn:
                await asyncio.sleep(self.tower_seconds)
        values = plan_from_proto(plan)
        await self.store.save(values, b"\x01" * values.nbytes, ttl=60.0, damaged_digest=job.damaged_digest)
        ready = encoder_pb2.ItemReady(
            plan=plan,
            encode_seconds=self.tower_seconds or 0.5,
            save_seconds=0.25,
            work_seconds=self.work_seconds,
        )
        yield encoder_pb2.EncodeEvent(ready=ready)
        await anext(messages, None)  # the proxy ends its half, too

    async def _end_at(self, stage: str, mm_hash: str) -> None:
        if self.ends_at.get(mm_hash) == stage:
            self.restarts.add(asyncio.create_task(self._restart()))
            await asyncio.Event().wait()

    async def _restart(self) -> None:
        await self.kill()
        await self.start()


def fake_plan(key: str, namespace: str = NAMESPACE) -> common_pb2.ItemPlan:
    return common_pb2.ItemPlan(
        mm_hash=key,
        namespace=namespace,
        modality="image",
        rows=ROWS,
        width=WIDTH,
        dtype="float32",
        length=ROWS,
        grid_thw=[1, 2, 2],
    )


def cross_plan(job: encoder_pb2.EncodeJob, namespace: str, frames: int) -> common_pb2.ItemPlan:
    """What an encoder-decoder model's encoder says of a text, or of a window of 3000 frames of audio."""
    plan = fake_plan(job.mm_hash, namespace)
    plan.modality, plan.length = job.modality, 0
    del plan.grid_thw[:]
    if job.modality == "audio":
        start = json.loads(job.processor_options or "{}").get("start_frame", 0)
        plan.grid_thw.extend([start, min(3000, frames - start), frames])
    return plan
