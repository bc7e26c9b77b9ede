"""The gRPC front door: what POST /v1/chat/completions does, for ProxyService's clients."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import msgspec
from grpc import aio

from triptych.errors import InternalError, InvalidRequest, RequestError
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.proxy.chat import ChatCall, ChatMessage, Delta, Done, ImagePart, Output, Started, TextPart
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.media_source import parse_image_url
from triptych.proxy.pool import WorkerPool
from triptych.proxy.validation import (
    check_image_count,
    check_options,
    check_salt,
    check_sampling,
    in_range,
    seed_of,
)
from triptych.types import SamplingParams

log = logging.getLogger(__name__)

_ROLES = ("system", "user", "assistant")
Context = aio.ServicerContext[Any, Any]


class ProxyServicer(proxy_pb2_grpc.ProxyServiceServicer):
    """Translates and nothing else."""

    def __init__(self, dispatcher: Dispatcher, pool: WorkerPool, *, max_images: int, timeout: float) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._max_images = max_images
        self._timeout = timeout

    async def Chat(
        self, request: proxy_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[proxy_pb2.ChatEvent]:
        try:
            call = call_of(request, max_images=self._max_images, timeout=self._timeout)
            events = _Events(request.return_token_ids)
            async with aclosing(self._dispatcher.chat(call)) as batches:
                async for outputs in batches:
                    for output in outputs:
                        if (event := events.of(output)) is not None:
                            yield event
        except RequestError as error:
            await _abort(context, error)
        except Exception:
            log.exception("gRPC chat")
            await _abort(context, InternalError("an unexpected error in the proxy"))

    async def ListModels(
        self, request: proxy_pb2.ListModelsRequest, context: Context
    ) -> proxy_pb2.ListModelsReply:
        return proxy_pb2.ListModelsReply(models=self._pool.models())


async def _abort(context: Context, error: RequestError) -> NoReturn:
    await context.abort(grpc.StatusCode[error.grpc_status], error.message)
    raise AssertionError("abort returns never")


class _Events:
    """ChatEvents of one call; the prompt's ids go with the first one."""

    def __init__(self, with_ids: bool) -> None:
        self._with_ids = with_ids
        self._prompt: tuple[int, ...] = ()

    def of(self, output: Output) -> proxy_pb2.ChatEvent | None:
        if isinstance(output, Started):
            self._prompt = output.prompt_token_ids
            return None
        event = proxy_pb2.ChatEvent()
        if self._with_ids and self._prompt:
            event.prompt_token_ids.extend(self._prompt)
            self._prompt = ()
        if isinstance(output, Delta):
            event.text = output.text
            if self._with_ids:
                event.token_ids.extend(output.token_ids)
        else:
            event.finish.CopyFrom(_finish(output))
        return event


def _finish(done: Done) -> proxy_pb2.ChatFinish:
    return proxy_pb2.ChatFinish(
        reason=done.reason.value,
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        cached_tokens=done.usage.cached_tokens,
    )


def call_of(request: proxy_pb2.ChatRequest, *, max_images: int, timeout: float) -> ChatCall:
    """The request as a ChatCall; InvalidRequest names the field at fault."""
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    in_range("timeout", request.timeout, 0, 86400)
    call = ChatCall(
        request_id=uuid.uuid4().hex,
        model=request.model,
        messages=tuple(_message(index, message) for index, message in enumerate(request.messages)),
        sampling=_sampling(request.sampling),
        timeout=min(request.timeout or timeout, timeout),
        cache_salt=check_salt(request.cache_salt),
        processor_options=check_options(_options(request.mm_processor_kwargs)),
    )
    check_image_count(len(call.images()), max_images)
    return call


def _message(index: int, message: proxy_pb2.ChatMessage) -> ChatMessage:
    path = f"messages[{index}]"
    if message.role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    if not message.parts:
        raise InvalidRequest(f"{path}.parts must hold at least one part", param=f"{path}.parts")
    parts: list[TextPart | ImagePart] = []
    for at, part in enumerate(message.parts):
        kind = part.WhichOneof("body")
        if kind is None:
            raise InvalidRequest(f"{path}.parts[{at}] is empty", param=f"{path}.parts[{at}]")
        parts.append(_part(part, f"{path}.parts[{at}].{kind}"))
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return ChatMessage(message.role, parts[0].text)
    return ChatMessage(message.role, tuple(parts))


def _part(part: proxy_pb2.ChatPart, param: str) -> TextPart | ImagePart:
    if part.HasField("text"):
        return TextPart(part.text)
    if part.HasField("image_url"):
        return ImagePart(parse_image_url(part.image_url, param), param)
    return ImagePart(part.image, param)


def _options(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"mm_processor_kwargs is no JSON object: {error}", param="mm_processor_kwargs"
        ) from None


def _sampling(sampling: common_pb2.SamplingParams) -> SamplingParams:
    return check_sampling(
        SamplingParams(
            max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature if sampling.HasField("temperature") else None,
            top_p=sampling.top_p if sampling.HasField("top_p") else None,
            top_k=sampling.top_k if sampling.HasField("top_k") else None,
            seed=sampling.seed or seed_of(None),
            stop=tuple(sampling.stop),
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
        )
    )
