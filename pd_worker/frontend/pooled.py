"""Pooled requests on their way in: how they are pooled, and a query and a document as one prompt."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.base.errors import InvalidRequest
from triptych.base.request.chat import Message, Slot, TextPart
from triptych.models.checkpoint.pooling import METHODS, PoolingDefaults
from triptych.pd_worker.core.pooling import Pooling
from triptych.pd_worker.frontend.chat_template import parse_messages
from triptych.protos import pd_pb2

#: The texts that Qwen's rerankers were trained with, around the query and the document.
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
_INSTRUCT, _QUERY, _DOCUMENT = "<Instruct>: ", "<Query>:", "\n<Document>:"


def resolve_pooling(message: pd_pb2.Pooling, defaults: PoolingDefaults, hidden_size: int) -> Pooling:
    """What a request asks for, with the checkpoint's defaults where it says nothing; InvalidRequest."""
    if message.task == pd_pb2.Pooling.TASK_SCORE:
        if defaults.task != "score":
            raise InvalidRequest(
                "this model gives no scores: compare embeddings, or serve a reranker", param="model"
            )
        return Pooling(scores=True, score_ids=defaults.score_ids)
    if defaults.task == "score" and not defaults.score_ids:
        raise InvalidRequest("this model gives scores, no embeddings: use POST /v1/rerank", param="model")
    if message.method and message.method not in METHODS:
        raise InvalidRequest(f"pooling must be one of {', '.join(METHODS)}", param="pooling")
    if message.dimensions > hidden_size:
        raise InvalidRequest(
            f"dimensions must be at most {hidden_size}, which this model's embeddings have",
            param="dimensions",
        )
    return Pooling(
        method=message.method or defaults.method,
        normalize=message.normalize if message.HasField("normalize") else defaults.normalize,
        dimensions=message.dimensions,
    )


def parse_pair(raw: bytes) -> list[Message]:
    """Submit's messages of a query and a document, after an instruction or none; InvalidRequest."""
    messages = parse_messages(raw)
    if [message.role for message in messages][-2:] != ["query", "document"] or len(messages) > 3:
        raise InvalidRequest("a score is of one query and one document, in this order", param="messages")
    return messages


def in_words(pair: Sequence[Message]) -> list[Message]:
    """The pair as one message of the user, in the words of Qwen's rerankers."""
    *system, query, document = pair
    instruction = plain_text(system[0]) if system else _INSTRUCTION
    parts: list[TextPart | Slot] = [TextPart(_INSTRUCT + instruction), TextPart(_QUERY)]
    parts += [*_parts(query), TextPart(_DOCUMENT), *_parts(document)]
    return [Message("system", _SYSTEM), Message("user", parts)]


def plain_text(message: Message) -> str:
    """The message's text; InvalidRequest for one with pictures."""
    parts = _parts(message)
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    if len(texts) < len(parts):
        raise InvalidRequest("this model's pairs have no pictures: send text", param="prompt")
    return "".join(texts)


def _parts(message: Message) -> list[TextPart | Slot]:
    content = message.content or ""
    return [TextPart(content)] if isinstance(content, str) else content
