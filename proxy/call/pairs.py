"""Pairs of a query and a document, and their scores: by a reranker, or as cosines of embeddings."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Protocol

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_PAIRS_TEXT, TextPart
from triptych.proxy.call.chat import ChatCall, ChatMessage, Done, Output, PoolingOptions
from triptych.proxy.call.pooled import pool_all, vector_of
from triptych.proxy.call.validation import check_image_count, check_text
from triptych.proxy.media.source import ItemPart
from triptych.proxy.media.spool import MediaHold
from triptych.proxy.quotas.call_context import CallContext

#: Parts of one query, document or text, which stand where a chat has a message's content.
Content = str | tuple[TextPart | ItemPart, ...]


class PooledDispatcher(Protocol):
    """The dispatcher as calls without generation use it."""

    def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]: ...

    def scores_pairs(self, model: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document with the paths of their fields."""

    query: Content
    query_param: str
    document: Content
    document_param: str


@dataclass(frozen=True, slots=True)
class PairScoring:
    """Pairs to score, by calls that begin as `first`, which has no prompt."""

    first: ChatCall
    pairs: tuple[Pair, ...]
    instruction: str = ""

    async def scores(
        self, dispatcher: PooledDispatcher, context: CallContext, count: Callable[[Done], None]
    ) -> list[float]:
        """The score of every pair, in order: a reranker's, else the cosine of embeddings."""
        vectors: dict[int, array[float]] = {}

        def keep(index: int, done: Done) -> None:
            vectors[index] = vector_of(done)
            count(done)

        chat = partial(dispatcher.chat, context=context)
        # Thousands of calls are made in a thread: together they take tens of milliseconds.
        if dispatcher.scores_pairs(self.first.model):
            calls = await asyncio.to_thread(self.pair_calls)
            await pool_all(chat, calls, keep)
            return [float(vectors[at][0]) for at in range(len(calls))]
        calls, pairs = await asyncio.to_thread(self.text_calls)
        await pool_all(chat, calls, keep)
        scores = []
        for one, two in pairs:
            scores.append(sum(map(mul, vectors[one], vectors[two])))
            # A product is a fraction of a millisecond; there may be two thousand.
            await asyncio.sleep(0)
        return scores

    def pair_calls(self) -> tuple[ChatCall, ...]:
        """One call for each pair, for a model that scores pairs."""
        system = (ChatMessage("system", self.instruction),) if self.instruction else ()
        # A picture of the query is loaded once for all pairs.
        shared = images_of(self.pairs[0].query) > 0
        return tuple(
            replace(
                self.first,
                label=f"{self.first.label}#d{at}" if at else self.first.label,
                messages=(*system, ChatMessage("query", pair.query), ChatMessage("document", pair.document)),
                prompt_param=pair.document_param,
                pooling=PoolingOptions(scores=True),
                media=self.first.media if shared else MediaHold(),
            )
            for at, pair in enumerate(self.pairs)
        )

    def text_calls(self) -> tuple[tuple[ChatCall, ...], list[tuple[int, int]]]:
        """One call for each different text, for a model of embeddings; the places of each pair's two."""
        places: dict[int, int] = {}
        calls: list[ChatCall] = []

        def place(content: Content, param: str) -> int:
            if id(content) not in places:
                places[id(content)] = len(calls)
                plain = isinstance(content, str)
                calls.append(
                    replace(
                        self.first,
                        label=f"{self.first.label}#t{len(calls)}" if calls else self.first.label,
                        messages=() if plain else (ChatMessage("user", content),),
                        prompt=content if isinstance(content, str) else None,
                        prompt_param=param,
                        pooling=PoolingOptions(normalize=True),
                        media=MediaHold(),
                    )
                )
            return places[id(content)]

        pairs = [
            (place(pair.query, pair.query_param), place(pair.document, pair.document_param))
            for pair in self.pairs
        ]
        return tuple(calls), pairs


def check_pairs(pairs: Sequence[Pair], instruction: str, max_images: int) -> None:
    """InvalidRequest for a pair with too many pictures or too much text, or too long an instruction."""
    check_text(len(instruction), "instruction")
    sent = 0
    for pair in pairs:
        characters = _characters(pair.query) + _characters(pair.document)
        check_text(characters, pair.document_param)
        sent += characters
        check_image_count(images_of(pair.query) + images_of(pair.document), max_images, pair.document_param)
    if sent > MAX_PAIRS_TEXT:
        param = pairs[0].query_param
        raise InvalidRequest(
            f"{param}: with each document it makes {sent} characters; this server takes at most "
            f"{MAX_PAIRS_TEXT}: send fewer documents at once",
            param=param,
        )


def _characters(content: Content) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text) for part in content if isinstance(part, TextPart))


def images_of(content: Content) -> int:
    """Its pictures and videos."""
    return 0 if isinstance(content, str) else sum(not isinstance(part, TextPart) for part in content)


def best_first(scores: Sequence[float], top_n: int) -> list[int]:
    """The places of the best `top_n` scores (0: of all), equal ones in order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
