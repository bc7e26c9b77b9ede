"""The table of floods: what one key sends without a break, and what another key asks for meanwhile.

Each stays within every limit of its key. A new HTTP path or gRPC method needs a flood that names it among its
`doors`: `tests/security/fairness/` looks.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from benchmarks.fairness import media
from benchmarks.fairness.flood import (
    CALLS,
    CHAT,
    FORMS,
    FREE_CALLS,
    HEALTH,
    KEYED_GETS,
    MESSAGES,
    MIB,
    MODEL,
    OPEN_PAGES,
    REFLECTION,
    RESPONSES,
    SMALL,
    Flood,
    at_paths,
    body_of,
    chat_post,
    data_url,
)
from benchmarks.fairness.oddities import ODDITIES
from benchmarks.fairness.sends import SERVICE, Call, Gets, Post, Send
from triptych.protos import proxy_pb2


def _nested(scale: float, size: int) -> str:
    return "[" + "[]," * int(size * scale / 3) + "[]]"


def _message(method: str, options: str) -> bytes:
    """A small message of the method with this text as its processor options."""
    match method.removeprefix(SERVICE):
        case "Chat":
            chat = proxy_pb2.ChatRequest(model=MODEL, chat_template_kwargs=f'{{"a":{options}}}')
            chat.messages.add(role="user").parts.add(text="hi")
            return chat.SerializeToString()
        case "Generate":
            kind: Any = proxy_pb2.GenerateRequest
        case "Embed":
            kind = proxy_pb2.EmbedRequest
        case _:
            kind = proxy_pb2.RerankRequest
    return bytes(kind(model=MODEL, mm_processor_kwargs=f'{{"a":{options}}}').SerializeToString())


def grpc_tools(scale: float) -> Sequence[Send]:
    request = proxy_pb2.ChatRequest(model=MODEL)
    request.messages.add(role="user").parts.add(text="hi")
    request.tools.tools = _nested(scale, 60 * MIB)
    return (Call(CALLS[0], request.SerializeToString()),)


def grpc_options(scale: float) -> Sequence[Send]:
    return tuple(Call(method, _message(method, _nested(scale, 4 * MIB))) for method in CALLS)


def grpc_fields(scale: float) -> Sequence[Send]:
    """The second field of each message, without a content, again and again."""
    return tuple(
        Call(method, b"\x12\x00" * int(60_000 * scale)) for method in (*CALLS, f"{SERVICE}ListModels")
    )


def wrong_bodies(scale: float) -> Sequence[Send]:
    """For each path a word that no body may have in its place, and an unknown kind of part."""
    posts = [Post(path, body_of(fields | {"model": 1})) for path, fields in SMALL.items()]
    turns: tuple[Any, ...] = (
        [{"role": "nobody", "content": "hi"}],
        [{"role": "user", "content": [{"type": "nothing", "text": "hi"}]}],
    )
    posts += [
        Post(path, body_of({"messages": turn, "max_tokens": 2}))
        for path in (CHAT, MESSAGES)
        for turn in turns
    ]
    posts += [chat_post(response_format={"type": "nothing"}), chat_post(temperature=3)]
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ndemo\r\n--x--\r\n'
    return (*posts, *(Post(path, form, "multipart/form-data; boundary=x") for path in FORMS))


def some_gets(scale: float) -> Sequence[Send]:
    paths = tuple(path.replace("{model}", MODEL).replace("{name}", "none") for path in KEYED_GETS)
    return (Gets(paths, 8), Gets(("/cluster/events",), read=False))


def unread_pages(scale: float) -> Sequence[Send]:
    paths = ("/docs", "/", "/page/style.css", "/health", "/ready")
    return (Gets(paths, 6, read=False),) * int(1500 * scale)


def free_calls(scale: float) -> Sequence[Send]:
    calls = (Call(method, b"") for method in FREE_CALLS[:-2])
    return (*calls, Call(REFLECTION, b"\x3a\x00"), Call(f"{HEALTH}Watch", b"", 0.5))


def wrong_keys(scale: float) -> Sequence[Send]:
    return (Gets(("/v1/models",)), Call(f"{SERVICE}ListModels", b""))


def long_texts(scale: float) -> Sequence[Send]:
    text = "a b " * int(2_000_000 * scale)
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        ("/v1/completions", {"prompt": text, "max_tokens": 2}),
        ("/tokenize", {"prompt": text}),
    )
    return tuple(Post(path, body_of(fields)) for path, fields in bodies) * 4


def stop_strings(scale: float) -> Sequence[Send]:
    stops = ["x" * int(2_000_000 * scale)] * 16
    return (
        chat_post(stop=stops, n=16),
        Post("/v1/completions", body_of({"prompt": "hi", "stop": stops, "n": 16, "max_tokens": 2})),
    )


def many_items(scale: float) -> Sequence[Send]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    block = {"type": "text", "text": "x"}
    turn = [{"role": "user", "content": [block] * int(150_000 * scale)}]
    return (
        Post(RESPONSES, body_of({"input": [call] * int(25_000 * scale)})),
        Post(MESSAGES, body_of({"messages": turn, "max_tokens": 2})),
    )


def long_answers(scale: float) -> Sequence[Send]:
    tokens = int(3000 * scale)
    fields = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    return tuple(chat_post(f"q{number}", **fields) for number in range(128))


def many_inputs(scale: float) -> Sequence[Send]:
    texts = [f"{number} " + "a red circle " * int(100 * scale) for number in range(int(2048 * scale))]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": texts},
        "/pooling": {"input": texts},
        **dict.fromkeys(("/v1/rerank", "/rerank"), {"query": "red", "documents": texts}),
        **dict.fromkeys(("/v1/score", "/score"), {"text_1": "red", "text_2": texts}),
    }
    return tuple(Post(path, body_of(fields)) for path, fields in bodies.items())


def _salted(part: dict[str, Any], count: int, **fields: Any) -> tuple[Post, ...]:
    """The same file as another item each time."""
    content = [part, {"type": "text", "text": "x"}]
    return tuple(chat_post(content, cache_salt=f"salt{number}", **fields) for number in range(count))


def slow_videos(scale: float) -> Sequence[Send]:
    url = data_url(media.long_webm(int(60_000 * scale)), "video/webm")
    part = {"type": "video_url", "video_url": {"url": url}}
    return _salted(part, 12, mm_processor_kwargs={"num_frames": 4})


def slow_pictures(scale: float) -> Sequence[Send]:
    url = data_url(media.tall_png(int(39_999_999 * scale)), "image/png")
    return _salted({"type": "image_url", "image_url": {"url": url}}, 200)


def slow_sounds(scale: float) -> Sequence[Send]:
    sound = media.wide_flac(max(int(600 * scale), 1))
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ndemo\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.flac"\r\n\r\n'
    body = form + sound + b"\r\n--x--\r\n"
    part = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sound).decode(), "format": "flac"},
    }
    return (*(Post(path, body, "multipart/form-data; boundary=x") for path in FORMS), *_salted(part, 4))


FLOODS: dict[str, Flood] = {
    flood.name: flood
    for flood in (
        Flood(
            "grpc-tools",
            "one gRPC call with 60 MB of tools, `[[],[],…]`",
            "text",
            "loop",
            frozenset({CALLS[0]}),
            grpc_tools,
            1,
            again=True,
        ),
        Flood(
            "grpc-options",
            "gRPC calls of each method with 4 MiB of JSON as options, 2 at once",
            "text",
            "loop",
            frozenset(CALLS),
            grpc_options,
            2,
            again=True,
        ),
        Flood(
            "grpc-fields",
            "gRPC messages of 60,000 empty fields, 4 at once",
            "text",
            "loop",
            frozenset({*CALLS, f"{SERVICE}ListModels"}),
            grpc_fields,
            4,
            again=True,
        ),
        Flood(
            "wrong-bodies",
            "small bodies with one wrong word, 4 at once",
            "text",
            "loop",
            at_paths(*SMALL, *FORMS),
            wrong_bodies,
            4,
            again=True,
        ),
        Flood(
            "wrong-keys",
            "keys that open nothing, 4 at once, where 10,000 keys are in use",
            "text",
            "loop",
            frozenset({"GET /v1/models", f"{SERVICE}ListModels"}),
            wrong_keys,
            4,
            again=True,
            keys=10_000,
        ),
        Flood(
            "unread-pages",
            "1,500 connections without a key, each with 30 GETs of pages, whose replies are not read",
            "text",
            "loop",
            frozenset(f"GET {path}" for path in OPEN_PAGES),
            unread_pages,
            16,
            keyless=True,
        ),
        Flood(
            "gets",
            "GETs of everything that a key may read, 64 on each of 8 connections",
            "text",
            "loop",
            frozenset(f"GET {path}" for path in (*KEYED_GETS, "/cluster/events")),
            some_gets,
            8,
            again=True,
        ),
        Flood(
            "free-calls",
            "gRPC health checks, lists of models and reflection, 8 at once",
            "text",
            "loop",
            frozenset(FREE_CALLS),
            free_calls,
            8,
            again=True,
        ),
        Flood(
            "long-texts",
            "16 texts of 8 MB",
            "text",
            "parser",
            at_paths(CHAT, "/v1/completions", "/tokenize"),
            long_texts,
            16,
            again=True,
        ),
        Flood(
            "stop-strings",
            "two calls of 16 answers with 16 stop strings of 2 MB",
            "text",
            "parser",
            at_paths(CHAT, "/v1/completions"),
            stop_strings,
            2,
            again=True,
        ),
        Flood(
            "many-items",
            "25,000 function calls to /v1/responses, and 150,000 blocks to /v1/messages",
            "large picture",
            "parser",
            at_paths(RESPONSES, MESSAGES),
            many_items,
            2,
            again=True,
        ),
        Flood(
            "long-answers",
            "128 answers of 3,000 tokens",
            "text",
            "engine",
            at_paths(CHAT),
            long_answers,
            128,
        ),
        Flood(
            "many-inputs",
            "2,048 inputs to embed, to rank and to score, 5 calls at once",
            "text",
            "engine",
            at_paths("/v1/embeddings", "/pooling", "/v1/rerank", "/rerank", "/v1/score", "/score"),
            many_inputs,
            5,
            again=True,
        ),
        Flood(
            "slow-videos",
            "6 videos of 6 MB, each of 60,000 frames in one group",
            "picture",
            "decoder",
            at_paths(CHAT),
            slow_videos,
            6,
            again=True,
        ),
        Flood(
            "slow-pictures",
            "12 PNGs of 78 KB, one pixel wide and 39,999,999 high",
            "picture",
            "decoder",
            at_paths(CHAT),
            slow_pictures,
            12,
            again=True,
        ),
        Flood(
            "slow-sounds",
            "FLAC files of 600 s in 8 channels of 192 kHz, 6 at once",
            "picture",
            "decoder",
            at_paths(CHAT, *FORMS),
            slow_sounds,
            6,
            again=True,
        ),
        *ODDITIES,
    )
}


def covered() -> frozenset[str]:
    """Every door that a flood is at."""
    return frozenset(door for flood in FLOODS.values() for door in flood.doors)
