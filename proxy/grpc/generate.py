"""A GenerateRequest of gRPC turned into a ChatCall, or into an error that names the field."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from triptych.base.errors import InvalidRequest
from triptych.protos import common_pb2, proxy_pb2
from triptych.proxy.call.chat import ChatCall, RawPrompt
from triptych.proxy.call.encoder_prompt import EncoderPrompt, Transcription
from triptych.proxy.call.validation import check_salt, check_token_count, in_range
from triptych.proxy.grpc.request import processor_options, sampling_of_message
from triptych.proxy.media.source import AudioPart, ImagePart, parse_image_url


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
        image = parse_image_url(value, kind) if kind == "image_url" else value
        return EncoderPrompt(ImagePart(image, kind), kind)
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
