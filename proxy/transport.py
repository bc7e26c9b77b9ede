"""gRPC transport: opens job streams and PD links over the channels of the worker pool."""

from __future__ import annotations

from triptych.protos import encoder_pb2
from triptych.proxy.encoders.encoder_client import EncodeStream
from triptych.proxy.media.ports import ItemMedia
from triptych.proxy.pd.link import PDLink
from triptych.proxy.pool import WorkerPool
from triptych.proxy.ports import JobOwner, LinkOwner, RequestEvents


class GrpcTransport:
    """The product's `Transport`. Timeouts are in seconds; `stall_timeout` 0 watches no engine."""

    def __init__(
        self, pool: WorkerPool, proxy_id: str, *, phase_timeout: float = 60.0, stall_timeout: float = 60.0
    ) -> None:
        self._pool = pool
        self._proxy_id = proxy_id
        self._phase_timeout = phase_timeout
        self._stall_timeout = stall_timeout

    def open_job(
        self, address: str, job: encoder_pb2.EncodeJob, media: ItemMedia, owner: JobOwner
    ) -> EncodeStream:
        channel = self._pool.channel("encoder", address)
        return EncodeStream(channel, job, media, owner, self._phase_timeout)

    def open_link(self, address: str, events: RequestEvents, owner: LinkOwner) -> PDLink:
        channel = self._pool.channel("pd", address)
        return PDLink(address, channel, self._proxy_id, events, owner, self._stall_timeout)
