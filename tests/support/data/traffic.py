"""Mixed requests for a cluster, as clients send them and as the oracle reads them."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpcore2
import numpy as np
from openai import AsyncOpenAI
from PIL import Image

from support.processes.cluster import PATIENCE, data_url
from support.waiting import within

WORDS = ("import", "os", "return", "self", "value", "name", "list", "while", "print", "class", "open")

# Every client, of http:// too, would read the system's CAs: that takes longer than most requests.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

#: Output tokens of a stream that is long enough to be broken in its middle.
STREAM_TOKENS = 100


@dataclass(frozen=True)
class Case:
    """One request: parts are texts and the indices of its pictures."""

    parts: tuple[str | int, ...]
    images: tuple[Image.Image, ...] = ()

    @property
    def encoded(self) -> bool:
        """Whether something of it goes to an encoder."""
        return bool(self.images)

    def oracle_messages(self) -> list[dict[str, Any]]:
        content = [
            {"type": "image"} if isinstance(part, int) else {"type": "text", "text": part}
            for part in self.parts
        ]
        return [{"role": "user", "content": content}]

    def client_messages(self) -> list[dict[str, Any]]:
        content = [
            {"type": "image_url", "image_url": {"url": data_url(self.images[part])}}
            if isinstance(part, int)
            else {"type": "text", "text": part}
            for part in self.parts
        ]
        return [{"role": "user", "content": content}]


@dataclass
class Answer:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Any = None
    timings: dict[str, Any] | None = None


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Waves of colour: every seed another picture, none of them noise."""
    y, x = np.mgrid[0:height, 0:width]
    a = np.random.default_rng(seed).uniform(0.02, 0.4, 6)
    waves = [127 + 127 * np.sin(a[2 * i] * x + a[2 * i + 1] * y + seed) for i in range(3)]
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8))


def mixed_cases(
    count: int,
    seed: int = 0,
    sizes: Sequence[tuple[int, int]] = ((64, 64), (96, 64)),
    draw: Callable[[int, int, int], Image.Image] = picture,
) -> list[Case]:
    """Text, one picture, three pictures, and pictures that several requests share, in two sizes.

    `draw` makes a picture of a seed, a width and a height.
    """
    rng = random.Random(seed)
    shared = [draw(1000 + i, *sizes[i % len(sizes)]) for i in range(3)]

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(4, 24))) + f" {rng.randrange(1000)}"

    cases = []
    for index in range(count):
        own = [draw(seed * 7919 + index * 3 + i, *rng.choice(sizes)) for i in range(3)]
        kind = index % 4
        if kind == 0:
            cases.append(Case((text(),)))
        elif kind == 1:
            cases.append(Case((0, text()), (own[0],)))
        elif kind == 2:
            cases.append(Case((text(), 0, text(), 1, 2, text()), tuple(own)))
        else:
            cases.append(Case((0, text(), 1, text()), (rng.choice(shared), own[1])))
    return cases


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


async def ask(
    url: str, case: Case, tokens: int, model: str = "", into: Answer | None = None, **extra: Any
) -> Answer:
    """Streams one greedy answer of exactly `tokens` tokens, on a connection of its own.

    `into` grows while the answer comes. AssertionError when the whole takes longer than a test's patience.
    """
    async with client_of(url) as client:
        return await ask_with(client, case, tokens, model, into, **extra)


async def ask_with(
    client: AsyncOpenAI, case: Case, tokens: int, model: str = "", into: Answer | None = None, **extra: Any
) -> Answer:
    """The same with a client that is there already."""
    answer = Answer() if into is None else into
    await within("a whole answer", _stream(client, case, tokens, model, answer, extra))
    return answer


async def _stream(
    client: AsyncOpenAI, case: Case, tokens: int, model: str, answer: Answer, extra: dict[str, Any]
) -> None:
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model=model,
        messages=case.client_messages(),
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True, "triptych_timings": True} | extra,
    )
    async for chunk in stream:
        more = chunk.model_extra or {}
        answer.prompt_token_ids += more.get("prompt_token_ids") or []
        answer.timings = more.get("triptych_timings") or answer.timings
        answer.usage = chunk.usage or answer.usage
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
            answer.token_ids += (choice.model_extra or {}).get("token_ids") or []
            answer.finish_reason = choice.finish_reason or answer.finish_reason


async def ask_all(
    url: str, cases: Sequence[Case], tokens: int, model: str = "", **extra: Any
) -> list[Answer]:
    """All cases at once."""
    return list(await asyncio.gather(*(ask(url, case, tokens, model, **extra) for case in cases)))


def expected(path: Path, cases: Sequence[Case], tokens: int) -> list[Any]:
    """The oracle's answers."""
    from support.data.oracle import oracle

    return [
        oracle(
            path,
            case.oracle_messages(),
            [case.images[p] for p in case.parts if isinstance(p, int)],
            max_new_tokens=tokens,
        )
        for case in cases
    ]
