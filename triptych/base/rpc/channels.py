"""gRPC servers and channels between our processes: one set of options, one way of authentication.

The name that a channel verifies is one that all services' certificates carry, `triptych.internal` by default,
and not the dialled address. Workers are dialled by the addresses of their registrations, which are those of
pods: new ones at every start, which no certificate can name beforehand. The certificate says that a process
belongs to the cluster; which worker is where, its registration says, which the internal token signs. The
token goes with every call as `authorization: Bearer TOKEN`: over TLS or within one machine, unless --insecure
says otherwise. Workers do not start and proxies do not call workers where that is not so.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial
from triptych.base.types import WorkerInfo

Q = TypeVar("Q")
R = TypeVar("R")

logger = logging.getLogger(__name__)

TOKEN_HEADER = "authorization"
#: Calls without a token: they say whether the process serves, and its load to who knows its incarnation.
_OPEN_PATH = "/grpc.health."
_REFUSAL = "the call does not carry the cluster's internal token"
_DIGEST = "sha256"


class InternalToken:
    """The token as lines: the first one is sent and signs, every one of them is accepted.

    There are two while the token is rotated.
    """

    def __init__(self, tokens: str) -> None:
        lines = [token.encode() for token in tokens.split("\n")]
        #: The header's value in a client's calls.
        self.header = "Bearer " + tokens.partition("\n")[0]
        self._accepted = tuple(b"Bearer " + token for token in lines)
        self._keys = tuple(hmac.digest(token, b"triptych internal key 1", _DIGEST) for token in lines)

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call with this metadata carries the token, once. Compares in constant time."""
        values = [value for name, value in metadata or () if name == TOKEN_HEADER]
        if len(values) != 1:
            return False
        value = values[0].encode() if isinstance(values[0], str) else values[0]
        return any([hmac.compare_digest(header, value) for header in self._accepted])

    def signed(self, info: WorkerInfo) -> WorkerInfo:
        """The registration with its signature, an HMAC over all its fields."""
        return replace(info, proof=_signature(self._keys[0], info))

    def has_signed(self, info: WorkerInfo) -> bool:
        """Whether the writer of this registration, as it is, knows the token."""
        try:
            given = info.proof.encode()
            return any([hmac.compare_digest(_signature(key, info).encode(), given) for key in self._keys])
        except (TypeError, ValueError, AttributeError):
            return False  # fields that no worker of ours writes


def _signature(key: bytes, info: WorkerInfo) -> str:
    fields = asdict(replace(info, proof=""))
    if not info.kind:
        del fields["kind"]  # workers of releases without it sign without it
    content = json.dumps(fields, sort_keys=True).encode()
    return hmac.digest(key, b"triptych 1 registration\0" + content, _DIGEST).hex()


class TokenCheck(aio.ServerInterceptor):
    """A server interceptor that refuses calls without the internal token, before a message is read."""

    def __init__(self, token: InternalToken) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, R] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_PATH):
            return handler
        return handler if self._token.admits(handler_call_details.invocation_metadata) else _refusal()


def _refusal() -> grpc.RpcMethodHandler[Q, R]:
    async def refuse(_: AsyncIterator[Q], context: aio.ServicerContext[Q, R]) -> AsyncIterator[R]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
        yield b""

    # For calls of every kind: a handler of a stream does not read the message before it refuses.
    return grpc.stream_stream_rpc_method_handler(refuse)


def token_interceptors(token: InternalToken) -> list[aio.ClientInterceptor]:
    """Client interceptors that send the token with every call but health checks."""

    def sending(details: aio.ClientCallDetails) -> aio.ClientCallDetails:
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        if method.startswith(_OPEN_PATH):
            return details
        metadata = aio.Metadata(*(details.metadata or ()), (TOKEN_HEADER, token.header))
        return aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )

    async def intercept(self: object, continuation: Any, details: aio.ClientCallDetails, request: Any) -> Any:
        return await continuation(sending(details), request)

    # Each kind of call has a base of its own, whose one abstract method has a name of its own.
    return [
        type(base.__name__, (base,), dict.fromkeys(base.__abstractmethods__, intercept))() for base in _KINDS
    ]


_KINDS: tuple[Any, ...] = (
    aio.UnaryUnaryClientInterceptor,
    aio.UnaryStreamClientInterceptor,
    aio.StreamUnaryClientInterceptor,
    aio.StreamStreamClientInterceptor,
)


#: Prompts and token ids travel here, media in small frames, embeddings never.
MAX_MESSAGE_BYTES = 80 << 20
#: In the initial metadata of a PD worker's streams: the process's incarnation, as in its registration.
INCARNATION_HEADER = "x-triptych-incarnation"
#: The health service's name for "this process reaches the embedding store".
STORE_SERVICE = "triptych.store"
#: Largest media frame of an encoder job.
MEDIA_FRAME_BYTES = 256 << 10

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that was stopped or cut off is noticed within seconds, also on an idle stream.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # A restarted worker is found again quickly.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two servers on one port would share its calls in silence.
    ("grpc.so_reuseport", 0),
    # Clients that connect and say nothing.
    ("grpc.server_handshake_timeout_ms", 10_000),
]

