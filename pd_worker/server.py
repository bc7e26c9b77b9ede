"""The PD worker's gRPC service: a thin layer over input processor, engine and event streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Never, Protocol, TypeVar

import grpc

from triptych.base.errors import InternalError, InvalidRequest, Overloaded, RequestError, Unavailable
from triptych.base.hashing import check_mm_hash
from triptych.base.log import log_fields
from triptych.base.rpc.channels import INCARNATION_HEADER
from triptych.ec_connector.base import SourceTable
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.events.attempt_trace import AttemptTrace, PDTraces
from triptych.pd_worker.events.streams import MAX_NAMED, EventStreams
from triptych.pd_worker.frontend.wire import MAX_KEYS, MAX_REQUESTS, check_count, check_name, check_tenant
from triptych.pd_worker.isolation import Isolation
from triptych.pd_worker.turn_pool import TurnPool
from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc
from triptych.protos.convert import error_to_proto, source_from_proto

logger = logging.getLogger(__name__)

M = TypeVar("M", pd_pb2.TokenizeRequest, pd_pb2.DetokenizeRequest)
R = TypeVar("R")
#: An attempt at a request: proxy id, request id, attempt.
AttemptName = tuple[str, str, int]

#: Pending Tokenize and Detokenize calls, above which new ones are refused.
MAX_QUERIES = 256
#: Waiting requests, beyond --max-num-seqs, above which new ones are refused.
MAX_WAITING = 1024
#: Refusals that are remembered, for an attempt that is sent again.
_MAX_REFUSALS = 256
#: Bytes of a message above which its prompt may take more than ten milliseconds to prepare.
LARGE_MESSAGE = 16 << 10
#: Longest wait for the current step and submissions to end, when the worker is isolated.
EMPTYING_SECONDS = 8.0


class _Context(Protocol):
    """The part of a gRPC call's context that the service uses."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> Never: ...

    async def send_initial_metadata(self, initial_metadata: tuple[tuple[str, str], ...]) -> None: ...


class EnginePort(Protocol):
    """The engine as the service uses it; every method is thread-safe and returns at once."""

    def submit(self, request: EngineRequest) -> None: ...

    def items_ready(self, mm_hashes: Sequence[str]) -> None: ...

    def cancel(self, request_ids: Sequence[str], proxy_id: str) -> None: ...

    def pause(self, paused: Sequence[str], resumed: Sequence[str], proxy_id: str) -> None: ...

    def between_steps(self, callback: Callable[[], None]) -> None: ...


class InputPort(Protocol):
    def process(self, message: pd_pb2.SubmitRequest, arrival: float) -> EngineRequest: ...

    def tokenize(self, message: pd_pb2.TokenizeRequest) -> pd_pb2.TokenizeReply: ...

    def detokenize(self, message: pd_pb2.DetokenizeRequest) -> pd_pb2.DetokenizeReply: ...


