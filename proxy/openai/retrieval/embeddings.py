"""POST /v1/embeddings: OpenAI's inputs, and vLLM's messages with pictures."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.proxy.call.chat import ChatCall, Done, PoolingOptions
from triptych.proxy.call.pooled import MAX_INPUTS, input_calls, pool_all, pooled_call, vector_of
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import decode_body, to_json
from triptych.proxy.openai.chat.endpoint import CallEndpoint
from triptych.proxy.openai.chat.request import ChatBody, Messages, call_of
from triptych.proxy.openai.completions.request import Prompts, raw_prompts
from triptych.proxy.openai.fields.sampling import (
    ContinueFinal,
    ModelName,
    Priority,
    ProcessorOptions,
    Salt,
    TemplateVariables,
    late,
)
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.quotas.current_call import current_call
from triptych.proxy.quotas.quota import Quota


class PooledBody(msgspec.Struct, kw_only=True):
    """Fields of every request without generation."""

    model: ModelName = None
    mm_processor_kwargs: ProcessorOptions = None
    cache_salt: Salt = None
    priority: Priority = None
    user: Annotated[str | None, Meta(description="Ignored.")] = None
    truncate_prompt_tokens: object = None
    prompt_embeds: object = None


def refuse_unserved(body: PooledBody) -> None:
    """InvalidRequest for what would change the result, and is not served."""
    if body.truncate_prompt_tokens not in (None, -1):
        raise InvalidRequest(
            "truncate_prompt_tokens is not supported: send less text", param="truncate_prompt_tokens"
        )
    if body.prompt_embeds is not None:
        raise InvalidRequest(
            "prompt_embeds: embeddings are computed here, never taken: send text, token ids or pictures",
            param="prompt_embeds",
        )


class EmbeddingBody(PooledBody, kw_only=True):
    """POST /v1/embeddings."""

    input: Annotated[object, late(Prompts), Meta(description="A text, token ids, or a list of them.")] = None
    messages: Annotated[
        Messages | None,
        Meta(description="In place of input: a conversation, with pictures as parts of its messages."),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        Meta(description="Elements of an embedding that are returned; its length is 1 after the cut."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: of little-endian float32.")
    ] = None
    pooling: Annotated[
        Literal["last", "mean", "cls"] | None, Meta(description="In place of the checkpoint's own way.")
    ] = None
    normalize: Annotated[
        bool | None,
        Meta(description="Whether an embedding's length becomes 1; else the checkpoint's own way."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Open the assistant's turn after messages; false by default.")
    ] = None
    continue_final_message: ContinueFinal = None
    chat_template_kwargs: TemplateVariables = None
    add_special_tokens: object = None


_decoder = msgspec.json.Decoder(EmbeddingBody)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One call for each input, in order."""

    calls: tuple[ChatCall, ...]
    as_base64: bool


def parse_embeddings(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> EmbeddingRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_decoder, raw)
    refuse_unserved(body)
    if body.add_special_tokens is False:
        raise InvalidRequest(
            "add_special_tokens: false is not supported: send input as token ids", param="add_special_tokens"
        )
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("input or messages must be there, and not both", param="input")
    pooling = PoolingOptions(
        method=body.pooling or "", normalize=body.normalize, dimensions=body.dimensions or 0
    )
    if body.messages is not None:
        chat = ChatBody(
            messages=body.messages,
            model=body.model,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            mm_processor_kwargs=body.mm_processor_kwargs,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        call, _ = call_of(chat, request_id, max_images=max_images, timeout=timeout)
        calls = [replace(call, pooling=pooling, whole=True)]
    else:
        prompts = raw_prompts(body.input, "input", MAX_INPUTS)
        first = first_call(body, request_id, timeout, pooling)
        several = isinstance(body.input, list) and len(prompts) > 1
        calls = input_calls(first, prompts, "input", several=several)
    return EmbeddingRequest(tuple(calls), body.encoding_format == "base64")


def first_call(body: PooledBody, request_id: str, timeout: float, pooling: PoolingOptions) -> ChatCall:
    """A call with the fields that all have, and no prompt yet."""
    options, salt, priority = body.mm_processor_kwargs or {}, body.cache_salt or "", body.priority or 0
    return pooled_call(request_id, body.model or "", timeout, pooling, salt, options, priority)


def list_head(reply_id: str, model: str) -> dict[str, object]:
    """The fields before a list, as vLLM's replies have them."""
    return {"id": reply_id, "object": "list", "created": int(time.time()), "model": model}


class EmbeddingsEndpoint(CallEndpoint[EmbeddingRequest]):
    """Inputs in; one vector for each out."""

    smaller = "send fewer inputs at once"
    operation = "embeddings"
    body = EmbeddingBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[EmbeddingRequest]:
        return Parse(parse_embeddings, self.parse_options(request_id))

    async def answer(self, request: EmbeddingRequest, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.calls[0].model)
        made = PooledReply(self.dispatcher.quotas["replies"], len(request.calls))

        def keep(index: int, done: Done) -> None:
            vector = vector_of(done)
            given = base64.b64encode(done.pooled).decode() if request.as_base64 else vector.tolist()
            made.put(index, to_json({"object": "embedding", "index": index, "embedding": given}))
            made.count(done)

        await pool_all(partial(self.dispatcher.chat, context=current_call()), request.calls, keep)
        await reply.whole(made.body(list_head(f"embd-{reply.request_id}", model), "data"))


class PooledReply:
    """A reply of one part for each call, which count as the reply's memory as they come."""

    def __init__(self, quota: Quota, count: int = 0) -> None:
        call = current_call()
        self._hold = quota.hold(call.holder, 0)
        if call.delivery is not None:
            call.delivery.keep(self._hold)
        self._parts: list[bytes] = [b""] * count
        self._prompt_tokens = self._cached_tokens = 0

    def put(self, index: int, part: bytes) -> None:
        """QuotaExceeded where there is no memory for the part."""
        self._hold.add(len(part))
        self._parts[index] = part

    def append(self, part: bytes) -> None:
        """As `put`, after all parts."""
        self._hold.add(len(part))
        self._parts.append(part)

    def count(self, done: Done) -> None:
        """A call's prompt is part of the usage."""
        self._prompt_tokens += done.usage.prompt_tokens
        self._cached_tokens += done.usage.cached_tokens

    def body(self, head: Mapping[str, object], name: str) -> bytes:
        """The JSON reply, its parts under `name`."""
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
        before, after = to_json({**head, name: [], "usage": usage}).split(f'"{name}":[]'.encode())
        return b"".join((before, f'"{name}":['.encode(), b",".join(self._parts), b"]", after))


#: What the front door serves of this edge, by path.
ENDPOINTS = {"/v1/embeddings": EmbeddingsEndpoint}
