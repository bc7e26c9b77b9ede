"""The jobs of an encoder worker over fakes: leases in memory, an engine and a preparer that tests control."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from triptych.base.metrics import EncoderMetrics
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.encoder_worker.engine import TowerItem
from triptych.encoder_worker.job_spec import JobSpec
from triptych.encoder_worker.jobs.job import EncodeJob, Waiter
from triptych.encoder_worker.jobs.table import EncodeJobs, JobBounds, JobMetrics
from triptych.encoder_worker.media.preparer import VerifiedMedia
from triptych.encoder_worker.media.shared_clips import ClipHold
from triptych.encoder_worker.media.work import DecodeWork
from triptych.encoder_worker.scheduler import EncoderScheduler
from triptych.models.base import PreparedItem
from triptych.protos.convert import plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady
from triptych.registry.leases import OwnedBy

NAMESPACE = "ab" * 32
MODEL = "tiny"
ROWS, WIDTH = 2, 4


class FakeStore:
    """A store with the items in `stored`; it may be slow or fail."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.delay = 0.0
        self.error: Exception | None = None
        #: The keys of every look-up.
        self.asked: list[list[str]] = []

    async def look_up(self, keys: Sequence[tuple[str, str]], /) -> list[ItemPlan | None]:
        self.asked.append([key for key, _ in keys])
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        return [plan(key) if key in self.stored else None for key, _ in keys]


class FakeKeeper:
    """Leases by mm_hash, some of them held by another worker."""

    def __init__(self) -> None:
        self.owners: dict[str, OwnedBy] = {}
        self.held: list[str] = []

    async def acquire(self, mm_hash: str, **_: object) -> OwnedBy | None:
        if (owner := self.owners.get(mm_hash)) is None:
            self.held.append(mm_hash)
        return owner

    def drop(self, mm_hash: str) -> None:
        if mm_hash in self.held:
            self.held.remove(mm_hash)


class FakeEngine:
    """An engine that keeps batches and saves; the test ends them."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], Future[None]]] = []
        self.saves: list[tuple[str, str]] = []
        self.error: Exception | None = None

    def encode(self, batch: Sequence[TowerItem]) -> Future[None]:
        if self.error is not None:
            raise self.error
        done: Future[None] = Future()
        self.batches.append(([item.plan.mm_hash for item in batch], done))
        return done

    def save(self, output: EncoderOutput, damaged_digest: str = "") -> None:
        self.saves.append((output.plan.mm_hash, damaged_digest))


class FakePreparer:
    """A preparer whose items all have the same sizes; `error` fails them."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.prepared: list[bytes] = []
        self.layout: tuple[int, ...] = ()

    async def verify(self, spec: JobSpec, frames: Sequence[bytes]) -> VerifiedMedia:
        if self.error is not None:
            raise self.error
        return VerifiedMedia(b"".join(frames), {})

    def work(self, *, tenant: str = "", heavy: bool) -> DecodeWork:
        return DecodeWork(tenant=tenant, heavy=heavy)

    def hold(self, media: VerifiedMedia) -> None:
        return None

    async def prepare(
        self, media: VerifiedMedia, work: DecodeWork, hold: ClipHold | None = None
    ) -> PreparedItem:
        if self.error is not None:
            raise self.error
        self.prepared.append(media.data)
        return PreparedItem(ROWS, ROWS, (1, 1, ROWS), 1, {"pixels": torch.zeros(2)}, layout=self.layout)


class Jobs:
    """A job table over a real scheduler, with the events of every stream."""

    def __init__(self, bounds: JobBounds | None = None, *, tower_credit: int = 4) -> None:
        self.keeper = FakeKeeper()
        #: The events of the streams of each item.
        self.events: defaultdict[str, list[EncodeEvent]] = defaultdict(list)
        self.metrics = EncoderMetrics(MODEL)
        self.job_metrics = JobMetrics(self.metrics, MODEL)
        self.changed = asyncio.Event()
        self.scheduler = EncoderScheduler[EncodeJob](
            prepared_memory=1000, batch_patches=10, preparations=2, tower_credit=tower_credit
        )
        keeper: Any = self.keeper
        self.table = EncodeJobs(
            bounds or JobBounds(100), self.scheduler, keeper, self.job_metrics, self.changed
        )

    def waiter(self, key: str, events: list[EncodeEvent] | None = None, **changes: object) -> Waiter:
        """A stream that waits for the item, its events in `events` or the item's; without `JobStreams`."""
        job = self.table.open(spec(key, **changes))
        heard = self.events[key] if events is None else events
        waiter = Waiter(spec(key, **changes), job, time.monotonic() + 9, heard.append)
        job.waiters.append(waiter)
        return waiter

    def failures(self, code: str) -> float:
        """Failed jobs and streams with this error code."""
        labels = {"model_name": MODEL, "code": code}
        return self.metrics.registry.get_sample_value("triptych_encoder_failures_total", labels) or 0.0


def spec(key: str, **changes: object) -> JobSpec:
    fields: dict[str, Any] = {"media_bytes": 4, "timeout": 9.0, **changes}
    return JobSpec("job", "request", key, NAMESPACE, "image", {}, "", **fields)


def plan(key: str) -> ItemPlan:
    return ItemPlan(key, NAMESPACE, "image", ROWS, WIDTH, "float32", ROWS, grid_thw=(1, 1, ROWS))


def ready(key: str, *, already_stored: bool = False) -> EncodeEvent:
    return EncodeEvent(ready=ItemReady(plan=plan_to_proto(plan(key)), already_stored=already_stored))


def output(key: str) -> EncoderOutput:
    return EncoderOutput(plan(key), torch.zeros(ROWS, WIDTH))
