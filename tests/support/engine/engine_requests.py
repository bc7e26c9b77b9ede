"""Engine requests and an engine without a model, for tests of the scheduler and its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from support.engine.engine_events import End, kind
from triptych.base.types import FinishReason, ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import (
    ECConnectorOutput,
    ECConnectorScheduler,
    ECTransferConfig,
    EncoderOutput,
)
from triptych.ec_connector.connectors.memory import (
    MemoryConnectorScheduler,
    MemoryConnectorWorker,
    MemoryStore,
)
from triptych.pd_worker.core.admission import Admission, CrossLimits, SchedulerLimits
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.cross_kv_manager import CrossKVManager
from triptych.pd_worker.core.kv_cache.kv_cache_manager import BlockCopy, KVCacheManager, SwapManager
from triptych.pd_worker.core.kv_cache.state_slots import StateSlots
from triptych.pd_worker.core.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.core.scheduler import Scheduler

WIDTH = 4
FAR = 1e9
#: The store of the fixture `make`, in this process.
STORE = MemoryStore()


@dataclass
class CountingText:
    """Ends after `max_tokens`; the text is the token ids."""

    max_tokens: int
    finished: FinishReason | None = None
    stop_sequence: str = ""
    count: int = 0

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        self.count += 1
        if self.count >= self.max_tokens:
            self.finished = FinishReason.LENGTH
        return f"{token_id} ", self.finished

    def flush(self) -> str:
        return ""


def greedy(max_tokens: int) -> ResolvedSampling:
    return ResolvedSampling(max_tokens, 0, 0.0, 1.0, 0, 0, (), frozenset(), True, ())


def make_feature(
    name: str,
    offset: int,
    length: int,
    *,
    runs: tuple[tuple[int, int], ...] | None = None,
    atomic: bool = False,
) -> MMFeature:
    """An item of float32 rows of WIDTH elements; its mm_hash follows from `name`."""
    placement = Placement(offset, length, runs, atomic)
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    plan = ItemPlan(mm_hash, "n" * 64, "image", placement.num_embeds(), WIDTH, "float32", length, runs)
    return MMFeature(plan, placement)


def make_cross(name: str, rows: int, *, width: int = WIDTH) -> MMFeature:
    """What an encoder-decoder model attends to: `rows` rows of no place in the prompt."""
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    plan = ItemPlan(mm_hash, "n" * 64, "text", rows, width, "float32", 0)
    return MMFeature(plan, Placement(0, 0))


def make_request(
    name: str,
    prompt: int | Sequence[int],
    features: Sequence[MMFeature] = (),
    *,
    max_tokens: int = 1,
    arrival: float = 0.0,
    deadline: float = FAR,
    ready: Sequence[str] | None = None,
    proxy_id: str = "proxy",
    attempt: int = 1,
    root: bytes = b"r" * 32,
) -> EngineRequest:
    """`ready` None: all items are stored already."""
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    keys = [feature.mm_hash for feature in features] if ready is None else ready
    return EngineRequest(
        request_id=name,
        attempt=attempt,
        proxy_id=proxy_id,
        arrival=arrival,
        deadline=deadline,
        prompt_token_ids=tokens,
        features=tuple(features),
        ready=frozenset(keys),
        positions=torch.arange(len(tokens))[None],
        position_delta=0,
        sampling=greedy(max_tokens),
        prefix_root=root,
        output=CountingText(max_tokens),
    )


@dataclass
class ModellessEngine:
    """A scheduler, an in-process connector and no model: every sampled token is `token`."""

    store: MemoryStore
    num_blocks: int = 64
    block_size: int = 4
    budget: int = 16
    max_num_seqs: int = 8
    capacity: int = 1 << 20
    max_model_len: int = 256
    prefix_caching: bool = True
    #: Requests that wait for items are prefilled in part.
    overlap: bool = True
    #: An encoder-decoder model's engine.
    cross: bool = False
    #: Host blocks for preempted requests; 0: they are recomputed.
    host_blocks: int = 0
    #: State slots of recurrent layers, and snapshots beside them; 0: the model has none.
    slots: int = 0
    snapshots: int = 0
    host_slots: int = 0
    token: int = 7
    #: Asked at each copy of blocks between device and host.
    copy_fails: Callable[[], bool] = lambda: False
    now: float = 0.0
    events: list[EngineEvent] = field(default_factory=list)
    resident: dict[str, EncoderOutput] = field(default_factory=dict)
    connector: ECConnectorScheduler = field(init=False)
    #: What stands in each KV block, and in each host block, by its offset.
    content: dict[int, dict[int, Any]] = field(default_factory=dict)
    host: dict[int, dict[int, Any]] = field(default_factory=dict)
    #: The last token's content in each state slot, and in each host slot.
    states: dict[int, Any] = field(default_factory=dict)
    host_states: dict[int, Any] = field(default_factory=dict)
    #: What stands there for each request's tokens, as far as it has been asked for.
    _known: dict[EngineRequest, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = ECTransferConfig(connector="memory", store=self.store)
        self.connector = MemoryConnectorScheduler(config)
        self.worker = MemoryConnectorWorker(config)
        self.kv = KVCacheManager(
            self.num_blocks,
            self.block_size,
            prefix_caching=self.prefix_caching,
            states=StateSlots(self.slots, self.snapshots) if self.slots else None,
        )
        self.cache = EncoderCache(self.capacity)
        self.admission = Admission(self.capacity)
        host_slots = self.host_slots if self.slots else None
        self.swap = SwapManager(self.host_blocks, host_slots) if self.host_blocks else None
        self.tables = CrossKVManager(self.kv.pool, self.block_size, self.swap) if self.cross else None
        self.items = ItemTracker(self.cache, self.admission, self.connector, self.tables)
        limits = SchedulerLimits(self.max_num_seqs, self.budget, self.max_model_len)
        cross = CrossLimits(WIDTH, 64, self.num_blocks, self.block_size) if self.cross else None
        self.scheduler = Scheduler(
            limits, self.kv, self.items, cross, self.swap, overlap_prefill=self.overlap
        )

    @property
    def idle(self) -> bool:
        return not self.scheduler.num_running + self.scheduler.num_waiting

    def arrive(self, *features: MMFeature) -> None:
        """Their embeddings are stored, and this worker is told so."""
        publish(self.store, *features)
        self.scheduler.mark_ready([feature.mm_hash for feature in features], self.now)

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.check(request)
            self.scheduler.add(request, self.now)

    def step(
        self,
        *,
        error: Exception | None = None,
        seconds: Callable[[SchedulerOutput], float] = lambda output: 0.0,
    ) -> SchedulerOutput:
        """One step, which takes so many `seconds`; asserts that all rows that chunks consume are resident."""
        output = self.scheduler.schedule(self.now)
        result = self.run(output)
        self.now += seconds(output)
        result.error = error
        self.events += self.scheduler.update(output, result, self.now)
        return output

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for key in output.evicted:
            self.resident.pop(key, None)
        assert output.ec_connector_metadata is not None
        self.worker.start_load_caches(output.ec_connector_metadata, self.resident)
        swapped_out = self._copy(output.swap_out, self.content, self.host)
        for copy in output.states_out:
            self.host_states[copy.target] = self.states[copy.source] if swapped_out else "spoiled"
        swapped_in = self._copy(output.swap_in, self.host, self.content)
        for copy in output.states_in:
            self.states[copy.target] = self.host_states[copy.source] if swapped_in else "spoiled"
        for copy in output.states_restored:
            self.states[copy.target] = self.states[copy.source]
        chunks = output.computable(swapped_in=swapped_in)
        for projection in output.projections:
            assert self.resident[projection.mm_hash].data.shape[0] == projection.rows
            for index, block in enumerate(projection.block_ids):
                self.content[block] = {0: (projection.mm_hash, index)}
        for chunk in chunks:
            self._check_tables(chunk)
            if self.slots:
                self._check_state(chunk)
            for rows in chunk.rows:
                data = self.resident[rows.mm_hash].data
                assert data[rows.first : rows.first + rows.count].shape[0] == rows.count
        return ModelRunnerOutput(
            swapped_out=swapped_out,
            swapped_in=swapped_in,
            sampled=[self.token for chunk in chunks if chunk.samples],
            ec_connector_output=self.finished(),
        )

    def _copy(
        self,
        copies: Sequence[BlockCopy],
        source: dict[int, dict[int, Any]],
        target: dict[int, dict[int, Any]],
    ) -> bool:
        """Whether the blocks are copied; those of a failed copy hold what nobody may read."""
        fails = bool(copies) and self.copy_fails()
        for copy in copies:
            target[copy.target] = {0: "spoiled"} if fails else dict(source[copy.source])
        return not fails

    def _check_tables(self, chunk: ScheduledChunk) -> None:
        """The chunk finds its cross table and all tokens before it in its blocks, and writes its own."""
        request = chunk.state.request
        if self.cross:
            assert chunk.cross_length == request.features[0].plan.rows
            for index, block in enumerate(chunk.cross_blocks):
                assert self.content[block] == {0: (request.features[0].mm_hash, index)}
        for position, written in enumerate(self._contents(request, chunk.end)):
            block = chunk.block_ids[position // self.block_size]
            offset = position % self.block_size
            if position >= chunk.start:
                # A block's first token begins a new life of it.
                self.content[block] = {**(self.content[block] if offset else {}), offset: written}
            else:
                assert self.content[block][offset] == written, f"token {position} is another request's"

    def _check_state(self, chunk: ScheduledChunk) -> None:
        """The chunk finds the state behind the token before it in its slot, and leaves its own last one."""
        contents = self._contents(chunk.state.request, chunk.end)
        if chunk.start:
            assert self.states[chunk.slot] == contents[chunk.start - 1], "the state is another request's"
        self.states[chunk.slot] = contents[-1]
        for at, index in chunk.snapshots:
            assert index >= self.slots > chunk.slot and chunk.start < at <= chunk.end
            self.states[index] = contents[at - 1]

    def _contents(self, request: EngineRequest, end: int) -> list[int]:
        """What stands in the KV cache for each token: of all before it, and of the rows merged over them."""
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        keys = tuple(feature.mm_hash for feature in request.features) if self.cross else ()
        contents = self._known.setdefault(request, [])
        content = contents[-1] if contents else hash((request.prefix_root, keys))
        for position in range(len(contents), end):
            rows = [
                (feature.mm_hash, position - feature.placement.offset)
                for feature in request.features
                if feature.placement.offset <= position < feature.placement.end
            ]
            content = hash((content, tokens[position], *rows))
            contents.append(content)
        return contents[:end]

    def finished(self) -> ECConnectorOutput:
        return self.worker.get_finished()

    def run_out(self, limit: int = 400) -> list[SchedulerOutput]:
        """Steps until no request is left."""
        outputs = []
        while not self.idle:
            outputs.append(self.step())
            assert len(outputs) < limit, "no progress"
        return outputs

    def of(self, body: str) -> list[Any]:
        """The events with such a body."""
        return [event for event in self.events if kind(event) == body]

    def assert_at_rest(self) -> None:
        """Nobody holds anything any more."""
        assert self.kv.num_used == 0
        assert self.kv.states is None or self.kv.states.num_used == 0
        assert self.tables is None or self.tables.num_tables == 0
        assert self.swap is None or self.swap.num_used == 0
        assert self.cache.references == 0
        assert self.admission.reserved == 0
        assert not list(self.items.table)


#: The fixture `make`: an engine without a model over an empty store, with these options. Those that have
#: answered all requests have to be at rest when the test ends.
Make = Callable[..., ModellessEngine]


def publish(store: MemoryStore, *features: MMFeature) -> None:
    """Puts made-up rows of these items into an in-process store."""
    for feature in features:
        plan = feature.plan
        store[plan.mm_hash] = EncoderOutput(plan, torch.zeros(plan.rows, plan.width))


def shares(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) of each chunk."""
    return [(chunk.state.request.request_id, chunk.start, chunk.count) for chunk in output.chunks]


def finished(engine: ModellessEngine) -> dict[str, End]:
    return {event.request_id: End(event.finished) for event in engine.of("finished")}


def names(events: list[EngineEvent]) -> list[str]:
    return [event.request_id for event in events]


def bare_decoder() -> Any:
    """A decoder of which a batch needs sizes alone."""
    return SimpleNamespace(
        geometry=SimpleNamespace(position_rows=1),
        device=torch.device("cpu"),
        dtype=torch.float32,
        bias=None,
        layer_rules=(),
        takes_inputs=False,
    )