class PDServicer(pd_pb2_grpc.PDServiceServicer):
    """`max_requests` bounds the unfinished requests; resumed ones (attempt above 1) are always accepted, but
    not those that a prefill worker still has.

    Submit runs in `pool`; Tokenize and Detokenize in `queries`, so that no request ever waits behind them. Of
    these bounds no tenant has more than its share while others use them too.
    """

    def __init__(
        self,
        engine: EnginePort,
        input_processor: InputPort,
        streams: EventStreams,
        pool: TurnPool,
        queries: TurnPool,
        *,
        max_requests: int = MAX_WAITING,
        incarnation: str = "",
        traces: PDTraces | None = None,
        sources: SourceTable | None = None,
    ) -> None:
        self._engine = engine
        self._input_processor = input_processor
        self._streams = streams
        self._pool = pool
        self._queries = queries
        #: By tenant.
        self._open_queries = Counter[str]()
        #: Attempts whose input is being prepared.
        self._taking: dict[AttemptName, asyncio.Task[None]] = {}
        self._refusals: dict[AttemptName, RequestError] = {}
        self._max_requests = max_requests
        self._draining = False
        self._incarnation = incarnation
        self._traces = traces
        self._sources = sources
        self._isolation = Isolation()
        self._reading = 0
        self._nothing_read = asyncio.Event()
        self._nothing_read.set()

    def drain(self) -> None:
        """Refuses new requests from now on; those held go on."""
        self._draining = True

    def lose_engine(self, incarnation: str) -> None:
        """The engine has ended with all of its requests: proxies see another incarnation from now on."""
        self._incarnation = incarnation
        self._streams.lose_engine()

    async def Submit(self, request: pd_pb2.SubmitRequest, context: _Context) -> pd_pb2.SubmitReply:
        trace = None if self._traces is None else self._traces.begin(request)
        try:
            await self._submit(request, trace)
        except RequestError as error:
            logger.info(
                "request %s refused: %s %s",
                _name(request),
                error.code,
                error.param or "",
                extra=_log_extra(request, trace),
            )
            return _refused(error)
        except Exception:
            logger.exception(
                "request %s could not be submitted", _name(request), extra=_log_extra(request, trace)
            )
            return _refused(InternalError("an unexpected error in the PD worker"))
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_QUEUED)

    async def NotifyItems(self, request: pd_pb2.ItemsNotice, context: _Context) -> common_pb2.Ack:
        _check(request.proxy_id, "mm_hashes", request.mm_hashes, MAX_KEYS)
        keys = [_key(mm_hash) for mm_hash in request.mm_hashes]
        known = [key for key in keys if key]
        if request.sources:
            self._note_sources(zip(keys, request.sources, strict=False))
        self._streams.items_ready(request.proxy_id, known)
        self._engine.items_ready(known)
        return common_pb2.Ack()

    def _note_sources(self, sources: Iterable[tuple[str, common_pb2.EmbeddingSource]]) -> None:
        """Before the engine hears that the items are ready."""
        if self._sources is not None:
            for key, source in sources:
                self._sources.note(key, source_from_proto(source))

    async def Cancel(self, request: pd_pb2.CancelRequest, context: _Context) -> common_pb2.Ack:
        _check(request.proxy_id, "request_ids", request.request_ids, MAX_REQUESTS)
        self._streams.cancel(request.proxy_id, request.request_ids)
        for request_id in request.request_ids:
            self._isolation.free((request.proxy_id, request_id))
        return common_pb2.Ack()

    async def Pause(self, request: pd_pb2.PauseRequest, context: _Context) -> common_pb2.Ack:
        _check(request.proxy_id, "paused", request.paused, MAX_REQUESTS)
        _check(request.proxy_id, "resumed", request.resumed, MAX_REQUESTS)
        self._engine.pause(request.paused, request.resumed, request.proxy_id)
        return common_pb2.Ack()

    async def SetApart(self, request: pd_pb2.SetApartRequest, context: _Context) -> pd_pb2.SetApartReply:
        await context.send_initial_metadata(((INCARNATION_HEADER, self._incarnation),))
        key = (request.proxy_id, request.request_id)
        check_name("request_id", request.request_id)
        check_name("proxy_id", request.proxy_id)
        if self._draining:
            raise Unavailable("this worker is stopping", retry_after=1.0)
        if not self._isolation.claim(key, request.tokens, self._produced(), time.monotonic()):
            raise Unavailable("this worker is reserved for another request", retry_after=1.0)
        try:
            await self._empty()
        except TimeoutError:
            self._isolation.free(key)
            raise Unavailable("this worker is too busy") from None
        if self._isolation.key != key:
            raise Unavailable("the request was cancelled before it began")
        return pd_pb2.SetApartReply()

    async def NameRequests(self, request: pd_pb2.AttachRequest, context: _Context) -> common_pb2.Ack:
        _check(request.proxy_id, "requests", request.requests, MAX_REQUESTS)
        check_name("round", request.round)
        if not self._streams.name(request.proxy_id, request.round, request.requests):
            raise Overloaded(f"requests: at most {MAX_NAMED}", param="requests")
        return common_pb2.Ack()

    async def Attach(
        self, request: pd_pb2.AttachRequest, context: _Context
    ) -> AsyncIterator[pd_pb2.StepEvents]:
        _check(request.proxy_id, "requests", request.requests, MAX_REQUESTS)
        named = self._streams.named(request.proxy_id, request.round)
        if len(named) != request.named_before:
            why = f"named_before is {request.named_before}, but {len(named)} requests have been named here"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        stream = self._streams.attach(
            request.proxy_id, [*named, *request.requests], step_tokens=request.reads_step_tokens
        )
        try:
            # Confirms the stream, long before the first event.
            await context.send_initial_metadata(((INCARNATION_HEADER, self._incarnation),))
            while (message := await stream.next()) is not None:
                yield message
            if stream.broken:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine has ended")
        finally:
            self._streams.detach(stream)

    async def Tokenize(self, request: pd_pb2.TokenizeRequest, context: _Context) -> pd_pb2.TokenizeReply:
        return await self._query(self._input_processor.tokenize, request)

    async def Detokenize(
        self, request: pd_pb2.DetokenizeRequest, context: _Context
    ) -> pd_pb2.DetokenizeReply:
        return await self._query(self._input_processor.detokenize, request)

    async def _query(self, function: Callable[[M], R], message: M) -> R:
        """The result of `function` from a query thread."""
        tenant, queries = message.tenant, self._open_queries
        check_tenant(tenant)
        if not has_share(tenant, queries, MAX_QUERIES):
            raise Overloaded("too many queries wait for this worker", retry_after=1.0)
        queries[tenant] += 1
        try:
            large = message.ByteSize() > LARGE_MESSAGE
            return await self._queries.run(tenant, partial(function, message), large=large)
        finally:
            queries[tenant] -= 1
            if not queries[tenant]:
                del queries[tenant]

    async def _submit(self, message: pd_pb2.SubmitRequest, trace: AttemptTrace | None) -> None:
        """Returns once the request is taken. The caller may leave before, or ask again: it is taken once."""
        check_name("request_id", message.request_id)
        check_name("proxy_id", message.proxy_id)
        check_tenant(message.tenant)
        name = (message.proxy_id, message.request_id, message.attempt)
        if (task := self._taking.get(name)) is None:
            if (refusal := self._refusals.get(name)) is not None:
                raise refusal
            if self._streams.holds(*name):
                return
            self._check_room(message)
            if not self._streams.open(
                *name, len(message.resume.output_token_ids), trace, tenant=message.tenant
            ):
                raise InvalidRequest(
                    f"request_id: attempt {message.attempt} of this request has ended, or a later one has "
                    "been submitted already: draw an id for every request and count its attempts up",
                    param="request_id",
                )
            task = self._taking[name] = asyncio.create_task(self._take(message, name, trace), name="submit")
            task.add_done_callback(partial(self._taken, name))
        await asyncio.shield(task)

    def _taken(self, name: AttemptName, task: asyncio.Task[None]) -> None:
        del self._taking[name]
        if not task.cancelled() and isinstance(error := task.exception(), RequestError):
            self._refusals[name] = error
            if len(self._refusals) > _MAX_REFUSALS:
                del self._refusals[next(iter(self._refusals))]

    async def _take(
        self, message: pd_pb2.SubmitRequest, name: AttemptName, trace: AttemptTrace | None
    ) -> None:
        arrival = time.monotonic()
        self._reading += 1
        self._nothing_read.clear()
        try:
            prepare = partial(self._input_processor.process, message, arrival)
            request = await self._pool.run(
                message.tenant,
                prepare,
                partial(self._streams.holds, *name),
                large=message.ByteSize() > LARGE_MESSAGE,
                priority=message.priority,
            )
            if not self._streams.holds(*name):
                raise Unavailable("the request was cancelled before it began")
            self._streams.follow(request)
            if trace is not None:
                request.trace_id = trace.trace_id
            self._note_sources(
                (slot.plan.mm_hash, slot.source) for slot in message.items if slot.HasField("source")
            )
            self._engine.submit(request)
        except BaseException:
            self._streams.close(*name)
            raise
        finally:
            self._reading -= 1
            if not self._reading:
                self._nothing_read.set()

    async def _empty(self) -> None:
        """Hands all requests over, and waits until none is read or computed. TimeoutError if that is slow."""
        self._streams.hand_over()
        stepped, loop = asyncio.Event(), asyncio.get_running_loop()

        def between_steps() -> None:
            loop.call_soon_threadsafe(stepped.set)

        async with asyncio.timeout(EMPTYING_SECONDS):
            await self._nothing_read.wait()
            self._engine.between_steps(between_steps)
            await stepped.wait()

    def _produced(self) -> int | None:
        key = self._isolation.key
        return None if key is None else self._streams.produced(*key)

    def _check_room(self, message: pd_pb2.SubmitRequest) -> None:
        if self._draining:
            raise Unavailable("this worker is stopping", retry_after=1.0)
        key = (message.proxy_id, message.request_id)
        if not self._isolation.admits(key, self._produced(), time.monotonic()):
            raise Unavailable("this worker is reserved for another request", retry_after=1.0)
        if message.attempt > 1 and not message.resume.planned:
            return
        if not has_share(message.tenant, self._streams.unfinished_of_tenants, self._max_requests):
            raise Overloaded("too many requests wait for this worker", retry_after=1.0)


