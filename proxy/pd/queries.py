"""Queries to PD workers beside requests: tokenize and detokenize."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc import aio

from triptych.base.errors import RETRY_AFTER, InternalError, InvalidRequest, RequestError, Unavailable
from triptych.base.hashing import tenant_digest
from triptych.protos import pd_pb2
from triptych.protos.convert import error_from_proto
from triptych.proxy.pd.wire import PDStub, connect
from triptych.proxy.pool import WorkerPool
from triptych.proxy.quotas.current_call import current_call

QUERY_SECONDS = 10.0

Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Tokenized:
    """`max_model_len`: most tokens of prompt and output together."""

    token_ids: tuple[int, ...]
    max_model_len: int


class PDQueries:
    """Client of any live PD worker of a model; asks another one when the first does not answer."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def tokenize(self, model: str, message: pd_pb2.TokenizeRequest) -> Tokenized:
        message.tenant = tenant_digest(current_call().holder)
        reply = await self._ask(model, lambda stub: stub.Tokenize, message)
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return Tokenized(tuple(reply.token_ids), reply.max_model_len)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        message = pd_pb2.DetokenizeRequest(
            token_ids=token_ids,
            skip_special_tokens=skip_special_tokens,
            tenant=tenant_digest(current_call().holder),
        )
        reply = await self._ask(model, lambda stub: stub.Detokenize, message)
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return reply.text

    async def _ask(
        self, model: str, method: Callable[[PDStub], aio.UnaryUnaryMultiCallable[Q, R]], message: Q
    ) -> R:
        error: RequestError = Unavailable("no PD worker is live", retry_after=RETRY_AFTER)
        for address in self._addresses(model):
            try:
                channel = self._pool.channel("pd", address)
            except KeyError:
                continue  # it has gone while another one was asked
            call = method(connect(channel))
            try:
                return await call(message, timeout=QUERY_SECONDS)
            except aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise InvalidRequest("the prompt is too large", param="prompt") from None
                if failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise InternalError(f"the PD worker failed: {failure.code().name}") from None
                error = Unavailable("no PD worker answers", retry_after=RETRY_AFTER)
        raise error

    def _addresses(self, model: str) -> list[str]:
        """Two of the model's live workers, in any order."""
        key = self._pool.model_key(model)
        live = [w.info.address for w in self._pool.serving("pd") if w.info.model_key == key]
        return random.sample(live, min(len(live), 2))
