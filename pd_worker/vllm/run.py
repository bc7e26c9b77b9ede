"""One request at the vLLM engine, from its admission to its last event."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from triptych.base.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError, Unavailable
from triptych.base.types import FinishReason, ItemPlan
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.admission import distinct_bytes
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.tenant_turns import TenantTurns
from triptych.pd_worker.vllm.attempt import Attempt, Diverged, StreamPorts
from triptych.pd_worker.vllm.calls import Embeddings, output_format, replays
from triptych.pd_worker.vllm.http.replies import EngineBusy, EngineError, EngineLost, EngineRejected
from triptych.pd_worker.vllm.kv_transfer import KVTransfer
from triptych.pd_worker.vllm.places import BatchPlace, BatchPlaces, EmbeddingMemory
from triptych.pd_worker.vllm.pooled import PooledCalls


class PrefillShares:
    """The seconds in which vLLM prefills, shared out to the requests without a first token by their tokens.

    Its own steps are not known: what it decodes meanwhile counts by the tokens that come, as in native steps.
    """

    def __init__(self) -> None:
        #: Tokens that have come since the seconds were shared last.
        self.decoded = 0
        self._states: list[RequestState] = []
        self._since = 0.0

    def begin(self, state: RequestState, now: float) -> None:
        """The request is at vLLM, and has no token of this call yet."""
        self._share(now)
        self._states.append(state)

    def end(self, state: RequestState, now: float) -> None:
        """It has its first token, or none will come. Idempotent."""
        if state in self._states:
            self._share(now)
            self._states.remove(state)

    def _share(self, now: float) -> None:
        seconds, self._since = now - self._since, now
        tokens = sum(state.num_prompt_tokens for state in self._states) + self.decoded
        self.decoded = 0
        for state in self._states:
            state.work_seconds += seconds * state.num_prompt_tokens / tokens


#: Failures in a row, without a token or a missing item between them, that end a request.
MAX_FAILURES = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class Retries:
    """The failures of one request in a row. A busy server is waited for until the request's deadline."""

    def __init__(self) -> None:
        self.failures = 0
        self._busy = 0
        #: A replay has diverged: the request goes on from the tokens that it has.
        self.no_replay = False

    def pause(self, *, busy: bool) -> float | None:
        """Seconds to wait after one more failure; None where the request is given up."""
        if busy:
            self._busy += 1
            return _pause(self._busy)
        self.failures += 1
        return None if self.failures >= MAX_FAILURES else _pause(self.failures)

    def reset(self) -> None:
        """The request has come further, or the reason of its failure is known."""
        self.failures = self._busy = 0


def _pause(count: int) -> float:
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (count - 1))


logger = logging.getLogger(__name__)

_LATE = "the request's time is over: ask for less, or raise --request-timeout"
_UNEXPECTED = "an unexpected error in the PD worker"


@dataclass(frozen=True, slots=True)
class RunPorts:
    """What a run uses.

    `alive` asks the server now; `looked_up` hears how many items were looked for, and how many are missing.
    """

    stream: StreamPorts
    embeddings: Embeddings
    room: EmbeddingMemory
    places: BatchPlaces
    prefills: PrefillShares
    alive: Callable[[], Awaitable[bool]]
    looked_up: Callable[[int, int], None]
    pooled: PooledCalls
    turns: TenantTurns
    #: By which KV moves between this worker's vLLM and others; None where it does not.
    transfer: KVTransfer | None = None


