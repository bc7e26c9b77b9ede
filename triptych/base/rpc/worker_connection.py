"""The channel to one worker, which is replaced after its certificates have changed."""

from __future__ import annotations

import asyncio
import logging

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.base.rpc.channels import make_channel
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial
from triptych.base.types import WorkerInfo

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
