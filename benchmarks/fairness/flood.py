"""A flood: what one key sends without a break, and what another key asks for meanwhile."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.fairness import media
from benchmarks.fairness.sends import SERVICE, Post, Send

#: What a flood would take from others: turns of the proxy's event loop, its parser, the engine, or decoders.
Kind = Literal["loop", "parser", "engine", "decoder"]
#: What B asks for: a text, a fresh picture of 100x70, or one whose body is above 64 KiB.
Question = Literal["text", "picture", "large picture"]
MODEL = "demo"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
FREE_CALLS = (f"{HEALTH}Check", f"{HEALTH}List", f"{SERVICE}ListModels", REFLECTION, f"{HEALTH}Watch")
MIB = 1 << 20
TURN = [{"role": "user", "content": "hi"}]
#: A small body of each path that takes JSON, with what has to be changed for it to be refused.
SMALL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURN, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"messages": TURN, "max_tokens": 2},
    f"{MESSAGES}/count_tokens": {"messages": TURN},
    "/v1/embeddings": {"input": ["hi"]},
    "/pooling": {"input": ["hi"]},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/score": {"text_1": "hi", "text_2": "ho"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
CALLS = tuple(f"{SERVICE}{name}" for name in ("Chat", "Generate", "Embed", "Rerank"))
OPEN_PAGES = ("/", "/docs", "/page/{name}", "/health", "/ready")
KEYED_GETS = (
    "/v1/models",
    "/v1/models/{model}",
    "/version",
    "/openapi.json",
    "/metrics",
    "/cluster",
    "/cluster/requests",
    "/cluster/requests/{name}",
)


@dataclass(frozen=True, slots=True)
class Flood:
    """What A sends by `clients` at once, and what B asks for; the class says what A would take from B.

    `make` gives the sends for a scale, of which 1 is the full one. `again`: they are repeated until the flood
    ends, else each is sent once. `keys`: so many keys are in use.
    """

    name: str
    sends: str
    asks: Question
    kind: Kind
    doors: frozenset[str]
    make: Callable[[float], Sequence[Send]]
    clients: int
    again: bool = False
    keys: int = 2
    keyless: bool = False


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": MODEL} | fields, separators=(",", ":")).encode()


def chat_post(content: Any = "hi", **fields: Any) -> Post:
    messages = [{"role": "user", "content": content}]
    return Post(CHAT, body_of({"messages": messages, "max_tokens": 2} | fields))


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def question(asks: Question, number: object) -> Post:
    """What B, and an honest neighbour, ask for."""
    if asks == "text":
        return chat_post()
    width, height = (100, 70) if asks == "picture" else (220, 160)
    url = data_url(media.noise_png(width, height, number), "image/png")
    part = {"type": "image_url", "image_url": {"url": url}}
    return chat_post([part, {"type": "text", "text": "What?"}])


def at_paths(*paths: str) -> frozenset[str]:
    return frozenset(f"POST {path}" for path in paths)