class RequestRun:
    """The life of one request.

    `run` raises nothing, unless it is cancelled.
    """

    def __init__(self, request: EngineRequest, ports: RunPorts) -> None:
        self.request = request
        self._pooled = b""
        #: Whether the request is at work in vLLM.
        self.streaming = False
        self._ports = ports
        # vLLM has blocks of its own.
        chain = PrefixChain(request.prefix_root, (), (), (), 1)
        self._state = RequestState(request, chain)
        self._plans: dict[str, ItemPlan] = {feature.mm_hash: feature.plan for feature in request.features}
        self._stored = set(request.ready) & self._plans.keys()
        self._item_stored = asyncio.Event()
        self._verify = self._finished = False
        self._retries = Retries()

    def items_stored(self, mm_hashes: Sequence[str]) -> None:
        """These embeddings are in the store."""
        if known := self._plans.keys() & set(mm_hashes):
            self._stored |= known
            self._item_stored.set()

    def fail_unloaded(self) -> bool:
        """Ends the request if it waits for embeddings; whether it did."""
        if not self._plans or self._state.admitted_at is None or self._state.items_at is not None:
            return False
        error = Unavailable("this PD worker does not reach the embedding store", retry_after=1.0)
        self._finish(FinishReason.ERROR, error)
        return True

    async def run(self) -> None:
        """Serves the request up to its last event, or to the end of the server, for which there is none."""
        limit = asyncio.timeout_at(self.request.deadline)
        try:
            async with limit:
                await self._serve()
        except EngineLost:
            return
        except RequestError as error:
            self._finish(FinishReason.ERROR, error)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                self._finish(FinishReason.ERROR, DeadlineExceeded(_LATE))
                return
            logger.exception("request %s failed", self.request.name, extra=self._log_extra)
            self._finish(FinishReason.ERROR, InternalError(_UNEXPECTED))
        finally:
            self._ports.room.release(self._state.request_id)

    async def _serve(self) -> None:
        state, output = self._state, self.request.output
        if output.finished is not None:
            # A resumed request whose output was complete before it was submitted here.
            if text := output.flush():
                self._emit(request_events.new_tokens(state, (), text))
            self._finish(output.finished, None)
            return
        sizes = distinct_bytes(state.features)
        await self._ports.room.reserve(state.request_id, state.own_order, sizes, state.tenant)
        state.admitted_at = time.monotonic()
        self._emit(request_events.admitted(state))
        self._report_missing(dict.fromkeys(self.request.unencoded & self._plans.keys(), ""))
        while not self._finished:
            await self._find_items()
            async with self._ports.places.place(state.own_order, state.tenant) as place:
                pause = await self._attempt_unless_left(place)
            await asyncio.sleep(pause)

    async def _attempt_unless_left(self, place: BatchPlace) -> float:
        """As `_attempt`; ends at once where the place is to be left: the output goes on later."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                if self.request.pooling is None:
                    place.leave = lambda: limit.reschedule(loop.time())
                return await self._attempt()
        except TimeoutError:
            if not limit.expired():
                raise
            self._state.preemptions += 1
            return 0.0
        finally:
            place.leave = None

    async def _find_items(self) -> None:
        """Returns once all embeddings are in the store. Those that are not are reported missing."""
        while self._plans:
            while self._plans.keys() - self._stored:
                self._item_stored.clear()
                await self._item_stored.wait()
            direct = self._ports.stream.direct
            served = set() if direct is None else direct.served(self._plans.values())
            # What an encoder worker serves may not be in the store yet. After a failure that alone counts.
            looked = [p for p in self._plans.values() if self._verify or p.mm_hash not in served]
            missing = {}
            if looked:
                missing = await self._ports.embeddings.missing(
                    looked, verify=self._verify, on_way=served, away_is_missing=direct is not None
                )
            self._ports.looked_up(len(self._plans), len(missing))
            self._verify = False
            if not missing:
                break
            # If vLLM has failed, then for this.
            self._retries.reset()
            self._report_missing(missing)
        self._state.items_at = self._state.items_at or time.monotonic()

    def _report_missing(self, missing: Mapping[str, str]) -> None:
        for mm_hash, digest in missing.items():
            self._stored.discard(mm_hash)
            self._emit(request_events.item_missing(self._state, mm_hash, digest))

    async def _attempt(self) -> float:
        """One call of vLLM; the pause before the next one, should there be one."""
        state, before = self._state, len(self._state.output_token_ids)
        try:
            reason, error = await self._stream()
        except EngineRejected as refusal:
            raise _refusal(refusal) from refusal
        except Diverged as difference:
            if output_format(self.request) is not None:
                raise Unavailable(f"the output cannot be continued by vLLM: {difference}") from difference
            self._retries.no_replay = True
            return 0.0
        except EngineError as failure:
            if len(state.output_token_ids) > before:
                self._retries.reset()
            return await self._after(failure)
        self._finish(reason, error)
        return 0.0

    async def _stream(self) -> tuple[FinishReason, RequestError | None]:
        state, request = self._state, self.request
        if request.pooling is not None:
            return await self._pool()
        speculates = self._ports.stream.speculates()
        format_ = output_format(request)
        again = replays(request.sampling, state.output_token_ids, format_, speculates=speculates)
        replay = again and not self._retries.no_replay
        ports, transfer = self._ports.stream, self._ports.transfer
        with self._at_work():
            if transfer is not None:
                await transfer.read(request, ports.direct)
                if transfer.keeps(request):
                    request.may_hand_over = False  # tried once: it may be what vLLM fails on
                    first = Attempt(state, ports, self._on_first_token, replay=False)
                    kept = await first.first()
                    if first.end is not None:
                        return first.end
                    transfer.kept(request, kept)
            return await Attempt(state, ports, self._on_first_token, replay=replay).run()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The request is at work in vLLM."""
        state, prefills = self._state, self._ports.prefills
        state.first_scheduled_at = state.first_scheduled_at or time.monotonic()
        self.streaming = True
        prefills.begin(state, time.monotonic())
        try:
            yield
        finally:
            prefills.end(state, time.monotonic())
            self.streaming = False

    async def _pool(self) -> tuple[FinishReason, RequestError | None]:
        state, ports = self._state, self._ports.stream
        # Texts of a megabyte take about a second.
        body = await asyncio.to_thread(self._ports.pooled.body_of, self.request)
        with self._at_work():
            answer = await ports.client.pool(body)
        ports.progress()
        self._pooled = self._ports.pooled.result(self.request, answer)
        self._on_first_token()
        ports.outputs.note_pooled(state, time.monotonic())
        return FinishReason.STOP, None

    async def _after(self, failure: EngineError) -> float:
        """The pause after a failed call; EngineLost where the server is gone."""
        logger.info("request %s: vLLM: %s", self.request.name, failure, extra=self._log_extra)
        if not await self._ports.alive():
            raise EngineLost
        # To vLLM's caller an embedding that could not be loaded looks like any other failure.
        self._verify = not isinstance(failure, EngineBusy)
        pause = self._retries.pause(busy=isinstance(failure, EngineBusy))
        if pause is not None:
            return pause
        raise InternalError(f"the engine, vLLM, failed {self._retries.failures} times on this request")

    def _on_first_token(self) -> None:
        """vLLM has all embeddings: their room is free for others."""
        state, since = self._state, self._state.items_at or time.monotonic()
        self._ports.prefills.end(state, time.monotonic())
        self._ports.turns.charge(state.tenant, state.num_prompt_tokens)
        self._ports.room.release(state.request_id)
        for use in state.items:
            if not use.loaded:
                use.arrive()
                self._emit(request_events.item_loaded(state, use.plan.mm_hash, time.monotonic() - since))

    def _finish(self, reason: FinishReason, error: RequestError | None) -> None:
        if not self._finished:
            self._finished = True
            self._emit(request_events.finished(self._state, reason, error, self._pooled))

    def _emit(self, event: EngineEvent) -> None:
        self._ports.stream.emit([event])

    @property
    def _log_extra(self) -> dict[str, object]:
        return self.request.log_extra


def _refusal(refusal: EngineRejected) -> RequestError:
    """vLLM's refusal of a request, for the client; of this worker's own access it is an error inside."""
    if refusal.status in (401, 403, 404, 405):
        return InternalError(f"the engine, vLLM, refuses this worker's calls: {refusal.message}")
    return InvalidRequest(
        f"the engine, vLLM, refuses the request: {refusal.message}", param=refusal.param or None
    )
