"""PDService as the proxy calls it: typed stubs, requests as messages, messages as events."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Protocol

from grpc import aio

from triptych.base.errors import InternalError
from triptych.base.hashing import tenant_digest
from triptych.base.log import log_fields
from triptych.base.request import TemplateOptions
from triptych.base.tracing.context import TRACEPARENT, TRACESTATE, metadata
from triptych.base.types import PositionLogprobs
from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc
from triptych.protos.convert import logprobs_from_proto, sampling_to_proto
from triptych.proxy.call.chat import EncoderPrompt, PoolingOptions, RawPrompt, Transcription
from triptych.proxy.events import RequestFailed
from triptych.proxy.ports import RequestEvents
from triptych.proxy.requests.request import InFlightRequest

logger = logging.getLogger(__name__)


class PDStub(Protocol):
    """PDService's calls on one channel."""

    Submit: aio.UnaryUnaryMultiCallable[pd_pb2.SubmitRequest, pd_pb2.SubmitReply]
    NotifyItems: aio.UnaryUnaryMultiCallable[pd_pb2.ItemsNotice, common_pb2.Ack]
    Cancel: aio.UnaryUnaryMultiCallable[pd_pb2.CancelRequest, common_pb2.Ack]
    Pause: aio.UnaryUnaryMultiCallable[pd_pb2.PauseRequest, common_pb2.Ack]
    NameRequests: aio.UnaryUnaryMultiCallable[pd_pb2.AttachRequest, common_pb2.Ack]
    Attach: aio.UnaryStreamMultiCallable[pd_pb2.AttachRequest, pd_pb2.StepEvents]
    SetApart: aio.UnaryUnaryMultiCallable[pd_pb2.SetApartRequest, pd_pb2.SetApartReply]
    Tokenize: aio.UnaryUnaryMultiCallable[pd_pb2.TokenizeRequest, pd_pb2.TokenizeReply]
    Detokenize: aio.UnaryUnaryMultiCallable[pd_pb2.DetokenizeRequest, pd_pb2.DetokenizeReply]


def connect(channel: aio.Channel) -> PDStub:
    stub: PDStub = pd_pb2_grpc.PDServiceStub(channel)
    return stub


def submit_message(
    request: InFlightRequest,
    proxy_id: str,
    timeout: float,
    *,
    keeps_items: bool = True,
    successor: int | None = None,
    kv: pd_pb2.KVHandOff | None = None,
    may_hand_over: bool = False,
) -> pd_pb2.SubmitRequest:
    """Submit's message for the request's attempt; the worker gives it up after `timeout` seconds.

    `successor`: that attempt instead, which is to take over; with the `kv` that is kept for it, if any.
    `may_hand_over`: another worker may take this one over.

    One that does not know of items that nobody encodes (`keeps_items` False) searches the store for them, and
    reports them missing then.
    """
    call, machine = request.call, request.lifecycle
    message = pd_pb2.SubmitRequest(
        request_id=request.request_id,
        label=call.label,
        attempt=machine.attempt if successor is None else successor,
        proxy_id=proxy_id,
        model_key=request.bound.model_key,
        adapter=request.bound.adapter,
        timeout=timeout,
        messages=request.content.messages,
        sampling=sampling_to_proto(call.sampling),
        salt=call.salt,
        tenant=tenant_digest(call.tenant),
        priority=call.priority,
        template=template_to_proto(call.template),
        encoder_prompt=encoder_prompt_to_proto(call.encoder) if call.encoder else None,
        transcription=transcription_to_proto(call.transcription),
        pooling=None if call.pooling is None else pooling_to_proto(call.pooling),
        may_hand_over=may_hand_over,
    )
    if call.prompt is not None:
        message.prompt.CopyFrom(prompt_to_proto(call.prompt, unmodified=call.prompt_unmodified))
    for item in request.content.items:
        slot, known = message.items.add(), machine.items[item.mm_hash]
        slot.CopyFrom(known.slot)
        unknown = known.expected and not keeps_items
        slot.state = pd_pb2.ITEM_STATE_READY if unknown else known.state
    if request.trace is not None:
        headers = dict(metadata(request.trace.attempt))
        message.traceparent, message.tracestate = headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, "")
    if (resume := machine.resume) is not None:
        message.resume.CopyFrom(resume)
        message.resume.planned = successor is not None
        if kv is not None:
            message.resume.kv.CopyFrom(kv)
    return message


