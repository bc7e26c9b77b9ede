"""gRPC servers and channels between our processes: one set of options, one way of authentication.

The name that a channel verifies is one that all services' certificates carry, `triptych.internal` by default,
and not the dialled address. Workers are dialled by the addresses of their registrations, which are those of
pods: new ones at every start, which no certificate can name beforehand. The certificate says that a process
belongs to the cluster; which worker is where, its registration says, which the internal token signs. The
token goes with every call as `authorization: Bearer TOKEN`: over TLS or within one machine, unless --insecure
says otherwise. Workers do not start and proxies do not call workers where that is not so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc import aio

from triptych.base.rpc.internal_token import InternalToken, Q, R, TokenCheck, token_interceptors
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial

logger = logging.getLogger(__name__)


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
