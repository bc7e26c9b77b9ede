"""A PD worker in virtual time: its real scheduler, caches and load table, with a delay for every step.

It is `pd_worker/engine.py`'s loop. Simpler than there: requests are taken in beside each other, however many
they are, outputs have a known length, and host buffers are never short, since admission has seen to that.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from triptych.base.errors import RequestError
from triptych.base.types import FinishReason
from triptych.ec_connector.base import ECConnectorMetadata, ECConnectorOutput, ECTransferConfig
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.metadata import Fetch, LoadId, Reports, TransferMetadata
from triptych.pd_worker.core.admission import Admission, SchedulerLimits
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.protos import pd_pb2
from triptych.protos.convert import in_state
from triptych.registry.matching import BOTH, PREFILL
from triptych_bench.simulator.cluster.context import ByteLru, SimulationContext
from triptych_bench.simulator.cluster.loop import FifoLock, VirtualTimer
from triptych_bench.simulator.cluster.requests import SimulatedRequest
from triptych_bench.simulator.costs.costs import EncoderCosts, step_work

if TYPE_CHECKING:
    from triptych_bench.simulator.cluster.transport import SimulatedLink

#: As in the worker: the longest sequence where neither flag nor checkpoint says less, and requests that it
#: holds beside those that run.
_LONGEST, _MAX_WAITING = 32768, 1024
_NO_TRANSFERS = ECConnectorOutput()


class CountedOutput:
    """An output of `length` tokens without text; every token is `token`."""

    __slots__ = ("finished", "left", "token")
    stop_sequence = ""

    def __init__(self, length: int, token: int) -> None:
        self.left, self.token = length, token
        self.finished: FinishReason | None = None

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        self.left -= 1
        if self.left <= 0:
            self.finished = FinishReason.LENGTH
        return "", self.finished

    def flush(self) -> str:
        return ""


class StepTower:
    """The tower of a replica that encodes inside its engine's step, as vLLM does: the step that reaches a
    picture's placeholder encodes it first, and the sequences that decode wait. Embeddings are kept up to
    `capacity` bytes.
    """

    def __init__(self, costs: EncoderCosts, capacity: int) -> None:
        self._costs = costs
        self._cache = ByteLru(capacity)

    def seconds(self, chunks: Iterable[ScheduledChunk]) -> float:
        """Of the pictures that these chunks are the first to reach, in one batch."""
        fresh = [
            math.prod(feature.plan.grid_thw)
            for chunk in chunks
            for feature in chunk.state.request.features
            if feature.placement.offset < chunk.start + chunk.count
            and feature.placement.offset + feature.placement.length > chunk.start
            and self._cache.put(feature.plan)
        ]
        return self._costs.tower(len(fresh), sum(fresh))


class SimulatedLoads:
    """The connector's worker role: fetches take their time, moves do not; what has ended is in `reports`."""

    def __init__(self, context: SimulationContext, reports: Reports) -> None:
        self._loop, self._costs, self._store = context.loop, context.costs.pd, context.store
        self._reports = reports
        self._under_way: dict[LoadId, VirtualTimer] = {}
        self._landed: set[LoadId] = set()

    @property
    def held(self) -> int:
        """Host copies, and loads under way."""
        return len(self._landed) + len(self._under_way)

    def start(self, metadata: ECConnectorMetadata | None) -> None:
        """Carries the step's orders out."""
        assert isinstance(metadata, TransferMetadata)
        for copy in metadata.drops:
            self._landed.discard(copy)
            if timer := self._under_way.pop(copy, None):
                timer.cancel()
            self._reports.forget(copy)
        for fetch in metadata.fetches:
            self._fetch(fetch)
        for copy in metadata.moves:
            if copy in self._landed:
                self._reports.loaded(copy)
            else:
                self._reports.failed(copy, "its host copy is gone")

    def _fetch(self, fetch: Fetch) -> None:
        copy = LoadId(fetch.plan.mm_hash, fetch.generation)
        plan, started = self._store.get(copy.mm_hash), self._loop.now

        def done() -> None:
            self._under_way.pop(copy, None)
            if plan is None:
                self._reports.failed(copy, "no such key")
            else:
                self._landed.add(copy)
                self._reports.fetched(copy, self._loop.now - started)

        if self._store.in_memory:
            done()
        else:
            seconds = self._store.trip if plan is None else self._costs.load(plan.nbytes)
            self._under_way[copy] = self._loop.call_later(seconds, done)