#: A channel whose certificates have changed is replaced, and ends so long after its last call.
_IDLE_MS = 300_000


def make_server(
    token: str = "",
    interceptors: Sequence[aio.ServerInterceptor] = (),
    options: Sequence[tuple[str, int]] = (),
) -> aio.Server:
    """An asyncio gRPC server; with a `token` it refuses all calls but health checks without it.

    `options` are channel options beside the common ones, or in their place.
    """
    first = [TokenCheck(InternalToken(token))] if token else []
    merged = list({**dict(_OPTIONS), **dict(options)}.items())
    return aio.server(interceptors=[*first, *interceptors], options=merged)


def listen(server: aio.Server, place: str, certificates: Certificates | None = None, *, mutual: bool) -> int:
    """Binds the server to `host:port`, with TLS where it has certificates; the port.

    With `mutual` clients need a certificate of the CA, too. RuntimeError where the port is taken.
    """
    if certificates is None:
        return server.add_insecure_port(place)
    return server.add_secure_port(place, _server_credentials(certificates, mutual=mutual))


def _server_credentials(certificates: Certificates, *, mutual: bool) -> grpc.ServerCredentials:
    used = certificates.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(used.key, used.cert)], used.ca or None)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at every handshake, in a thread of its own."""
        nonlocal used
        if (material := certificates.current()) is used:
            return None
        used = material
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        changed,  # type: ignore[arg-type]  # None is allowed, as its documentation says
        require_client_authentication=mutual,
    )


def make_channel(address: str, token: str = "", tls: TlsMaterial | None = None) -> aio.Channel:
    """A channel to a worker at `host:port` or `unix:path`, whose calls carry the internal token."""
    interceptors = token_interceptors(InternalToken(token)) if token else None
    if tls is None:
        return aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors)
    named = ("grpc.ssl_target_name_override", tls.name)
    options = [*_OPTIONS, ("grpc.client_idle_timeout_ms", _IDLE_MS), named]
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


logger = logging.getLogger(__name__)

#: Seconds that a worker gets to answer over a channel with new certificates.
TRIAL_SECONDS = 2.0
#: Between two such trials.
RETRY_SECONDS = 5.0
_READY_OR_SOON = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.CONNECTING)


class WorkerConnection:
    """The channel to one worker. With certificates, it is replaced after those have changed.

    The new channel is taken once the worker has answered over it: one that has not read its new files yet
    stays connected. Streams go on over the channel on which they began.
    """

    def __init__(self, info: WorkerInfo, token: str = "", certificates: Certificates | None = None) -> None:
        self._info = info
        self._token = token
        self._certificates = certificates
        #: What the channel was made with.
        self._material = None if certificates is None else certificates.current()
        #: The channel for new calls.
        self.channel = make_channel(info.address, token, self._material)
        self._replaced: list[aio.Channel] = []
        self._refused: TlsMaterial | None = None
        self._retry_at = 0.0

    async def follow_certificates(self) -> None:
        """Replaces the channel if the certificates have changed and the worker answers with the new ones."""
        await self._close_unused()
        if self._certificates is None or (material := self._certificates.current()) is self._material:
            return
        now = asyncio.get_running_loop().time()
        if material is self._refused and now < self._retry_at:
            return
        channel = make_channel(self._info.address, self._token, material)
        if error := await _trial(channel):
            await channel.close()
            self._retry_at = now + RETRY_SECONDS
            if material is not self._refused:
                logger.warning(
                    "%s worker %s does not answer over TLS with our new certificate; the connection that it "
                    "has stays: %s",
                    self._info.pool,
                    self._info.address,
                    error,
                )
            self._refused = material
            return
        self._replaced.append(self.channel)
        self.channel, self._material, self._refused = channel, material, None

    async def close(self) -> None:
        """Ends all calls."""
        channels = [self.channel, *self._replaced]
        self._replaced.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _close_unused(self) -> None:
        """A channel goes idle some time after its last call, and breaks where its connection does."""
        unused = [one for one in self._replaced if one.get_state() not in _READY_OR_SOON]
        for channel in unused:
            self._replaced.remove(channel)
            await channel.close()


async def _trial(channel: aio.Channel) -> str:
    """Why the worker cannot be called over this channel; "" when it can."""
    try:
        await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=TRIAL_SECONDS
        )
    except aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
            return str(error.details())[:300]
    return ""


_LOG_SECONDS = 60.0
_MAX_NAME = 100


class UnknownCalls(aio.ServerInterceptor):
    """A server interceptor that logs calls that a worker's release does not have; gRPC refuses them as
    UNIMPLEMENTED."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._log_at = clock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, R] | None:
        handler = await continuation(handler_call_details)
        if handler is None and self._clock() >= self._log_at:
            self._log_at = self._clock() + _LOG_SECONDS
            logger.warning(
                "refused a call of %r, which this release does not have: a proxy of another release, which "
                "cannot use this worker: upgrade proxies first (docs/compatibility.md)",
                handler_call_details.method[:_MAX_NAME],
            )
        return handler
