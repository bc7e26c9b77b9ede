"""A client's connection to one worker: a channel and a session, made anew when certificates change."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.base.rpc.channels import make_channel
from triptych.base.rpc.client_auth import WorkerSession
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial
from triptych.base.types import WorkerInfo

logger = logging.getLogger(__name__)

#: Seconds that a worker gets to answer over a channel with new certificates.
TRIAL_SECONDS = 2.0
#: Between two such trials.
RETRY_SECONDS = 5.0
_READY_OR_SOON = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.CONNECTING)


@dataclass(frozen=True, slots=True)
class _Line:
    """A channel, the session on it, and the certificates that it was made with."""

    channel: aio.Channel
    session: WorkerSession | None
    material: TlsMaterial | None


class WorkerConnection:
    """The channel to one worker. With certificates, it is replaced after those have changed.

    The new channel is taken once the worker has answered over it: one that has not read its new files yet
    stays connected. Streams go on over the channel on which they began.
    """

    def __init__(self, info: WorkerInfo, token: str = "", certificates: Certificates | None = None) -> None:
        self._info = info
        self._token = token
        self._certificates = certificates
        self._line = self._new_line(None if certificates is None else certificates.current())
        self._replaced: list[aio.Channel] = []
        self._refused: TlsMaterial | None = None
        self._retry_at = 0.0

    @property
    def channel(self) -> aio.Channel:
        """The channel for new calls."""
        return self._line.channel

    def expect(self, info: WorkerInfo) -> None:
        """The worker at the address is this one from now on, which may be another process than before."""
        self._info = info
        if self._line.session is not None:
            self._line.session.expect(info)

    async def prove(self) -> bool:
        """Whether the worker has shown that it knows the internal token, where one is in use."""
        return self._line.session is None or await self._line.session.prove()

    async def follow_certificates(self) -> None:
        """Replaces the channel if the certificates have changed and the worker answers with the new ones."""
        await self._close_unused()
        if self._certificates is None or (found := self._certificates.current()) is self._line.material:
            return
        now = asyncio.get_running_loop().time()
        if found is self._refused and now < self._retry_at:
            return
        line = self._new_line(found)
        if error := await _trial(line):
            await line.channel.close()
            self._retry_at = now + RETRY_SECONDS
            if found is not self._refused:
                logger.warning(
                    "%s worker %s does not answer over TLS with our new certificate; the connection that it "
                    "has stays: %s",
                    self._info.pool,
                    self._info.address,
                    error,
                )
            self._refused = found
            return
        self._replaced.append(self._line.channel)
        self._line, self._refused = line, None

    async def close(self) -> None:
        """Ends all calls."""
        channels = [self._line.channel, *self._replaced]
        self._replaced.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _close_unused(self) -> None:
        """A channel goes idle some time after its last call, and breaks where its connection does."""
        unused = [one for one in self._replaced if one.get_state() not in _READY_OR_SOON]
        for channel in unused:
            self._replaced.remove(channel)
            await channel.close()

    def _new_line(self, material: TlsMaterial | None) -> _Line:
        session = WorkerSession(self._token, self._info) if self._token else None
        return _Line(make_channel(self._info.address, session, material), session, material)


async def _trial(line: _Line) -> str:
    """Why the worker cannot be called over this channel; "" when it can."""
    stub = health_pb2_grpc.HealthStub(line.channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=TRIAL_SECONDS)
    except aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
            return str(error.details())[:300]
    if line.session is not None and not await line.session.prove():
        return "it does not prove to know the internal token"
    return ""
