"""gRPC transport: opens job streams and PD links over the channels of the worker pool."""

from __future__ import annotations

from functools import partial

from triptych.proxy.encoders.encoder_client import open_stream
from triptych.proxy.pd.link import open_link
from triptych.proxy.pool import WorkerPool


class GrpcTransport:
    """The product's `Transport`. Timeouts are in seconds; `stall_timeout` 0 watches no engine."""

    def __init__(
        self, pool: WorkerPool, proxy_id: str, *, phase_timeout: float = 60.0, stall_timeout: float = 60.0
    ) -> None:
        self.open_job = partial(open_stream, pool, phase_timeout)
        self.open_link = partial(open_link, pool, proxy_id, stall_timeout)
