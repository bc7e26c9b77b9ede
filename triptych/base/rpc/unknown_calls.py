"""Calls that a worker's release does not have: a proxy of another release makes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from grpc import aio

Q = TypeVar("Q")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_LOG_SECONDS = 60.0
_MAX_NAME = 100


class UnknownCalls(aio.ServerInterceptor):
    """A server interceptor that logs such calls, which gRPC refuses as UNIMPLEMENTED."""

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
