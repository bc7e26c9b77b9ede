"""The gRPC front door: what POST /v1/chat/completions does, for ProxyService's clients."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from grpc import aio

from triptych.base.errors import InternalError, InvalidRequest, RequestError
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.protos.convert import logprobs_to_proto
from triptych.proxy.call.answer import AnswerPiece, ChoiceReader, ReasoningPiece, whole_calls
from triptych.proxy.call.chat import ChatCall, Done, EncoderPrompt, Output, RawPrompt, Started, Transcription
from triptych.proxy.call.pairs import best_first
from triptych.proxy.call.tools import ToolUse
from triptych.proxy.call.validation import check_salt, check_token_count, in_range
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.grpc.request import call_of, processor_options, sampling_of_message
from triptych.proxy.grpc.retrieval import embed_calls, embeddings, rerank_pairs
from triptych.proxy.media.source import AudioPart, ImagePart
from triptych.proxy.pool import WorkerPool


def generate_call(request: proxy_pb2.GenerateRequest, *, timeout: float, max_choices: int) -> ChatCall:
    """The request; InvalidRequest names the field at fault."""
    in_range("timeout", request.timeout, 0, 86400)
    in_range("n", request.n, 0, max_choices)
    decoder = _decoder(request)
    transcription = _transcription(request)
    if decoder is not None and transcription is not None:
        raise InvalidRequest(
            "transcription and a decoder prompt exclude each other: both say how the decoder begins",
            param="transcription",
        )
    encoder = _encoder(request)
    options = processor_options(request.mm_processor_kwargs)
    if options and encoder.modality != "image":
        raise InvalidRequest(
            "mm_processor_kwargs is only allowed with image or image_url", param="mm_processor_kwargs"
        )
    return ChatCall(
        label=uuid.uuid4().hex,
        model=request.model,
        messages=(),
        sampling=sampling_of_message(request.sampling),
        timeout=min(request.timeout or timeout, timeout),
        cache_salt=check_salt(request.cache_salt),
        n=request.n or 1,
        prompt=decoder,
        prompt_param=request.WhichOneof("decoder") or "prompt",
        encoder=encoder,
        processor_options=options,
        transcription=transcription,
    )


def _encoder(request: proxy_pb2.GenerateRequest) -> EncoderPrompt:
    kind = request.WhichOneof("encoder")
    if kind is None:
        raise InvalidRequest(
            "set encoder_text, encoder_token_ids, audio, image or image_url", param="encoder"
        )
    value = getattr(request, kind)
    source = value.ids if kind == "encoder_token_ids" else value
    if not source:
        raise InvalidRequest(f"{kind} must not be empty", param=kind)
    if kind == "audio":
        return EncoderPrompt(AudioPart(value, kind), kind)
    if kind in ("image", "image_url"):
        make = ImagePart.of_url if kind == "image_url" else ImagePart
        return EncoderPrompt(make(value, kind), kind)
    return EncoderPrompt(_raw(source, kind), kind)


def _decoder(request: proxy_pb2.GenerateRequest) -> RawPrompt | None:
    kind = request.WhichOneof("decoder")
    if kind is None:
        return None
    value = getattr(request, kind)
    source = value.ids if kind == "decoder_token_ids" else value
    if not source:
        raise InvalidRequest(f"{kind} must not be empty: leave it out for the model's start", param=kind)
    return _raw(source, kind)


def _raw(source: str | Sequence[int], param: str) -> RawPrompt:
    if isinstance(source, str):
        return source
    check_token_count(len(source), param)
    return tuple(source)


def _transcription(request: proxy_pb2.GenerateRequest) -> Transcription | None:
    if not request.HasField("transcription"):
        return None
    if request.WhichOneof("encoder") != "audio":
        raise InvalidRequest("transcription is only allowed with audio", param="transcription")
    task: common_pb2.Transcription = request.transcription
    return Transcription(task.language, task.task, task.prompt, task.timestamps, task.detect_language)


logger = logging.getLogger(__name__)

R = TypeVar("R", proxy_pb2.ChatRequest, proxy_pb2.GenerateRequest)
E = TypeVar("E")
Context = aio.ServicerContext[Any, Any]


async def _guarded(events: AsyncGenerator[E]) -> AsyncIterator[E]:
    """The events; an unexpected error is logged, and an InternalError to the client."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except RequestError:
        raise
    except Exception:
        logger.exception("a gRPC call")
        raise InternalError("an unexpected error in the proxy") from None


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

    def Chat(self, request: proxy_pb2.ChatRequest, context: Context) -> AsyncIterator[proxy_pb2.ChatEvent]:
        return _guarded(self._answer(request, self._chat_call))

    def Generate(
        self, request: proxy_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[proxy_pb2.ChatEvent]:
        return _guarded(self._answer(request, self._generate_call))

    def Embed(self, request: proxy_pb2.EmbedRequest, context: Context) -> AsyncIterator[proxy_pb2.Embedding]:
        return _guarded(self._embed(request))

    def Rerank(
        self, request: proxy_pb2.RerankRequest, context: Context
    ) -> AsyncIterator[proxy_pb2.RankedDocument]:
        return _guarded(self._rerank(request))

    def _chat_call(self, request: proxy_pb2.ChatRequest) -> tuple[ChatCall, ToolUse]:
        images, choices = self._max_images, self._max_choices
        return call_of(request, max_images=images, timeout=self._timeout, max_choices=choices)

    def _generate_call(self, request: proxy_pb2.GenerateRequest) -> tuple[ChatCall, ToolUse]:
        return generate_call(request, timeout=self._timeout, max_choices=self._max_choices), ToolUse()

    async def _embed(self, request: proxy_pb2.EmbedRequest) -> AsyncGenerator[proxy_pb2.Embedding]:
        calls = embed_calls(request, max_images=self._max_images, timeout=self._timeout)
        del request  # it holds the media again
        async for embedding in embeddings(self._dispatcher, calls):
            yield embedding

    async def _rerank(self, request: proxy_pb2.RerankRequest) -> AsyncGenerator[proxy_pb2.RankedDocument]:
        top_n = request.top_n
        pairs = rerank_pairs(request, max_images=self._max_images, timeout=self._timeout)
        del request
        scores = await pairs.scores(self._dispatcher, lambda done: None)
        for index in best_first(scores, top_n):
            yield proxy_pb2.RankedDocument(index=index, score=scores[index])

    async def _answer(
        self, request: R, parse: Callable[[R], tuple[ChatCall, ToolUse]]
    ) -> AsyncGenerator[proxy_pb2.ChatEvent]:
        call, tools = parse(request)
        events = _Events(request.return_token_ids, tools, call.n)
        del request  # it holds the media again
        async with aclosing(self._dispatcher.chat(call)) as batches:
            async for outputs in batches:
                for output in outputs:
                    if (event := events.of(output)) is not None:
                        yield event

    async def ListModels(
        self, request: proxy_pb2.ListModelsRequest, context: Context
    ) -> proxy_pb2.ListModelsReply:
        return proxy_pb2.ListModelsReply(models=self._pool.models())


class _Events:
    """ChatEvents of one call; the prompts' ids go with the first one, and tool calls where they are whole."""

    def __init__(self, with_ids: bool, tools: ToolUse, choices: int) -> None:
        self._with_ids = with_ids
        self._answers = [ChoiceReader(tools) for _ in range(choices)]
        self._open_calls: list[list[AnswerPiece]] = [[] for _ in range(choices)]
        self._started: Started | None = None

    def of(self, output: Output) -> proxy_pb2.ChatEvent | None:
        if isinstance(output, Started):
            self._started = output
            for answer in self._answers:
                answer.begin(output)
            return None
        event = proxy_pb2.ChatEvent(choice=output.choice)
        if self._with_ids and self._started is not None:
            event.prompt_token_ids.extend(self._started.prompt_token_ids)
            event.encoder_prompt_token_ids.extend(self._started.encoder_prompt_token_ids)
            self._started = None
        answer = self._answers[output.choice]
        if isinstance(output, Done):
            pieces, reason = answer.end(output)
            self._add_pieces(event, pieces, last=True)
            event.finish.CopyFrom(_finish(output, reason))
            return event
        self._add_pieces(event, answer.read(output))
        event.logprobs.extend(logprobs_to_proto(position) for position in output.logprobs)
        if self._with_ids:
            event.token_ids.extend(output.token_ids)
        return event

    def _add_pieces(
        self, event: proxy_pb2.ChatEvent, pieces: Sequence[AnswerPiece], *, last: bool = False
    ) -> None:
        open_calls = self._open_calls[event.choice]
        for piece in pieces:
            if isinstance(piece, ReasoningPiece):
                event.reasoning += piece.text
            elif isinstance(piece, str):
                event.text += piece
            else:
                open_calls.append(piece)
        if open_calls and (last or (pieces and isinstance(pieces[-1], str))):
            for call, arguments in whole_calls(open_calls):
                event.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=arguments)
            open_calls.clear()


def _finish(done: Done, reason: str) -> proxy_pb2.ChatFinish:
    return proxy_pb2.ChatFinish(
        reason=reason,
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        cached_tokens=done.usage.cached_tokens,
    )
