"""POST /pooling: a vector for each token of an input, by a late-interaction model, as vLLM has it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Literal

import msgspec
import pybase64
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.proxy.call.chat import Done, PoolingOptions
from triptych.proxy.call.pairs import retriever_call
from triptych.proxy.call.pooled import MAX_INPUTS, input_calls, pool_all, rows_of
from triptych.proxy.call.validation import check_parts
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import decode_body, to_json
from triptych.proxy.openai.chat.endpoint import CallEndpoint
from triptych.proxy.openai.chat.request import Parts
from triptych.proxy.openai.completions.request import Prompts, raw_prompts
from triptych.proxy.openai.fields.sampling import late
from triptych.proxy.openai.retrieval.content import ContentBody, content_of, parts_of
from triptych.proxy.openai.retrieval.embeddings import (
    EmbeddingRequest,
    PooledBody,
    PooledReply,
    first_call,
    list_head,
    refuse_unserved,
)
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.quotas.current_call import current_call

#: Bytes that become base64 at once: none of them padded, and the interpreter is free between two.
_PIECE = 3 << 17


class RetrieverMessage(msgspec.Struct):
    """What a late-interaction model reads: a query, or a document."""

    role: Annotated[
        Literal["query", "document", "user"],
        Meta(description="A query is written as the checkpoint's processor writes one; others as they are."),
    ]
    content: str | Parts


class PoolingBody(PooledBody, kw_only=True):
    """POST /pooling."""

    input: Annotated[
        object, late(Prompts), Meta(description="A text, token ids, or a list of them: prompts as they are.")
    ] = None
    messages: Annotated[
        Annotated[list[RetrieverMessage], Meta(min_length=1, max_length=1)] | None,
        Meta(description="In place of input: one query or document, with texts and pictures as its parts."),
    ] = None
    task: Annotated[str | None, Meta(description="token_embed, the only one here.")] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        Meta(description="Elements of a vector that are returned; its length is 1 after the cut."),
    ] = None
    use_activation: Annotated[
        bool | None, Meta(description="Whether a vector's length becomes 1; true by default.")
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Meta(description="base64: of little-endian float32, one vector after the other."),
    ] = None
    embed_dtype: Annotated[Literal["float32"] | None, Meta(description="What vectors always are.")] = None
    endianness: Annotated[
        Literal["native", "little"] | None, Meta(description="The one of base64: little.")
    ] = None
    add_special_tokens: object = None


_decoder = msgspec.json.Decoder(PoolingBody)


def parse_pooling(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> EmbeddingRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_decoder, raw)
    refuse_unserved(body)
    if body.task not in (None, "token_embed"):
        raise InvalidRequest(
            "task: only token_embed is served here: use /v1/embeddings, /v1/rerank or /v1/score", param="task"
        )
    if body.add_special_tokens is False and body.messages is None:
        raise InvalidRequest(
            "add_special_tokens: false is not supported: send input as token ids", param="add_special_tokens"
        )
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("input or messages must be there, and not both", param="input")
    pooling = PoolingOptions(tokens=True, normalize=body.use_activation, dimensions=body.dimensions or 0)
    first = first_call(body, request_id, timeout, pooling)
    as_base64 = body.encoding_format == "base64"
    if body.messages is None:
        prompts = raw_prompts(body.input, "input", MAX_INPUTS)
        several = isinstance(body.input, list) and len(prompts) > 1
        return EmbeddingRequest(tuple(input_calls(first, prompts, "input", several=several)), as_base64)
    message = body.messages[0]
    given = ContentBody(content=message.content)
    check_parts(parts_of(given), "messages")
    content = content_of(given, "messages[0]")
    return EmbeddingRequest((retriever_call(first, message.role, content, max_images),), as_base64)


class PoolingEndpoint(CallEndpoint[EmbeddingRequest]):
    """Inputs in; a vector for each of their tokens out."""

    smaller = "send fewer inputs at once"
    body = PoolingBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[EmbeddingRequest]:
        return Parse(parse_pooling, self.parse_options(request_id))

    async def answer(self, request: EmbeddingRequest, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.calls[0].model)
        made = PooledReply(self.dispatcher.quotas["replies"], len(request.calls))

        async def keep(index: int, done: Done) -> None:
            # Hundreds of thousands of numbers take tens of milliseconds.
            made.put(index, await asyncio.to_thread(pooling_data, index, done, as_base64=request.as_base64))
            made.count(done)

        await pool_all(partial(self.dispatcher.chat, context=current_call()), request.calls, keep)
        await reply.whole(made.body(list_head(f"pool-{reply.request_id}", model), "data"))


def pooling_data(index: int, done: Done, *, as_base64: bool) -> bytes:
    """One input's part of the reply, made in pieces: the interpreter holds its lock for none of them long."""
    rows = rows_of(done)
    head = f'{{"object":"pooling","index":{index},"data":'.encode()
    if as_base64:
        pieces = range(0, len(done.pooled), _PIECE)
        text = b"".join(pybase64.b64encode(done.pooled[start : start + _PIECE]) for start in pieces)
        return b"".join((head, b'"', text, b'"}'))
    return b"".join((head, b"[", b",".join([to_json(row.tolist()) for row in rows]), b"]}"))


#: What the front door serves of this edge, by path.
ENDPOINTS = {"/pooling": PoolingEndpoint}
