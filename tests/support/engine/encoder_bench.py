"""An encoder worker in this process on a real gRPC server, and a client that speaks as the proxy does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from grpc import aio
from PIL import Image

from support.waiting import until, within
from triptych.base import hashing
from triptych.base.config import EncoderConfig
from triptych.base.metrics import EncoderMetrics
from triptych.base.rpc.channels import MEDIA_FRAME_BYTES, make_channel, make_server
from triptych.base.tracing.tracer import Tracer
from triptych.base.types import ItemPlan
from triptych.ec_connector.connectors.host_buffers import DTYPES
from triptych.encoder_worker.service import EncoderWorker, WorkerIdentity
from triptych.models.base import EncoderSide, PreparedItem
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.protos.error_replies import ErrorReplies
from triptych.store.bulk import Loaded
from triptych.store.embedding_store import EmbeddingStore

NAMESPACE = "ab" * 32


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


class WatchedTower(EncoderSide):
    """A real encoder side that counts, and that a test can hold shut or let fail."""

    def __init__(self, inner: EncoderSide) -> None:
        self.inner = inner
        self.modality = inner.modality  # type: ignore[misc]
        self.width, self.dtype, self.device, self.module = (
            inner.width,
            inner.dtype,
            inner.device,
            inner.module,
        )
        self.batches: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.poison: set[int] = set()

    @classmethod
    def load(cls, path: Any, **options: Any) -> EncoderSide:
        raise NotImplementedError

    def preprocess(self, media: Any, options: Mapping[str, Any]) -> PreparedItem:
        return self.inner.preprocess(media, options)

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        self.batches.append(len(items))
        self.entered.set()
        assert self.open.wait(50)
        if self.poison & {item.rows for item in items}:
            raise RuntimeError("poisoned")
        return self.inner.encode(items)


@dataclass
class Bench:
    """One worker under test."""

    worker: EncoderWorker
    tower: WatchedTower
    metrics: EncoderMetrics
    address: str
    stub: encoder_pb2_grpc.EncoderServiceStub
    incarnation: str

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        )

    async def until(self, name: str, value: float) -> None:
        """Waits until a metric has the value."""
        await until(lambda: self.metric(name) == value, f"{name} {value}")


@asynccontextmanager
async def bench(
    encoder: EncoderSide,
    store: EmbeddingStore,
    url: str,
    *,
    lease_term: float = 5.0,
    tracer: Tracer | None = None,
    **flags: Any,
) -> AsyncIterator[Bench]:
    """A worker on a free port over the store."""
    server = make_server(interceptors=[ErrorReplies()])
    port = server.add_insecure_port("127.0.0.1:0")
    address, incarnation = f"127.0.0.1:{port}", uuid.uuid4().hex
    config = EncoderConfig(store=url, **flags)
    identity = WorkerIdentity(NAMESPACE, "cd" * 32, "tiny", address, incarnation)
    metrics, tower = EncoderMetrics("tiny"), WatchedTower(encoder)
    worker = EncoderWorker(
        config, identity, tower, store, metrics=metrics, lease_term=lease_term, tracer=tracer
    )
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(worker.servicer, server)
    worker.start()
    await server.start()
    channel = make_channel(address)
    try:
        # A busy machine may take longer than the tenth of a second that a channel gives one try.
        await within("the worker's port", channel.channel_ready())
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        yield Bench(worker, tower, metrics, address, stub, incarnation)
    finally:
        tower.open.set()
        await channel.close()
        await server.stop(None)
        await worker.stop()


#: Opens a bench over the test's encoder and store, with these flags.
OpenBench = Callable[..., AbstractAsyncContextManager[Bench]]


class HasStub(Protocol):
    """Where jobs are sent."""

    @property
    def stub(self) -> encoder_pb2_grpc.EncoderServiceStub: ...


@dataclass
class Job:
    """One Encode stream, driven step by step."""

    bench: HasStub
    media: bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = NAMESPACE
    modality: str = "image"
    metadata: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self.key = hashing.mm_hash(
            self.media,
            namespace=self.namespace,
            modality=self.modality,
            processor_options=self.options,
            salt=self.salt,
        )
        self.call = self.bench.stub.Encode(timeout=50, metadata=self.metadata or None)

    async def start(self) -> Job:
        """Sends the job."""
        fields = {
            "job_id": "job",
            "mm_hash": self.key,
            "namespace": self.namespace,
            "modality": self.modality,
            "processor_options": json.dumps(self.options) if self.options else "",
            "salt": self.salt,
            "media_bytes": len(self.media),
            "timeout": 50.0,
        }
        job = encoder_pb2.EncodeJob(**{**fields, **self.changes})
        await self.call.write(encoder_pb2.EncodeRequest(job=job))
        return self

    async def send_media(self) -> None:
        """Sends all frames; a worker that has ended the job already, as its events tell, takes none."""
        for start in range(0, len(self.media), MEDIA_FRAME_BYTES):
            frame = self.media[start : start + MEDIA_FRAME_BYTES]
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await self.call.write(encoder_pb2.EncodeRequest(media=frame))

    async def run(self) -> None:
        """Gives permission."""
        await self.call.write(encoder_pb2.EncodeRequest(run=encoder_pb2.RunJob()))

    async def event(self) -> encoder_pb2.EncodeEvent:
        """The next event."""
        event: encoder_pb2.EncodeEvent = await self.call.read()
        return event

    async def planned(self) -> Job:
        """Starts, sends the media and waits for the plan."""
        await self.start()
        await self.send_media()
        event = await self.event()
        assert event.WhichOneof("body") == "planned", event
        self.rows = event.planned.rows
        return self

    async def last(self) -> encoder_pb2.EncodeEvent:
        """The event that ends the stream; media are sent again whenever they are asked for."""
        while True:
            event = await self.event()
            match event.WhichOneof("body"):
                case "need_media":
                    await self.send_media()
                case "ready" | "failed":
                    return event

    async def finished(self) -> encoder_pb2.EncodeEvent:
        """Permission, then the last event."""
        await self.run()
        return await self.last()


async def stored_rows(store: EmbeddingStore, job: Job) -> tuple[ItemPlan, torch.Tensor]:
    """What the job has saved."""
    [plan] = await store.look_up([(job.key, job.namespace)])
    assert plan is not None
    loaded = await store.load(plan, lambda nbytes: memoryview(bytearray(nbytes)))
    assert isinstance(loaded, Loaded)
    assert isinstance(loaded.body, memoryview)
    return plan, torch.frombuffer(loaded.body, dtype=DTYPES[plan.dtype]).view(plan.rows, plan.columns)
