"""What a gRPC call passes before its message is read: its key, the key's limits, and a quota of memory.

gRPC reads the message of a call with one request before the handler runs. So every method is served as one
with a stream of requests, which is the same on the wire, and its one message is read here. Server reflection
alone takes several.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from triptych.base.errors import InternalError, InvalidRequest, RequestError, RequestTimeout, TooLarge
from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import context_of
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.tracing.tracer import Tracer
from triptych.protos import common_pb2, proxy_pb2
from triptych.proxy.auth.middleware import Authenticator
from triptych.proxy.grpc.connections import GrpcConnections
from triptych.proxy.grpc.message_fields import FEW_FIELDS, has_at_most, lift_files, message_of
from triptych.proxy.http.refusals import Refusals
from triptych.proxy.parsing.lifted import parse_lifted
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.parsing.parsers import INLINE_BYTES, THREAD_BYTES, Parsers
from triptych.proxy.quotas.call_context import Arrival
from triptych.proxy.quotas.current_call import in_call
from triptych.proxy.quotas.table import QuotaTable

_OPERATIONS = {"Chat": "chat", "Generate": "generate_content", "Embed": "embeddings"}


@asynccontextmanager
async def traced_call(
    tracer: Tracer | None, method: str, context: aio.ServicerContext[Any, Any]
) -> AsyncIterator[None]:
    """The span of one call with a streamed reply, which is part of the call.

    Nothing without a tracer, and for a method that does not generate.
    """
    service, _, name = method.lstrip("/").rpartition("/")
    operation = _OPERATIONS.get(name)
    if tracer is None or operation is None:
        yield
        return
    parent = context_of(context.invocation_metadata() or ())
    known = {names.RPC_SYSTEM: "grpc", names.RPC_SERVICE: service, names.RPC_METHOD: name}
    span = ServerSpan(tracer, parent, operation, dict(known))
    try:
        with in_call(span=span):
            yield
    except RequestError as error:
        span.failed(error.code)
        _end(span, error.grpc_status)
        raise
    except (GeneratorExit, asyncio.CancelledError):
        span.broken("client_closed")
        _end(span, "CANCELLED")
        raise
    except BaseException:
        _end(span, "INTERNAL")
        raise
    else:
        _end(span, "OK")


def _end(span: ServerSpan, status: str) -> None:
    number = int(grpc.StatusCode[status].value[0])
    span.rpc_status(number, status)
    span.end()


logger = logging.getLogger(__name__)

#: A client that takes nothing for so long is given up; and one that does not take its error.
WRITE_SECONDS = 60.0
ABORT_SECONDS = 5.0
HEALTH_SERVICE = "/grpc.health.v1.Health/"
Context = aio.ServicerContext[Any, Any]


def server_options(quotas: QuotaTable) -> list[tuple[str, Any]]:
    """Channel options of a server that everybody reaches: a client costs little before it is admitted."""
    message_bytes = quotas["bodies"].spec.largest
    # Above the quota, so that the next peer is served while `GrpcConnections` ends what is too much.
    connections = quotas["grpc-connections"].spec.capacity * 4 // 3
    return [
        ("grpc.max_receive_message_length", message_bytes),
        # A call that is not read holds one window. Probing for a better one makes that megabytes.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", 256),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.absolute_max_metadata_size", 32 << 10),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # Calls that wait until the event loop takes them.
        ("grpc.server.max_pending_requests", 256),
        ("grpc.server.max_pending_requests_hard_limit", 512),
    ]


class GrpcAdmission(aio.ServerInterceptor):
    """Admits calls of all services but health, which is free. `authenticator` None: no keys are in use.

    `parses`: what the one message of a call becomes, by method; handlers get that in its place.
    """

    def __init__(
        self,
        quotas: QuotaTable,
        authenticator: Authenticator | None,
        refusals: Refusals,
        parsers: Parsers,
        parses: Mapping[str, Parse[Any]],
        *,
        connections: GrpcConnections | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._connections = connections
        self._quotas = quotas
        self._authenticator = authenticator
        self._refusals = refusals
        self._parsers = parsers
        self._parses = parses
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_SERVICE):
            return handler
        if handler.request_streaming and handler_call_details.method != REFLECTION_METHOD:
            raise TypeError("this server has no calls with streamed requests but reflection")
        if not handler.request_streaming and handler_call_details.method not in self._parses:
            raise TypeError(f"nothing says how a message of {handler_call_details.method} is parsed")
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        key = given if isinstance(given, bytes) else given.encode()
        return self._admitted(handler, key, handler_call_details.method)

    def _admitted(self, handler: Any, authorization: bytes, method: str) -> Any:
        """The handler behind all checks. A call with one reply counts in the minute only."""

        async def one(messages: AsyncIterator[bytes], context: Context) -> Any:
            arrival = Arrival(method)
            try:
                with in_call(arrival=arrival):
                    async with self._let_in(authorization, context, counts=False) as (holder, stack):
                        request = await self._receive(context, method, handler, holder, stack)
                        return await handler.unary_unary(request, context)
            except RequestError as error:
                self._refused(method, arrival, error)
                await _abort(context, error)

        async def stream(messages: AsyncIterator[bytes], context: Context) -> None:
            arrival = Arrival(method)
            try:
                with in_call(arrival=arrival):
                    async with (
                        self._let_in(authorization, context, counts=True) as (holder, stack),
                        traced_call(self._tracer, method, context),
                    ):
                        request = await self._receive(context, method, handler, holder, stack)
                        async with aclosing(handler.unary_stream(request, context)) as replies:
                            # Nothing here keeps what the client has sent: the handler has it alone.
                            del request
                            async for reply in replies:
                                await _write(context, reply)
            except RequestError as error:
                self._refused(method, arrival, error)
                await _abort(context, error)

        async def dialogue(messages: AsyncIterator[bytes], context: Context) -> None:
            arrival = Arrival(method)
            try:
                with in_call(arrival=arrival):
                    async with (
                        self._let_in(authorization, context, counts=None) as (holder, _),
                        aclosing(self._reflection_requests(context, holder)) as requests,
                        aclosing(handler.stream_stream(requests, context)) as replies,
                    ):
                        async for reply in replies:
                            await _write(context, reply)
            except RequestError as error:
                self._refused(method, arrival, error)
                await _abort(context, error)

        # The messages come as they are: they are parsed when they are counted.
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(dialogue, None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)

    def _refused(self, method: str, arrival: Arrival, error: RequestError) -> None:
        if not arrival.counted:
            self._refusals.add(error.status, method, error.code)

    @asynccontextmanager
    async def _let_in(
        self, authorization: bytes, context: Context, *, counts: bool | None
    ) -> AsyncIterator[tuple[str, AsyncExitStack]]:
        """Whose call it is, and what ends with it; RequestError for a wrong key or above a limit.

        `counts`: as a request with an answer; False, in the minute only; None, not at all.
        """
        principal = None if self._authenticator is None else self._authenticator.principal(authorization)
        if self._connections is not None:
            self._connections.called(context.peer())
        holder = "" if principal is None else principal.id
        async with AsyncExitStack() as stack:
            stack.enter_context(self._quotas["grpc-calls"].hold(holder, 1))
            if principal is not None and self._authenticator is not None:
                if counts:
                    await stack.enter_async_context(self._authenticator.admit(principal))
                elif counts is not None:
                    await self._authenticator.count(principal)
                stack.enter_context(in_call(models=principal.models))
            yield holder, stack

    async def _reflection_requests(self, context: Context, holder: str) -> AsyncGenerator[Any]:
        """The messages of a call with several, each counted while it arrives, until its client is silent."""
        bodies, messages = self._quotas["bodies"], self._quotas["messages"]
        while True:
            with await messages.wait(holder, 1), await bodies.wait(holder, bodies.spec.largest):
                try:
                    async with asyncio.timeout(REFLECTION_IDLE_SECONDS):
                        raw = await context.read()
                except TimeoutError:
                    return
                if not isinstance(raw, bytes):
                    return
                if len(raw) > REFLECTION_MAX_BYTES:
                    raise TooLarge(f"the message is longer than {REFLECTION_MAX_BYTES} bytes: send less")
                request = message_of(raw, reflection_pb2.ServerReflectionRequest, FEW_FIELDS)
            yield request

    async def _receive(
        self, context: Context, method: str, handler: Any, holder: str, stack: AsyncExitStack
    ) -> Any:
        """What the call's message becomes; `stack` holds its bytes.

        How large a message is shows only when all of it is there: the largest possible is reserved before.
        """
        bodies, messages = self._quotas["bodies"], self._quotas["messages"]
        with await messages.wait(holder, 1):
            body = stack.enter_context(await bodies.wait(holder, bodies.spec.largest))
            raw = await _message(context, messages.spec.total_seconds)
            body.remove(bodies.spec.largest - len(raw))
        parse = self._parses[method]
        descriptor = handler.request_deserializer.__self__.DESCRIPTOR
        try:
            few = len(raw) <= INLINE_BYTES and has_at_most(FEW_FIELDS, raw, descriptor)
            lift = partial(lift_files, descriptor=descriptor)
            work = parse if len(raw) <= THREAD_BYTES else partial(parse_lifted, parse, lift=lift)
            return await self._parsers.run(holder, raw, parse, work, few=few)
        except RequestError:
            raise
        except Exception:
            logger.exception("a gRPC call")
            raise InternalError("an unexpected error in the proxy") from None


async def _message(context: Context, seconds: float) -> bytes:
    """The call's first message. Further ones are never read: they wait in the client's window."""
    try:
        async with asyncio.timeout(seconds):
            raw = await context.read()
    except TimeoutError:
        raise RequestTimeout("the call's message comes too slowly") from None
    if not isinstance(raw, bytes):
        raise InvalidRequest("the call has no message")
    return raw


async def _write(context: Context, reply: Any) -> None:
    """Returns once the reply has a place in the client's window."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await context.write(reply)
    except TimeoutError:
        raise RequestTimeout("the client does not read its reply") from None


async def _abort(context: Context, error: RequestError) -> NoReturn:
    # gRPC keeps what ends a call in a cycle with it. The frames of the traceback would keep the message.
    error.drop_traceback()
    if error.retry_after is not None:
        context.set_trailing_metadata((("retry-after", str(max(math.ceil(error.retry_after), 1))),))
    try:
        async with asyncio.timeout(ABORT_SECONDS):
            await context.abort(grpc.StatusCode[error.grpc_status], error.message)
    except TimeoutError:
        logger.info("a gRPC client does not read its error")
    raise asyncio.CancelledError  # gRPC has the status, and sends it should the client read


REFLECTION_METHOD = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
#: The longest message of a reflection call, whose reply repeats it, and seconds that one may take to come:
#: clients leave the call open, and one that needs it again makes a new one.
REFLECTION_MAX_BYTES = 16 << 10
REFLECTION_IDLE_SECONDS = 2.0


def add_reflection(server: aio.Server) -> None:
    """Serves the descriptors of what clients may call; the workers' services are not among them."""
    pool = DescriptorPool()
    for module in (common_pb2, proxy_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    services = [proxy_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    names = [service.full_name for file in services for service in file.services_by_name.values()]
    reflection.enable_server_reflection(names, server, pool=pool)
