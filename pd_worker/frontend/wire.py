"""Validation and conversion of protobuf messages, pooled requests among them."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized

import numpy as np

from triptych.base.errors import InvalidRequest
from triptych.base.hashing import MM_HASH
from triptych.base.request import (
    MAX_QUERY_VECTORS,
    Message,
    Slot,
    TemplateOptions,
    TextPart,
)
from triptych.base.types import ItemPlan
from triptych.models.checkpoint.pooling import METHODS, PoolingDefaults
from triptych.pd_worker.core.sampling import Pooling
from triptych.pd_worker.frontend.chat_template import parse_messages
from triptych.protos import common_pb2, pd_pb2
from triptych.protos.convert import plan_from_proto

#: Keys of one notice.
MAX_KEYS = 16384
#: Requests named in one call.
MAX_REQUESTS = 65536
# No slash: ids of attempts in caches are joined with slashes. No space and no control character:
# names go into logs.
_NAME = re.compile(r"[!-.0-~]{1,256}")

_TENANT = re.compile(r"[0-9a-f]{16}")


def checked_plan(message: common_pb2.ItemPlan) -> ItemPlan:
    """An item's plan; InvalidRequest when it is inconsistent."""
    plan = plan_from_proto(message)
    if not MM_HASH.fullmatch(plan.namespace):
        raise InvalidRequest("an item's namespace must be 64 lower-case hex characters", param="items")
    if not (plan.rows and plan.width):
        raise InvalidRequest("an item needs rows and width above 0", param="items")
    if plan.length == 0 and plan.runs is None:
        return plan  # A cross item: it has no placeholder.
    if _embeds(plan) != plan.rows:
        raise InvalidRequest(
            f"an item's runs take {_embeds(plan)} embeddings, but it has {plan.rows} rows", param="items"
        )
    return plan


def _embeds(plan: ItemPlan) -> int:
    """Embeddings that the placeholder takes; -1 when its runs are out of order or out of the span."""
    if plan.runs is None:
        return plan.length
    end, total = 0, 0
    for start, count in plan.runs:
        if start < end or count < 1 or start + count > plan.length:
            return -1
        end, total = start + count, total + count
    return total


def template_from_proto(message: pd_pb2.TemplateOptions) -> TemplateOptions:
    return TemplateOptions(
        tools=message.tools,
        variables=message.variables,
        generation_prompt=not message.no_generation_prompt,
        continue_final_message=message.continue_final_message,
    )


def check_name(field: str, value: str) -> None:
    """InvalidRequest unless `value` can name a proxy or a request."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{field} must have 1 to 256 printable ASCII characters, no space and no slash", param=field
        )


def check_tenant(value: str) -> None:
    """InvalidRequest unless `value` is a digest as `tenant_digest` makes it; it may be empty."""
    if value and not _TENANT.fullmatch(value):
        raise InvalidRequest("tenant must have 16 lower-case hex characters, or none", param="tenant")


def check_label(value: str) -> None:
    """InvalidRequest for a label that must not be logged; it may be empty."""
    if value and not _NAME.fullmatch(value):
        raise InvalidRequest(
            "label must have at most 256 printable ASCII characters, no space and no slash", param="label"
        )


def check_count(field: str, values: Sized, limit: int) -> None:
    """InvalidRequest when one call names more than `limit`."""
    if len(values) > limit:
        raise InvalidRequest(
            f"{field} holds {len(values)} entries; one call takes at most {limit}", param=field
        )


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
    of_tokens = message.task == pd_pb2.Pooling.TASK_TOKEN_EMBED
    if of_tokens != (defaults.task == "token_embed"):
        gives, path = (
            ("one vector", "/v1/embeddings") if of_tokens else ("a vector for each token", "/pooling")
        )
        raise InvalidRequest(f"this model gives {gives}: use POST {path}", param="model")
    if message.method and (of_tokens or message.method not in METHODS):
        raise InvalidRequest(f"pooling must be one of {', '.join(METHODS)}", param="pooling")
    if message.dimensions > (width := defaults.width or hidden_size):
        raise InvalidRequest(
            f"dimensions must be at most {width}, which this model's embeddings have", param="dimensions"
        )
    if message.query:
        _check_query(message.query, message.dimensions or width, of_tokens=of_tokens)
    return Pooling(
        method=message.method or defaults.method,
        normalize=message.normalize if message.HasField("normalize") else defaults.normalize,
        dimensions=message.dimensions,
        query=message.query,
    )


def _check_query(query: bytes, width: int, *, of_tokens: bool) -> None:
    if len(query) > MAX_QUERY_VECTORS:
        raise InvalidRequest(
            f"query: its vectors have {len(query)} bytes; this server takes at most {MAX_QUERY_VECTORS}: "
            "shorten it",
            param="query",
        )
    if not of_tokens or len(query) % (4 * width) or not np.isfinite(np.frombuffer(query, "<f4")).all():
        raise InvalidRequest(f"query holds no vectors of {width} numbers", param="query")


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
