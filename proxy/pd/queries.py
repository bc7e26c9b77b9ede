"""Questions to a PD worker that are no requests: the tokens of a text, the text of tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from triptych.errors import InternalError, InvalidRequest, Overloaded, RequestError, Unavailable
from triptych.protos import pd_pb2, pd_pb2_grpc
from triptych.protos.convert import error_from_proto
from triptych.proxy.gate import Gate
from triptych.proxy.pool import Worker, WorkerPool
from triptych.proxy.requests.lifecycle import RETRY_AFTER

QUERY_SECONDS = 10.0
#: Queries of clients at the PD workers at once. A worker answers them in one thread.
QUERIES_AT_ONCE = 8
#: Seconds that a client's query waits for its turn.
TURN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Tokenized:
    """`max_model_len`: most tokens of prompt and output together."""

    token_ids: tuple[int, ...]
    max_model_len: int


class QueryTurns:
    """Admits the queries that clients ask for: a few at once, in order, and no more than --max-queue open.

    Those that a request in flight needs, such as the text of a prompt that is echoed, take no turn.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._open = 0
        self._turns = asyncio.Semaphore(QUERIES_AT_ONCE)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One query. Overloaded when too many wait, or none ends in time; Unavailable at the proxy's end."""
        self._gate.admit_query(self._open)
        self._open += 1
        try:
            await self._acquire()
            try:
                yield
            finally:
                self._turns.release()
        finally:
            self._open -= 1

    async def _acquire(self) -> None:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise Overloaded("too many such requests wait", retry_after=RETRY_AFTER) from None


class PDQueries:
    """Asks any live PD worker of the model; another one when the first does not answer."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def tokenize(self, model: str, message: pd_pb2.TokenizeRequest) -> Tokenized:
        reply: pd_pb2.TokenizeReply = await self._ask(model, "Tokenize", message)
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return Tokenized(tuple(reply.token_ids), reply.max_model_len)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        message = pd_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        reply: pd_pb2.DetokenizeReply = await self._ask(model, "Detokenize", message)
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return reply.text

    async def _ask(self, model: str, method: str, message: Any) -> Any:
        error: RequestError = Unavailable("no PD worker is live", retry_after=RETRY_AFTER)
        for worker in self._workers(model):
            stub: Any = pd_pb2_grpc.PDServiceStub(worker.channel)  # type: ignore[no-untyped-call]
            try:
                return await getattr(stub, method)(message, timeout=QUERY_SECONDS)
            except aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise InvalidRequest("the prompt is too large", param="prompt") from None
                if failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise InternalError(f"the PD worker failed: {failure.code().name}") from None
                error = Unavailable("no PD worker answers", retry_after=RETRY_AFTER)
        raise error

    def _workers(self, model: str) -> list[Worker]:
        """Two of the model's live workers, in any order."""
        key = self._pool.model_key(model)
        live = [worker for worker in self._pool.serving("pd") if worker.info.model_key == key]
        return random.sample(live, min(len(live), 2))
