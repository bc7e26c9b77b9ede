"""POST /v1/rerank and /v1/score: how relevant documents are to a query, how alike two texts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.proxy.call.chat import PoolingOptions
from triptych.proxy.call.pairs import Content, Pair, PairScoring, best_first, check_pairs
from triptych.proxy.call.validation import check_parts
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import decode_body, to_json
from triptych.proxy.openai.chat.endpoint import CallEndpoint
from triptych.proxy.openai.retrieval.content import ContentField, Contents, content_of, parts_of
from triptych.proxy.openai.retrieval.embeddings import (
    PooledBody,
    PooledReply,
    first_call,
    list_head,
    refuse_unserved,
)
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.quotas.current_call import current_call

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
class RerankRequest:
    """Pairs to score, the number of best ones to return, and the documents to repeat, as they came."""

    pairs: PairScoring
    top_n: int
    documents: tuple[ContentField, ...]


_rerank_decoder = msgspec.json.Decoder(RerankBody)
_score_decoder = msgspec.json.Decoder(ScoreBody)


def parse_rerank(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> RerankRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_rerank_decoder, raw)
    check_parts(parts_of(body.query) + parts_of(body.documents), "documents")
    query = (content_of(body.query, "query"), "query")
    pairs = [Pair(*query, *document) for document in _contents(body.documents, "documents")]
    return RerankRequest(
        _scoring(body, pairs, request_id, max_images, timeout),
        body.top_n or 0,
        () if body.return_documents is False else tuple(body.documents),
    )


def parse_score(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> PairScoring:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_score_decoder, raw)
    check_parts(parts_of(body.text_1) + parts_of(body.text_2), "text_2")
    firsts, seconds = _contents(body.text_1, "text_1"), _contents(body.text_2, "text_2")
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"text_1 holds {len(firsts)} and text_2 {len(seconds)}: send one text_1, or as many as text_2",
            param="text_1",
        )
    firsts *= len(seconds) // len(firsts)
    pairs = [Pair(*first, *second) for first, second in zip(firsts, seconds, strict=True)]
    return _scoring(body, pairs, request_id, max_images, timeout)


def _contents(given: ContentField | list[ContentField], param: str) -> list[tuple[Content, str]]:
    if not isinstance(given, list):
        return [(content_of(given, param), param)]
    return [(content_of(text, f"{param}[{at}]"), f"{param}[{at}]") for at, text in enumerate(given)]


def _scoring(
    body: RerankBody | ScoreBody, pairs: Sequence[Pair], request_id: str, max_images: int, timeout: float
) -> PairScoring:
    refuse_unserved(body)
    check_pairs(pairs, body.instruction or "", max_images)
    first = first_call(body, request_id, timeout, PoolingOptions())
    return PairScoring(first, tuple(pairs), body.instruction or "")


class RerankEndpoint(CallEndpoint[RerankRequest]):
    """Documents by their relevance to a query, the best first."""

    smaller = "send fewer inputs at once"
    body = RerankBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[RerankRequest]:
        return Parse(parse_rerank, self.parse_options(request_id))

    async def answer(self, request: RerankRequest, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.pairs.first.model)
        made = PooledReply(self.dispatcher.quotas["replies"])
        scores = await request.pairs.scores(self.dispatcher, current_call(), made.count)
        for index in best_first(scores, request.top_n):
            result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
            if request.documents:
                document = request.documents[index]
                result["document"] = {"text": document} if isinstance(document, str) else document
            made.append(to_json(result))
        await reply.whole(made.body({"id": f"rerank-{reply.request_id}", "model": model}, "results"))


class ScoreEndpoint(CallEndpoint[PairScoring]):
    """The scores of pairs of texts."""

    smaller = "send fewer inputs at once"
    body = ScoreBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[PairScoring]:
        return Parse(parse_score, self.parse_options(request_id))

    async def answer(self, request: PairScoring, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.first.model)
        made = PooledReply(self.dispatcher.quotas["replies"])
        for index, score in enumerate(await request.scores(self.dispatcher, current_call(), made.count)):
            made.append(to_json({"index": index, "object": "score", "score": score}))
        await reply.whole(made.body(list_head(f"score-{reply.request_id}", model), "data"))


#: What the front door serves of this edge, by path.
ENDPOINTS = {
    **dict.fromkeys(("/v1/rerank", "/rerank"), RerankEndpoint),
    **dict.fromkeys(("/v1/score", "/score"), ScoreEndpoint),
}
