"""Pooled requests on their way in: how they are pooled, and a query and a document as one prompt."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.base.errors import InvalidRequest
from triptych.base.request.chat import Message, Slot, TextPart
from triptych.models.checkpoint.pooling import METHODS, PoolingDefaults
from triptych.pd_worker.core.pooling import Pooling
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


def score_messages(messages: Sequence[Message], *, own_roles: bool) -> list[Message]:
    """A query and a document as the chat template takes them; InvalidRequest.

    `own_roles`: it has the roles "query" and "document". Else they are one message of the user, in the words
    of Qwen's rerankers.
    """
    roles = [message.role for message in messages]
    if roles not in (["query", "document"], ["system", "query", "document"]):
        raise InvalidRequest("a score is of one query and one document, in this order", param="messages")
    if own_roles:
        return list(messages)
    *system, query, document = messages
    instruction = system[0].content if system and isinstance(system[0].content, str) else _INSTRUCTION
    parts: list[TextPart | Slot] = [TextPart(_INSTRUCT + instruction), TextPart(_QUERY)]
    parts += [*_parts(query), TextPart(_DOCUMENT), *_parts(document)]
    return [Message("system", _SYSTEM), Message("user", parts)]


def _parts(message: Message) -> list[TextPart | Slot]:
    content = message.content or ""
    return [TextPart(content)] if isinstance(content, str) else content