class SimulatedPD:
    """`submit`, `items_ready` and `cancel` are called at the moment at which the worker gets the message."""

    def __init__(
        self, context: SimulationContext, device: FifoLock, tower: StepTower | None, role: str = BOTH
    ) -> None:
        config = context.limits.pd
        self.role, self._context = role, context
        num_blocks = max(1, config.kv_memory // (config.block_size * context.model.kv_token_bytes))
        longest = min(config.max_model_len or _LONGEST, num_blocks * config.block_size)
        self.kv = KVCacheManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.cache = EncoderCache(config.embedding_memory)
        self.admission = Admission(config.embedding_memory)
        self.connector = TableScheduler(ECTransferConfig(ec_role="consumer"))
        items = ItemTracker(self.cache, self.admission, self.connector)
        limits = SchedulerLimits(config.max_num_seqs, config.step_tokens, longest)
        # vLLM's replicas, which have their tower in the step, prefill a request whose items they have.
        overlap = config.overlap_prefill and tower is None
        self.scheduler = Scheduler(limits, self.kv, items, overlap_prefill=overlap)
        self._reports = Reports(self._transferred)
        #: Whether `_reports` has anything.
        self._moved = False
        self.loads = SimulatedLoads(context, self._reports)
        #: In which steps ran, since the start.
        self.step_seconds = 0.0
        self._loop, self._costs = context.loop, context.costs.pd
        self._stream: SimulatedLink  # from `attach` on
        self._device, self._tower = device, tower
        #: Requests on their way to the scheduler: when they will be there, and Submit's reply.
        self._parsing: dict[str, tuple[VirtualTimer, asyncio.Future[RequestError | None]]] = {}
        #: Requests whose KV is on its way here.
        self._loading: dict[str, VirtualTimer] = {}
        self._inbox: list[Callable[[], None]] = []
        self._awake = self._busy = False
        self._alarm: VirtualTimer | None = None

    @property
    def full(self) -> bool:
        """Whether it refuses requests."""
        return self.held >= _MAX_WAITING + self.scheduler.limits.max_num_seqs

    @property
    def held(self) -> int:
        """Requests that have not ended."""
        here = self.scheduler.num_waiting + self.scheduler.num_running
        return here + len(self._parsing) + len(self._loading)

    def attach(self, stream: SimulatedLink) -> None:
        """The stream that steps are reported on, from now on."""
        self._stream = stream

    def submit(
        self, request: SimulatedRequest, message: pd_pb2.SubmitRequest, deadline: float
    ) -> asyncio.Future[RequestError | None]:
        """Takes a request in: the future gets the error of one that could never run, or None."""
        admitted: asyncio.Future[RequestError | None] = self._loop.create_future()
        resumed = len(message.resume.output_token_ids)
        if resumed:
            self.cancel(message.request_id)  # an attempt before this one
        parsed = EngineRequest(
            request_id=message.request_id,
            attempt=message.attempt,
            proxy_id="proxy",
            arrival=self._loop.now,
            deadline=deadline,
            prompt_token_ids=request.prompt_token_ids,
            features=request.features,
            ready=in_state(message, pd_pb2.ITEM_STATE_READY),
            unencoded=in_state(message, pd_pb2.ITEM_STATE_UNENCODED),
            positions=cast(Any, None),  # the runner's, as is sampling: no scheduler reads them
            position_delta=0,
            sampling=cast(Any, None),
            prefix_root=bytes(32),
            output=CountedOutput(request.output_tokens - resumed, request.output_token),
            output_token_ids=[request.output_token] * resumed,
            resumed_tokens=resumed,
            planned=message.resume.planned,
        )
        seconds = self._costs.take(len(request.prompt_token_ids))
        timer = self._loop.call_later(seconds, self._admit, parsed, admitted)
        self._parsing[message.request_id] = timer, admitted
        return admitted

    def _admit(self, request: EngineRequest, admitted: asyncio.Future[RequestError | None]) -> None:
        del self._parsing[request.request_id]
        try:
            self.scheduler.check(request)
        except RequestError as refusal:
            _answer(admitted, refusal)
        else:
            self._add(request)
            _answer(admitted, None)

    def _add(self, request: EngineRequest) -> None:
        """Adds it; one that was handed over, once what is passed on of its KV is here."""
        add = lambda: self.scheduler.add(request, self._loop.now)  # noqa: E731
        digests = self._passed_on(request) if request.planned else []
        if not digests:
            self._put(add)
            return

        def arrived() -> None:
            del self._loading[request.request_id]
            self._put(lambda: self._keep(digests))
            self._put(add)

        seconds = self._context.kv_seconds(len(digests) * self.kv.block_size)[1]
        self._loading[request.request_id] = self._loop.call_later(seconds, arrived)

    def _passed_on(self, request: EngineRequest) -> list[bytes]:
        blocks, size = request.num_prompt_tokens // self.kv.block_size, self.kv.block_size
        given = request.prefix_root, request.prompt_token_ids, request.output_token_ids, request.features
        digests = PrefixChain(*given, size, request.both_ways).digests(blocks)
        return list(itertools.takewhile(self._context.stored_kv.__contains__, digests))

    def _keep(self, digests: Sequence[bytes]) -> None:
        """The blocks are as if they had been computed here and were idle; without room they are computed."""
        pool = self.kv.pool
        held = [block for digest in digests if (block := pool.find(digest)) is not None]
        new = [digest for digest in digests if pool.find(digest) is None]
        for block in held:
            pool.add_reference(block)
        if len(new) + self.scheduler.num_running <= pool.num_free:
            blocks = pool.allocate(len(new))
            pool.label(blocks, new)
            pool.release(list(reversed(blocks)))
        pool.release(list(reversed(held)))

    def _pass_on(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Offers the requests whose prompts are computed now, once their KV may be had elsewhere."""
        for chunk in chunks:
            state, blocks = chunk.state, chunk.state.num_prompt_tokens // self.kv.block_size
            if chunk.samples and chunk.start < state.num_prompt_tokens:
                self._context.stored_kv.update(state.chain.digests(blocks))
                seconds, name = self._context.kv_seconds(blocks * self.kv.block_size)[0], state.request
                self._loop.call_later(seconds, self._stream.offer, name.request_id, name.attempt)

    def items_ready(self, mm_hashes: Sequence[str]) -> None:
        self._put(lambda: self.scheduler.mark_ready(mm_hashes, self._loop.now))

    def cancel(self, request_id: str) -> None:
        if request_id in self._parsing:
            timer, admitted = self._parsing.pop(request_id)
            timer.cancel()
            _answer(admitted, None)
        elif request_id in self._loading:
            self._loading.pop(request_id).cancel()
        else:
            self._put(lambda: self.scheduler.cancel([request_id], "proxy"))

    def _put(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake()

    def _transferred(self) -> None:
        self._moved = True
        self._wake()

    def _wake(self) -> None:
        if not self._busy and not self._awake:
            self._awake = True
            self._loop.call_at(self._loop.now, self._step)

    def _step(self) -> None:
        self._awake = False
        if self._busy:
            return
        while True:
            commands, self._inbox = self._inbox, []
            for command in commands:
                command()
            output = self.scheduler.schedule(self._loop.now)
            if output.chunks:
                self._busy = True
                self._device.acquire(functools.partial(self._begin, output))
                return
            self.loads.start(output.ec_connector_metadata)
            if not self._update(output, []):
                break
        # Idle until a message, a transfer or the next deadline.
        if self._alarm is not None:
            self._alarm.cancel()
        deadline = self.scheduler.next_deadline()
        self._alarm = self._loop.call_at(deadline, self._wake) if deadline is not None else None

    def _begin(self, output: SchedulerOutput) -> None:
        self.loads.start(output.ec_connector_metadata)
        work = step_work(output.chunks)
        seconds, prefill = self._costs.step_seconds(*work), work[0]
        if self._tower is not None and prefill:
            seconds += self._tower.seconds(output.chunks)
        self._loop.call_later(seconds, self._stepped, output, self._loop.now)

    def _stepped(self, output: SchedulerOutput, started: float) -> None:
        self.step_seconds += self._loop.now - started
        if self.role == PREFILL:
            self._pass_on(output.chunks)
        self._update(output, [_token(chunk.state) for chunk in output.chunks if chunk.samples])
        self._device.release()
        self._busy = False
        self._step()

    def _update(self, output: SchedulerOutput, sampled: list[int]) -> bool:
        """Whether anything has moved."""
        transfers = self._reports.drain() if self._moved else _NO_TRANSFERS
        self._moved = False
        result = ModelRunnerOutput(sampled=sampled, ec_connector_output=transfers)
        events = self.scheduler.update(output, result, self._loop.now)
        if events:
            self._stream.step(events, len(sampled))
        return bool(events) or result.moved_items


def _answer(admitted: asyncio.Future[RequestError | None], refusal: RequestError | None) -> None:
    """Submit's reply, unless the proxy has left off waiting for it: its cancel is under way then."""
    if not admitted.done():
        admitted.set_result(refusal)


def _token(state: RequestState) -> int:
    return cast(CountedOutput, state.request.output).token
