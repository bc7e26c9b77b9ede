"""A job table and a PD scheduler full of work, for tests of what one more event costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.base.types import FinishReason, ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import ECConnectorOutput, ECTransferConfig
from triptych.ec_connector.connectors.memory import MemoryConnectorScheduler
from triptych.ec_connector.metadata import TransferMetadata
from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.limits import SchedulerLimits
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, StartPlan, StartRun
from triptych.proxy.encoders.job_table import EncoderJobTable

SPACE = "n"
ITEMS_OF_A_REQUEST = 16
ENCODERS = 4
ROWS = 3
SEQUENCES = 8


class FullTable:
    """`items` jobs of requests of 16 items each, at four encoders with few credits.

    `step` takes one item through its whole life in the table and puts another one in its place.
    """

    def __init__(self, items: int) -> None:
        self.jobs = EncoderJobTable(8)
        self.jobs.set_encoders(EncoderSlot(f"e{i}", (SPACE,), 4, 2) for i in range(ENCODERS))
        self._made = 0
        self.ended = 0
        #: Jobs in preprocessing and in a tower, the oldest first.
        self._planning: list[EncoderJob] = []
        self._running: list[EncoderJob] = []
        for _ in range(items):
            self._want()
        self._pump()
        for _ in range(ITEMS_OF_A_REQUEST):
            self.step()

    def step(self) -> None:
        """The oldest item in preprocessing is planned and admitted, runs, is published and loaded."""
        self._want()
        self._pump()
        job = self._planning.pop(0)
        waiters = sorted(job.waiters)
        self.jobs.planned(job.try_id, _plan(job.mm_hash))
        self._pump()
        for request in waiters:
            self.jobs.admit(request)
        self._pump()
        job = self._running.pop(0)
        self.jobs.ready(job.try_id, _plan(job.mm_hash))
        self._pump()
        for request in waiters:
            self.jobs.loaded(request, job.mm_hash)
        self._pump()
        self.ended += 1

    def _want(self) -> None:
        """Another item, of the request that is not full yet."""
        request = f"r{self._made // ITEMS_OF_A_REQUEST}"
        self.jobs.want(f"k{self._made}", request, SPACE)
        self._made += 1

    def _pump(self) -> None:
        for action in self.jobs.pump(1.0):
            if isinstance(action, StartPlan):
                self._planning.append(action.job)
            elif isinstance(action, StartRun):
                self._running.append(action.job)


class PlannedTable:
    """`items` jobs that all have their plan and wait for the admission of their requests."""

    def __init__(self, items: int) -> None:
        self.jobs = EncoderJobTable(1 << 20)
        self.jobs.set_encoders([EncoderSlot("e1", (SPACE,), items, 2)])
        self._left = items // ITEMS_OF_A_REQUEST
        for index in range(items):
            self.jobs.want(f"k{index}", f"r{index // ITEMS_OF_A_REQUEST}", SPACE)
        for action in self.jobs.pump(1.0):
            self.jobs.planned(action.job.try_id, _plan(action.job.mm_hash))

    def step(self) -> None:
        """A request is admitted, what may run runs, and the request ends."""
        self._left -= 1
        request = f"r{self._left}"
        self.jobs.admit(request)
        self.jobs.pump(1.0)
        self.jobs.end_attempt(request)
        self.jobs.leave(request)
        self.jobs.pump(1.0)


def _plan(key: str, rows: int = 1) -> ItemPlan:
    return ItemPlan(key, SPACE, "image", rows, 1, "float32", rows)


def item_key(request: int, item: int) -> str:
    """The mm_hash of an item of one of the scheduler's waiting requests."""
    return f"{request:032x}{item:032x}"


class _Text:
    """An output that never ends by itself."""

    finished: FinishReason | None = None

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        return "", None

    def flush(self) -> str:
        return ""


class FullScheduler:
    """A PD scheduler with `requests` waiting requests of 16 items each and eight running ones of text.

    `reserve` says for how many of them there is room; `stored` whether their items are in the store.
    """

    def __init__(self, requests: int, *, stored: bool, reserve: int | None = None) -> None:
        room = requests if reserve is None else reserve
        capacity = room * ITEMS_OF_A_REQUEST * _plan("", ROWS).nbytes
        self.connector = MemoryConnectorScheduler(ECTransferConfig(connector="memory"))
        items = ItemTracker(EncoderCache(capacity), Admission(capacity), self.connector)
        limits = SchedulerLimits(SEQUENCES, 4096, 1 << 20)
        self.scheduler = Scheduler(limits, KVCacheManager(1 << 15, 16), items)
        for index in range(SEQUENCES):
            self.scheduler.add(_request(f"text-{index}", float(index), ()), 0.0)
        self.step()
        for index in range(requests):
            keys = tuple(item_key(index, item) for item in range(ITEMS_OF_A_REQUEST))
            self.scheduler.add(_request(f"r{index}", float(SEQUENCES + index), keys, stored=stored), 0.0)
        for _ in range(4):
            self.step()

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule(0.0)

    def step(self) -> None:
        self.update(self.schedule())

    def update(self, output: SchedulerOutput) -> None:
        """The worker has done all that the step asked for."""
        metadata = output.ec_connector_metadata
        assert isinstance(metadata, TransferMetadata)
        moved = ECConnectorOutput(
            fetched={fetch.plan.mm_hash: 0.0 for fetch in metadata.fetches},
            loaded=[copy.mm_hash for copy in metadata.moves],
        )
        sampled = [7 for chunk in output.chunks if chunk.samples]
        self.scheduler.update(output, ModelRunnerOutput(sampled=sampled, ec_connector_output=moved), 0.0)


class TextScheduler:
    """A PD scheduler with `running` decoding requests of text, and `waiting` ones for which there is no slot.

    `step` is all that the engine's thread does in a step but the model and the metrics.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.connector = MemoryConnectorScheduler(ECTransferConfig(connector="memory"))
        items = ItemTracker(EncoderCache(1), Admission(1), self.connector)
        limits = SchedulerLimits(running, 4096, 1 << 20)
        self.scheduler = Scheduler(limits, KVCacheManager(1 << 15, 16), items)
        for index in range(running + waiting):
            self.scheduler.add(_request(f"text-{index}", float(index), ()), 0.0)
        for _ in range(4):
            self.step()

    def step(self) -> None:
        output = self.scheduler.schedule(0.0)
        sampled = [7 for chunk in output.chunks if chunk.samples]
        self.scheduler.update(output, ModelRunnerOutput(sampled=sampled), 0.0)
        self.scheduler.collect_stats()


def _request(name: str, arrival: float, keys: Sequence[str], *, stored: bool = False) -> EngineRequest:
    prompt = [1] * (1 + ROWS * len(keys) + 1)
    features = tuple(
        MMFeature(_plan(key, ROWS), Placement(1 + ROWS * index, ROWS)) for index, key in enumerate(keys)
    )
    return EngineRequest(
        request_id=name,
        attempt=1,
        proxy_id="proxy",
        arrival=arrival,
        deadline=1e9,
        prompt_token_ids=prompt,
        features=features,
        ready=frozenset(keys if stored else ()),
        positions=torch.arange(len(prompt))[None],
        position_delta=0,
        sampling=ResolvedSampling(1 << 20, 0, 0.0, 1.0, 0, 0, (), frozenset(), True, ()),
        prefix_root=b"r" * 32,
        output=_Text(),
    )
