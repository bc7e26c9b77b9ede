"""Pairs of a query and a document, and their scores: a reranker's, cosines of embeddings, or MaxSim."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Literal, Protocol

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_PAIRS_TEXT, MAX_QUERY_VECTORS, Role, TextPart
from triptych.base.types import Task
from triptych.proxy.call.chat import ChatCall, ChatMessage, Done, Output, PoolingOptions
from triptych.proxy.call.pooled import end_of, pool_all, vector_of
from triptych.proxy.call.validation import check_image_count, check_text
from triptych.proxy.media.source import ItemPart
from triptych.proxy.media.spool import MediaHold
from triptych.proxy.quotas.call_context import CallContext

#: Parts of one query, document or text, which stand where a chat has a message's content.
Content = str | tuple[TextPart | ItemPart, ...]


#: Gives the output of a call.
Chat = Callable[[ChatCall], AsyncGenerator[list[Output], None]]


class PooledDispatcher(Protocol):
    """The dispatcher as calls without generation use it."""

    def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]: ...

    def task(self, model: str) -> Task: ...


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
        """The score of every pair, in order: a reranker's, MaxSim, else the cosine of embeddings."""
        vectors: dict[int, array[float]] = {}

        def keep(index: int, done: Done) -> None:
            vectors[index] = vector_of(done)
            count(done)

        chat: Chat = partial(dispatcher.chat, context=context)
        # Thousands of calls are made in a thread: together they take tens of milliseconds.
        if (task := dispatcher.task(self.first.model)) in ("score", "token_embed"):
            if task == "score":
                calls = await asyncio.to_thread(self.pair_calls)
            else:
                queries, calls = await asyncio.to_thread(self.retriever_calls)
                late = LateInteraction(chat, queries, count)
                calls, chat = await late.with_query(calls), late.chat
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

    def retriever_calls(self) -> tuple[dict[str, ChatCall], tuple[ChatCall, ...]]:
        """One call for each pair's document, and that of its query by the document's label."""
        queries: dict[int, ChatCall] = {}
        by_label: dict[str, ChatCall] = {}
        documents: list[ChatCall] = []

        def call(role: Literal["query", "document"], at: int, content: Content, param: str) -> ChatCall:
            return replace(
                self.first,
                label=f"{self.first.label}#{role[0]}{at}",
                messages=(ChatMessage(role, content),),
                prompt_param=param,
                pooling=PoolingOptions(tokens=True),
                media=MediaHold(),
            )

        for at, pair in enumerate(self.pairs):
            if id(pair.query) not in queries:
                queries[id(pair.query)] = call("query", at, pair.query, pair.query_param)
            documents.append(call("document", at, pair.document, pair.document_param))
            by_label[documents[-1].label] = queries[id(pair.query)]
        return by_label, tuple(documents)

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


class LateInteraction:
    """Calls of documents, each with the vectors of its query, which are asked for first.

    A query that all of them have is asked for once. Others are held only while their document is under way.
    """

    def __init__(self, chat: Chat, queries: Mapping[str, ChatCall], count: Callable[[Done], None]) -> None:
        """`queries` by the labels of the documents' calls."""
        self._chat = chat
        self._queries = queries
        self._count = count
        self._shared = b""

    async def with_query(self, documents: Sequence[ChatCall]) -> tuple[ChatCall, ...]:
        """The calls, with the time that is left after that of a query which all have."""
        asked = {id(call): call for call in self._queries.values()}
        first, *others = documents
        if len(asked) > 1:
            return tuple(documents)
        clock = asyncio.get_running_loop().time
        began = clock()
        self._shared = await self._vectors(first, first.timeout)
        return replace(first, timeout=first.timeout - (clock() - began)), *others

    async def chat(self, call: ChatCall) -> AsyncGenerator[list[Output], None]:
        """The output of a document's call, which is its score."""
        clock = asyncio.get_running_loop().time
        began = clock()
        query = self._shared or await self._vectors(call, call.timeout)
        pooling = PoolingOptions(tokens=True, query=query)
        given = replace(call, pooling=pooling, timeout=call.timeout - (clock() - began))
        async with aclosing(self._chat(given)) as batches:
            async for outputs in batches:
                yield outputs

    async def _vectors(self, document: ChatCall, timeout: float) -> bytes:
        query = self._queries[document.label]
        done = await end_of(self._chat, replace(query, timeout=timeout, is_part=True))
        self._count(done)
        if len(done.pooled) > MAX_QUERY_VECTORS:
            raise InvalidRequest(
                f"{query.prompt_param}: the vectors of its {done.usage.prompt_tokens} tokens have "
                f"{len(done.pooled)} bytes; this server compares at most {MAX_QUERY_VECTORS}: shorten it",
                param=query.prompt_param,
            )
        return done.pooled


def check_pairs(pairs: Sequence[Pair], instruction: str, max_images: int) -> None:
    """InvalidRequest for a pair with too many pictures or too much text, or too long an instruction."""
    check_text(len(instruction), "instruction")
    sent = 0
    for pair in pairs:
        characters = characters_of(pair.query) + characters_of(pair.document)
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


#: What a message of a late-interaction model is.
RETRIEVER_ROLES: dict[str, Role] = {"query": "query", "document": "document", "user": "user"}


def retriever_call(first: ChatCall, role: Role, content: Content, max_images: int) -> ChatCall:
    """`first` with one message, whose tokens are to have a vector each; InvalidRequest if it is too much."""
    check_text(characters_of(content), "messages")
    check_image_count(images_of(content), max_images, "messages")
    return replace(first, messages=(ChatMessage(role, content),), prompt_param="messages")


def characters_of(content: Content) -> int:
    """Of its texts."""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text) for part in content if isinstance(part, TextPart))


def images_of(content: Content) -> int:
    """Its pictures and videos."""
    return 0 if isinstance(content, str) else sum(not isinstance(part, TextPart) for part in content)


def best_first(scores: Sequence[float], top_n: int) -> list[int]:
    """The places of the best `top_n` scores (0: of all), equal ones in order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
