"""The gRPC front door: what POST /v1/chat/completions does, for ProxyService's clients."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from grpc import aio

from triptych.base.errors import InternalError, InvalidRequest, RequestError
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.protos.convert import logprobs_to_proto
from triptych.proxy.call.answer import AnswerPiece, ChoiceReader, ReasoningPiece, whole_calls
from triptych.proxy.call.chat import Admitted, ChatCall, Done, EncoderPrompt, Output, RawPrompt, Transcription
from triptych.proxy.call.pairs import best_first
from triptych.proxy.call.tools import ToolUse
from triptych.proxy.call.validation import check_salt, check_token_count, in_range
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.grpc.message_fields import message_of
from triptych.proxy.grpc.request import call_of, processor_options, sampling_of_message
from triptych.proxy.grpc.retrieval import RankRequest, embeddings, parse_embed, parse_rank
from triptych.proxy.media.source import AudioPart, ImagePart
from triptych.proxy.parsing.parse import Option, Parse
from triptych.proxy.pool import WorkerPool
from triptych.proxy.quotas.current_call import current_call


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A call that is answered with text, and what its events hold."""

    call: ChatCall
    tools: ToolUse
    return_token_ids: bool


def parse_chat(raw: bytes, *, max_images: int, timeout: float, max_choices: int) -> AnswerRequest:
    """The request that a ChatRequest holds. InvalidRequest names what is wrong with it."""
    request = message_of(raw, proxy_pb2.ChatRequest)
    call, tools = call_of(request, max_images=max_images, timeout=timeout, max_choices=max_choices)
    return AnswerRequest(call, tools, request.return_token_ids)


def parse_generate(raw: bytes, *, timeout: float, max_choices: int) -> AnswerRequest:
    """The request that a GenerateRequest holds. InvalidRequest names what is wrong with it."""
    request = message_of(raw, proxy_pb2.GenerateRequest)
    call = generate_call(request, timeout=timeout, max_choices=max_choices)
    return AnswerRequest(call, ToolUse(), request.return_token_ids)


def parse_models(raw: bytes) -> proxy_pb2.ListModelsRequest:
    return message_of(raw, proxy_pb2.ListModelsRequest)


def parses_of(*, max_images: int, timeout: float, max_choices: int) -> dict[str, Parse[Any]]:
    """How the message of each call is parsed, by method; `timeout` is the longest that a call may take."""
    of_choices: dict[str, Option] = {"timeout": timeout, "max_choices": max_choices}
    of_images: dict[str, Option] = {"timeout": timeout, "max_images": max_images}
    parses: dict[str, Parse[Any]] = {
        "Chat": Parse(parse_chat, of_choices | of_images),
        "Generate": Parse(parse_generate, of_choices),
        "Embed": Parse(parse_embed, of_images),
        "Rerank": Parse(parse_rank, of_images),
        "ListModels": Parse(parse_models),
    }
    (service,) = proxy_pb2.DESCRIPTOR.services_by_name.values()
    return {f"/{service.full_name}/{name}": parse for name, parse in parses.items()}


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
        priority=request.priority,
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
    """Answers what `parses_of` makes of the messages, which `GrpcAdmission` hands on.

    RequestErrors are for that one too: it ends the calls with them.
    """

    def __init__(self, dispatcher: Dispatcher, pool: WorkerPool) -> None:
        self._dispatcher = dispatcher
        self._pool = pool

    def Chat(self, request: AnswerRequest, context: Context) -> AsyncIterator[proxy_pb2.ChatEvent]:
        return _guarded(self._answer(request))

    def Generate(self, request: AnswerRequest, context: Context) -> AsyncIterator[proxy_pb2.ChatEvent]:
        return _guarded(self._answer(request))

    def Embed(self, request: list[ChatCall], context: Context) -> AsyncIterator[proxy_pb2.Embedding]:
        return _guarded(embeddings(self._dispatcher, request))

    def Rerank(self, request: RankRequest, context: Context) -> AsyncIterator[proxy_pb2.RankedDocument]:
        return _guarded(self._rerank(request))

    async def _rerank(self, request: RankRequest) -> AsyncGenerator[proxy_pb2.RankedDocument]:
        scores = await request.pairs.scores(self._dispatcher, current_call(), lambda done: None)
        for index in best_first(scores, request.top_n):
            yield proxy_pb2.RankedDocument(index=index, score=scores[index])

    async def _answer(self, request: AnswerRequest) -> AsyncGenerator[proxy_pb2.ChatEvent]:
        events = _Events(request.return_token_ids, request.tools, request.call.n)
        async with aclosing(self._dispatcher.chat(request.call, current_call())) as batches:
            async for outputs in batches:
                for output in outputs:
                    if (event := events.of(output)) is not None:
                        yield event

    async def ListModels(
        self, request: proxy_pb2.ListModelsRequest, context: Context
    ) -> proxy_pb2.ListModelsReply:
        allowed = current_call().models
        names = [*self._pool.models(allowed), *self._pool.adapters(allowed)]
        return proxy_pb2.ListModelsReply(models=names)


class _Events:
    """ChatEvents of one call; the prompts' ids go with the first one, and tool calls where they are whole."""

    def __init__(self, with_ids: bool, tools: ToolUse, choices: int) -> None:
        self._with_ids = with_ids
        self._answers = [ChoiceReader(tools) for _ in range(choices)]
        self._open_calls: list[list[AnswerPiece]] = [[] for _ in range(choices)]
        self._started: Admitted | None = None

    def of(self, output: Output) -> proxy_pb2.ChatEvent | None:
        if isinstance(output, Admitted):
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
