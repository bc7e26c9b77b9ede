"""POST /v1/rerank and /v1/score: how relevant documents are to a query, how alike two texts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.proxy.call.chat import ChatCall, ChatMessage, Done, PoolingOptions
from triptych.proxy.call.validation import check_image_count, check_text
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import decode_body, to_json
from triptych.proxy.media.spool import MediaHold
from triptych.proxy.openai.retrieval.content import (
    Content,
    ContentField,
    Contents,
    content_of,
    images_of,
)
from triptych.proxy.openai.retrieval.embeddings import PooledBody, list_head, pooled_call, refuse_unserved
from triptych.proxy.openai.retrieval.pooled_calls import (
    PooledEndpoint,
    PooledReply,
    Vector,
    pool_all,
    vector_of,
)

Instruction = Annotated[
    str | None, Meta(description="What a reranker is to judge by, in place of its own instruction.")
]


class RerankBody(PooledBody, kw_only=True):
    """POST /v1/rerank, as Jina, Cohere and vLLM have it."""

    query: Annotated[ContentField, Meta(description="A text, or pictures and texts as content.")]
    documents: Annotated[Contents, Meta(description="Each a text, or pictures and texts as content.")]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Number of best documents to return; else all.")
    ] = None
    return_documents: Annotated[
        bool | None, Meta(description="Repeat the documents in the results; true by default.")
    ] = None
    instruction: Instruction = None


class ScoreBody(PooledBody, kw_only=True):
    """POST /v1/score, as vLLM has it."""

    text_1: Annotated[
        ContentField | Contents,
        Meta(description="One, to be compared with every text_2; or as many as text_2."),
    ]
    text_2: Annotated[ContentField | Contents, Meta(description="One or several, each as in text_1.")]
    instruction: Instruction = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document with the paths of their fields."""

    query: Content
    document: Content
    query_param: str
    document_param: str


@dataclass(frozen=True, slots=True)
class RankingRequest:
    """Pairs to score, by calls that begin as `first`, which has no prompt."""

    first: ChatCall
    pairs: tuple[Pair, ...]
    instruction: str
    top_n: int = 0
    #: The documents to repeat, as they came; none where they are not.
    documents: tuple[ContentField, ...] = ()

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


_rerank_decoder = msgspec.json.Decoder(RerankBody)
_score_decoder = msgspec.json.Decoder(ScoreBody)


def parse_rerank(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> RankingRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_rerank_decoder, raw)
    query = content_of(body.query, "query")
    pairs = [
        Pair(query, content_of(document, f"documents[{at}]"), "query", f"documents[{at}]")
        for at, document in enumerate(body.documents)
    ]
    return replace(
        _ranking(body, pairs, body.instruction, request_id, max_images, timeout),
        top_n=body.top_n or 0,
        documents=() if body.return_documents is False else tuple(body.documents),
    )


def parse_score(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> RankingRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_score_decoder, raw)
    firsts, seconds = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"text_1 holds {len(firsts)} and text_2 {len(seconds)}: send one text_1, or as many as text_2",
            param="text_1",
        )
    if len(firsts) == 1:
        firsts *= len(seconds)
    pairs = [
        Pair(first, second, first_param, second_param)
        for (first, first_param), (second, second_param) in zip(firsts, seconds, strict=True)
    ]
    return _ranking(body, pairs, body.instruction, request_id, max_images, timeout)


def _texts(given: ContentField | list[ContentField], param: str) -> list[tuple[Content, str]]:
    if not isinstance(given, list):
        return [(content_of(given, param), param)]
    return [(content_of(text, f"{param}[{at}]"), f"{param}[{at}]") for at, text in enumerate(given)]


def _ranking(
    body: PooledBody,
    pairs: Sequence[Pair],
    instruction: str | None,
    request_id: str,
    max_images: int,
    timeout: float,
) -> RankingRequest:
    refuse_unserved(body)
    for pair in pairs:
        images = images_of(pair.query) + images_of(pair.document)
        check_image_count(images, max_images, pair.document_param)
    check_text(len(instruction or ""), "instruction")
    first = pooled_call(body, request_id, timeout, PoolingOptions())
    return RankingRequest(first, tuple(pairs), instruction or "")


class RankingEndpoint(PooledEndpoint[RankingRequest]):
    """Pairs in; their scores out, by a reranker, or else as the cosines of embeddings."""

    async def _scores(self, request: RankingRequest, made: PooledReply) -> list[float]:
        """The score of every pair, in order."""
        dispatcher, vectors = self.dispatcher, dict[int, Vector]()

        def keep(index: int, done: Done) -> None:
            vectors[index] = vector_of(done)
            made.count(done)

        if dispatcher.scores_pairs(request.first.model):
            calls = request.pair_calls()
            await pool_all(dispatcher.chat, calls, keep)
            return [float(vectors[at][0]) for at in range(len(calls))]
        calls, pairs = request.text_calls()
        await pool_all(dispatcher.chat, calls, keep)
        return [float(np.dot(vectors[one], vectors[two])) for one, two in pairs]


class RerankEndpoint(RankingEndpoint):
    """Documents by their relevance to a query, the best first."""

    body = RerankBody

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> RankingRequest:
        return parse_rerank(raw, request_id, max_images=self.max_images, timeout=self.timeout)

    async def answer(self, request: RankingRequest, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.first.model)
        order = PooledReply(self.dispatcher.quotas["replies"])
        scores = await self._scores(request, order)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
        for index in best:
            result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
            if request.documents:
                document = request.documents[index]
                result["document"] = {"text": document} if isinstance(document, str) else document
            order.append(to_json(result))
        await reply.whole(order.body({"id": f"rerank-{reply.request_id}", "model": model}, "results"))


class ScoreEndpoint(RankingEndpoint):
    """The scores of pairs of texts."""

    body = ScoreBody

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> RankingRequest:
        return parse_score(raw, request_id, max_images=self.max_images, timeout=self.timeout)

    async def answer(self, request: RankingRequest, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.first.model)
        made = PooledReply(self.dispatcher.quotas["replies"])
        for index, score in enumerate(await self._scores(request, made)):
            made.append(to_json({"index": index, "object": "score", "score": score}))
        await reply.whole(made.body(list_head(f"score-{reply.request_id}", model), "data"))
