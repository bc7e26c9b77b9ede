"""What encoder-decoder models are asked, as forms, two prompts and media: a call, or an error of ours."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

from support.hostile.fuzzing import Fuzzer, messages, mutate, random_json, randoms, refused_well
from triptych.base.errors import RequestError
from triptych.protos import pd_pb2, proxy_pb2
from triptych.protos.convert import sampling_to_proto
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.validation import MAX_SALT, ModelKind, fit
from triptych.proxy.grpc.server import generate_call
from triptych.proxy.http.form_body import parse_form
from triptych.proxy.openai.audio.request import parse_transcription
from triptych.proxy.openai.completions.request import parse_completion
from triptych.proxy.pd.wire import encoder_prompt_to_proto, prompt_to_proto, transcription_to_proto

WAV = base64.b64encode(b"RIFF\x24\x00\x00\x00WAVEfmt ").decode()
PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
KINDS = [ModelKind(True, "text"), ModelKind(True, "audio"), ModelKind(True, "image"), ModelKind()]


def as_sent(call: ChatCall) -> None:
    """What workers would get of the call, if the model is of some kind: it can be written."""
    for kind in KINDS:
        try:
            fitting = fit(call, kind)
            if fitting.encoder is not None and fitting.encoder.modality == "text":
                fitting.encoder.text_bytes()
        except RequestError as error:
            refused_well(error)
            continue
        message = pd_pb2.SubmitRequest(
            sampling=sampling_to_proto(fitting.sampling),
            salt=fitting.salt,
            timeout=fitting.timeout,
            encoder_prompt=encoder_prompt_to_proto(fitting.encoder) if fitting.encoder else None,
            transcription=transcription_to_proto(fitting.transcription),
        )
        if fitting.prompt is not None:
            message.prompt.CopyFrom(prompt_to_proto(fitting.prompt))
        assert message.SerializeToString()


SINGLETONS: list[Any] = [
    "hello",
    [1, 2],
    [],
    "",
    [-1],
    [1 << 32],
    [True],
    ["x"],
    {"prompt": "a"},
    {"prompt": ""},
]
SINGLETONS += [
    {"prompt_token_ids": [5, 6]},
    {"prompt_token_ids": "x"},
    {"prompt": "a", "prompt_token_ids": [1]},
]
MEDIA: list[Any] = [{"audio": {"data": WAV}}, {"audio": {"data": WAV, "format": "wav"}}, {"audio": {}}, {}]
MEDIA += [{"audio": {"url": f"data:audio/wav;base64,{WAV}"}}, {"audio": {"url": "http://x/y.wav"}}]
MEDIA += [
    {"image": {"url": PNG}},
    {"image": PNG},
    {"image": {"data": PNG[22:]}},
    {"image": "x"},
    {"video": 1},
]
MEDIA += [{"audio": {"data": "?"}}, {"image": {"url": "file:///etc/passwd"}}, {"audio": 1, "image": 2}]
FIELDS: dict[str, list[Any]] = {
    "prompt": ["hello", [1], ["a", "b"], None],
    "encoder_prompt": [*SINGLETONS, *({"multi_modal_data": media} for media in MEDIA)],
    "decoder_prompt": [*SINGLETONS, {"prompt": "x", "multi_modal_data": MEDIA[0]}],
    "multi_modal_data": MEDIA,
    "mm_processor_kwargs": [{}, {"max_pixels": 7}, {"form": "token_ids"}, {"start_frame": 3}],
    "echo": [True, False],
    "max_tokens": [0, 1, 5],
    "logprobs": [0, 5, 99],
    "n": [1, 3, 99],
    "cache_salt": ["s", "x" * (MAX_SALT + 1)],
}


def completion_of(rng: random.Random) -> bytes:
    body = {
        name: rng.choice(values) if rng.random() < 0.8 else random_json(rng)
        for name, values in FIELDS.items()
        if rng.random() < 0.15
    }
    body.setdefault(*rng.choice((("prompt", "x"), ("encoder_prompt", "x"), ("multi_modal_data", MEDIA[0]))))
    raw = json.dumps(body).encode()
    return raw if rng.random() < 0.85 else mutate(raw, rng, [b"\xff", b"[[[[", b"\\ud800", raw])


def test_two_prompts_and_media_are_calls_or_errors_of_ours(fuzzer: Fuzzer) -> None:
    def check(raw: bytes) -> None:
        try:
            request = parse_completion(raw, "r", timeout=1.0, max_choices=4)
        except RequestError as error:
            refused_well(error)
            return
        for call in request.calls:
            as_sent(call)

    fuzzer.run("completions with two prompts and media", randoms().map(completion_of), check, 200)


VALUES: dict[str, list[str]] = {
    "model": ["", "whisper", "x" * 300],
    "language": ["en", "", "EN", "<|en|>", "x" * 50, "e\x00n", "日本語"],
    "prompt": ["", "Hello", "x" * 40_000, "<|startoftranscript|>"],
    "response_format": ["json", "text", "srt", "vtt", "verbose_json", "xml", ""],
    "temperature": ["0", "0.5", "3", "-1", "nan", "inf", "1e999", "hot", ""],
    "seed": ["0", "-5", "9" * 30, "1.5", "٣", "x"],
    "stream": ["true", "false", "1", "yes", ""],
    "timestamp_granularities[]": ["segment", "word", ""],
    "timestamp_granularities": ["segment"],
    "include[]": ["logprobs"],
    "cache_salt": ["s", "x" * 300, "a\n"],
    "other": ["x"],
}
NAMES = [name.encode() for name in VALUES] + [b"", b"file", b"\xff\xfe", b'a"b', b"x" * 5000]


def form_of(rng: random.Random) -> tuple[bytes, bytes, bool]:
    """A content type, a body, and whether the form asks for a translation. Mostly good."""
    boundary = rng.choice((b"b", b"----WebKitFormBoundary7MA4YWxkTrZu0gW", b"x" * 70, b"a b"))
    parts = []
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 70))):
        name = rng.choice(list(VALUES))
        parts.append((name.encode(), rng.choice(VALUES[name]).encode(), None))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 2))):
        content = rng.choice((b"RIFF....WAVE", b"", b"\r\n--b--\r\n", rng.randbytes(300)))
        parts.append((b"file", content, rng.choice((b"a.wav", b"", b'q"uote.mp3', "ü.ogg".encode()))))
    if rng.random() < 0.1:
        parts.append((rng.choice(NAMES), rng.randbytes(20), rng.choice((None, b"f"))))
    rng.shuffle(parts)
    body = b""
    for name, value, filename in parts:
        body += b"--" + boundary + b'\r\nContent-Disposition: form-data; name="' + name + b'"'
        body += b"" if filename is None else b'; filename="' + filename + b'"'
        body += b"\r\n\r\n" + value + b"\r\n"
    body += b"--" + boundary + b"--\r\n"
    kind = b"multipart/form-data; boundary=" + rng.choice((boundary, b'"' + boundary + b'"'))
    if rng.random() < 0.25:
        body = mutate(body, rng, [b"\r\n", b"--" + boundary, b"\x00", b"Content-Disposition:", body])
    if rng.random() < 0.1:
        kind = rng.choice(
            (b"", b"multipart/form-data", b"application/json", b"multipart/form-data; boundary=", kind * 9)
        )
    return kind, body, rng.random() < 0.3


def test_a_form_with_a_sound_is_a_call_or_an_error_of_ours(fuzzer: Fuzzer) -> None:
    def check(case: tuple[bytes, bytes, bool]) -> None:
        kind, body, translates = case
        try:
            request = parse_transcription(parse_form(kind, body), "r", translates=translates, timeout=1.0)
        except RequestError as error:
            refused_well(error)
        else:
            as_sent(request.call)

    fuzzer.run("audio forms", randoms().map(form_of), check, 200)


def test_a_grpc_generate_request_is_a_call_or_an_error_of_ours(fuzzer: Fuzzer) -> None:
    known = {
        "encoder_text": ["", "hello", "\ud7ff"],
        "image_url": ["", PNG, "http://169.254.169.254/", "file:///x", "x"],
        "audio": [b"", b"RIFF"],
        "mm_processor_kwargs": ["", "{}", '{"max_pixels": 7}', "[1]", '{"a": 1e999}'],
    }

    def check(message: proxy_pb2.GenerateRequest) -> None:
        try:
            as_sent(generate_call(message, timeout=1.0, max_choices=4))
        except RequestError as error:
            refused_well(error)

    fuzzer.run("gRPC generate requests", messages(proxy_pb2.GenerateRequest, known), check, 100)