def has_share(tenant: str, held: Mapping[str, int], most: int) -> bool:
    """Whether the tenant may have one more of `most`: all of them while it is alone, else an equal part."""
    if sum(held.values()) < most:
        return True
    return held.get(tenant, 0) < most // len(held.keys() | {tenant})


def _name(message: pd_pb2.SubmitRequest) -> str:
    """For logs, before either part is checked."""
    return f"{message.label[:128]!r} ({message.request_id[:64]!r})"


def _log_extra(message: pd_pb2.SubmitRequest, trace: AttemptTrace | None) -> dict[str, object]:
    return log_fields(
        request_id=message.request_id[:64],
        label=message.label[:128],
        attempt=message.attempt,
        trace_id="" if trace is None else trace.trace_id,
    )


def _refused(error: RequestError) -> pd_pb2.SubmitReply:
    return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=error_to_proto(error))


def _check(proxy_id: str, field: str, values: Sequence[object], limit: int) -> None:
    """InvalidRequest for a call that names no proxy, or too many values."""
    check_name("proxy_id", proxy_id)
    check_count(field, values, limit)


def _key(mm_hash: str) -> str:
    try:
        return check_mm_hash(mm_hash)
    except InvalidRequest:
        logger.warning("NotifyItems names an invalid mm_hash")
        return ""