def _deliver_tokens(tokens: pd_pb2.StepTokens, events: RequestEvents) -> None:
    """One step's plain tokens. ValueError, before any is delivered, where the lists do not fit together."""
    request_ids, attempts = tokens.request_ids[:], tokens.attempts[:]
    positions, texts = tokens.positions[:], tokens.texts[:]
    token_ids = _split(tokens.token_ids[:], tokens.counts[:])
    if not len(request_ids) == len(attempts) == len(positions) == len(texts) == len(token_ids):
        raise ValueError("the PD worker's lists of tokens do not fit together")
    for request_id, attempt, position, ids, text in zip(
        request_ids, attempts, positions, token_ids, texts, strict=True
    ):
        try:
            events.tokens(request_id, attempt, position, ids, text)
        except Exception as error:
            _bad_event(request_id, attempt, error, events)


def _split(token_ids: list[int], counts: list[int]) -> list[list[int]]:
    """The token ids of each request; one for each where there are no counts."""
    if not counts:
        return [[token_id] for token_id in token_ids]
    ends = list(accumulate(counts))
    if ends[-1] != len(token_ids):
        raise ValueError(f"the PD worker sent {len(token_ids)} token ids and counts {ends[-1]}")
    return [token_ids[end - count : end] for end, count in zip(ends, counts, strict=True)]


def deliver(step: pd_pb2.StepEvents, events: RequestEvents) -> None:
    """One step's plain tokens, then its other events. ValueError for lists that do not fit together."""
    if step.HasField("tokens"):
        _deliver_tokens(step.tokens, events)
    _deliver_events(step.events, events)


def _deliver_events(step: Iterable[pd_pb2.RequestEvent], events: RequestEvents) -> None:
    """One step's events. Nearly all of them are tokens, which are read first.

    An event that makes no sense ends its request, and not the stream, which all requests share.
    """
    with_logprobs = events.with_logprobs
    for event in step:
        try:
            tokens = event.tokens
            token_ids = tokens.token_ids[:]
            if not token_ids and not event.HasField("tokens"):
                if event.WhichOneof("body"):  # else one of a later release
                    events.deliver(event.request_id, event)
                continue
            request_id = event.request_id
            logprobs: Sequence[PositionLogprobs] = ()
            if with_logprobs and request_id in with_logprobs:
                logprobs = [logprobs_from_proto(position) for position in tokens.logprobs]
            events.tokens(request_id, event.attempt, tokens.position, token_ids, tokens.text, logprobs)
            if tokens.offered:
                events.deliver(request_id, event)
        except Exception as error:
            _bad_event(event.request_id, event.attempt, error, events)


def _bad_event(request_id: str, attempt: int, error: Exception, events: RequestEvents) -> None:
    logger.warning(
        "request %s: bad event of its PD worker: %r",
        request_id,
        error,
        extra=log_fields(request_id=request_id, attempt=attempt),
    )
    events.deliver(request_id, RequestFailed(InternalError("the PD worker's answer makes no sense")))


def template_to_proto(options: TemplateOptions) -> pd_pb2.TemplateOptions:
    return pd_pb2.TemplateOptions(
        tools=options.tools,
        variables=options.variables,
        no_generation_prompt=not options.generation_prompt,
        continue_final_message=options.continue_final_message,
    )


def prompt_to_proto(prompt: RawPrompt, *, unmodified: bool = False) -> pd_pb2.RawPrompt:
    if isinstance(prompt, str):
        return pd_pb2.RawPrompt(text=prompt)
    return pd_pb2.RawPrompt(token_ids=common_pb2.TokenIds(ids=prompt), unmodified=unmodified)


def encoder_prompt_to_proto(encoder: EncoderPrompt) -> common_pb2.EncoderPrompt | None:
    """What a text encoder reads; None of audio, which is an item and nothing else."""
    if isinstance(encoder.source, str):
        return common_pb2.EncoderPrompt(text=encoder.source)
    if isinstance(encoder.source, tuple):
        return common_pb2.EncoderPrompt(token_ids=common_pb2.TokenIds(ids=encoder.source))
    return None


def transcription_to_proto(transcription: Transcription | None) -> common_pb2.Transcription | None:
    return None if transcription is None else common_pb2.Transcription(**asdict(transcription))


def pooling_to_proto(pooling: PoolingOptions) -> pd_pb2.Pooling:
    task = pd_pb2.Pooling.TASK_SCORE if pooling.scores else pd_pb2.Pooling.TASK_EMBED
    return pd_pb2.Pooling(
        task=pd_pb2.Pooling.TASK_TOKEN_EMBED if pooling.tokens else task,
        method=pooling.method,
        normalize=pooling.normalize,
        dimensions=pooling.dimensions,
        query=pooling.query,
    )
