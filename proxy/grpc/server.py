"""The gRPC front door: what POST /v1/chat/completions does, for ProxyService's clients."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from grpc import aio

from triptych.base.errors import InternalError, RequestError
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.protos.convert import logprobs_to_proto
from triptych.proxy.call.answer import ChoiceReader, Shown
from triptych.proxy.call.chat import Done, Output, Started
from triptych.proxy.call.tools import ToolUse
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.grpc.generate import generate_call
from triptych.proxy.grpc.request import call_of
from triptych.proxy.pool import WorkerPool

logger = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]


class ProxyServicer(proxy_pb2_grpc.ProxyServiceServicer):
    """Translates and nothing else. RequestErrors are for `GrpcAdmission`, which ends the calls with them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pool: WorkerPool,
        *,
        max_images: int,
        timeout: float,
        max_choices: int = 16,
    ) -> None:
        self._dispatcher = dispatcher
        self._max_choices = max_choices
        self._pool = pool
        self._max_images = max_images
        self._timeout = timeout

    async def Chat(
        self, request: proxy_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[proxy_pb2.ChatEvent]:
        try:
            call, tools = call_of(
                request,
                max_images=self._max_images,
                timeout=self._timeout,
                max_choices=self._max_choices,
            )
            events = _Events(request.return_token_ids, tools, call.n)
            del request  # it holds the media again
            async with aclosing(self._dispatcher.chat(call)) as batches:
                async for outputs in batches:
                    for output in outputs:
                        if (event := events.of(output)) is not None:
                            yield event
        except RequestError:
            raise
        except Exception:
            logger.exception("gRPC chat")
            raise InternalError("an unexpected error in the proxy") from None

    async def Generate(
        self, request: proxy_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[proxy_pb2.ChatEvent]:
        try:
            call = generate_call(request, timeout=self._timeout, max_choices=self._max_choices)
            events = _Events(request.return_token_ids, ToolUse(), call.n)
            del request
            async with aclosing(self._dispatcher.chat(call)) as batches:
                async for outputs in batches:
                    for output in outputs:
                        if (event := events.of(output)) is not None:
                            yield event
        except RequestError:
            raise
        except Exception:
            logger.exception("gRPC generate")
            raise InternalError("an unexpected error in the proxy") from None

    async def ListModels(
        self, request: proxy_pb2.ListModelsRequest, context: Context
    ) -> proxy_pb2.ListModelsReply:
        return proxy_pb2.ListModelsReply(models=self._pool.models())


class _Events:
    """ChatEvents of one call; the prompts' ids go with the first one."""

    def __init__(self, with_ids: bool, tools: ToolUse, choices: int) -> None:
        self._with_ids = with_ids
        self._answers = [ChoiceReader(tools.form, parallel=tools.parallel) for _ in range(choices)]
        self._started: Started | None = None

    def of(self, output: Output) -> proxy_pb2.ChatEvent | None:
        if isinstance(output, Started):
            self._started = output
            return None
        event = proxy_pb2.ChatEvent(choice=output.choice)
        if self._with_ids and self._started is not None:
            event.prompt_token_ids.extend(self._started.prompt_token_ids)
            event.encoder_prompt_token_ids.extend(self._started.encoder_prompt_token_ids)
            self._started = None
        answer = self._answers[output.choice]
        if isinstance(output, Done):
            shown, reason = answer.end(output)
            _show(event, shown)
            event.finish.CopyFrom(_finish(output, reason))
            return event
        _show(event, answer.read(output))
        event.logprobs.extend(logprobs_to_proto(position) for position in output.logprobs)
        if self._with_ids:
            event.token_ids.extend(output.token_ids)
        return event


def _show(event: proxy_pb2.ChatEvent, shown: Sequence[Shown]) -> None:
    for piece in shown:
        if isinstance(piece, str):
            event.text += piece
        else:
            event.tool_calls.add(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)


def _finish(done: Done, reason: str) -> proxy_pb2.ChatFinish:
    return proxy_pb2.ChatFinish(
        reason=reason,
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        cached_tokens=done.usage.cached_tokens,
    )
