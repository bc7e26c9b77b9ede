"""Embed and Rerank of gRPC turned into calls without generation, and into their replies."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from triptych.base.errors import InvalidRequest
from triptych.protos import proxy_pb2
from triptych.proxy.call.chat import ChatCall, Done, PoolingOptions, RawPrompt
from triptych.proxy.call.pairs import (
    RETRIEVER_ROLES,
    Content,
    Pair,
    PairScoring,
    check_pairs,
    retriever_call,
)
from triptych.proxy.call.pooled import MAX_INPUTS, input_calls, pool_all, pooled_call, vector_of
from triptych.proxy.call.validation import check_parts, check_text, check_token_count, in_range
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.grpc.message_fields import message_of
from triptych.proxy.grpc.request import call_of, content_of, processor_options
from triptych.proxy.quotas.current_call import current_call


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Pairs to score, and the number of best ones to report; 0 for all."""

    pairs: PairScoring
    top_n: int


def parse_embed(raw: bytes, *, max_images: int, timeout: float) -> list[ChatCall]:
    """The calls that an EmbedRequest holds. InvalidRequest names what is wrong with it."""
    return embed_calls(message_of(raw, proxy_pb2.EmbedRequest), max_images=max_images, timeout=timeout)


def parse_rank(raw: bytes, *, max_images: int, timeout: float) -> RankRequest:
    """The request that a RerankRequest holds. InvalidRequest names what is wrong with it."""
    request = message_of(raw, proxy_pb2.RerankRequest)
    return RankRequest(rerank_pairs(request, max_images=max_images, timeout=timeout), request.top_n)


def embed_calls(request: proxy_pb2.EmbedRequest, *, max_images: int, timeout: float) -> list[ChatCall]:
    """One call for each input; InvalidRequest names the field at fault."""
    if bool(request.inputs) == bool(request.messages):
        raise InvalidRequest("inputs or messages must be there, and not both", param="inputs")
    pooling = PoolingOptions(
        tokens=request.tokens,
        method=request.pooling,
        normalize=request.normalize if request.HasField("normalize") else None,
        dimensions=request.dimensions,
    )
    if request.tokens and (name := next((each for each in _OF_ONE_VECTOR if getattr(request, each)), "")):
        raise InvalidRequest(f"{name} is not for tokens: leave it out", param=name)
    if request.messages and request.tokens:
        return [_retriever_call(request, _first(request, timeout, pooling), max_images)]
    if request.messages:
        chat = proxy_pb2.ChatRequest(
            model=request.model,
            messages=request.messages,
            cache_salt=request.cache_salt,
            mm_processor_kwargs=request.mm_processor_kwargs,
            chat_template_kwargs=request.chat_template_kwargs,
            no_generation_prompt=not request.generation_prompt,
            timeout=request.timeout,
            priority=request.priority,
        )
        call, _ = call_of(chat, max_images=max_images, timeout=timeout, max_choices=1)
        return [replace(call, pooling=pooling, whole=True)]
    first = _first(request, timeout, pooling)
    _check_count(request.inputs, "inputs")
    prompts = [_prompt(given, f"inputs[{at}]") for at, given in enumerate(request.inputs)]
    return input_calls(first, prompts, "inputs", several=True)


async def embeddings(
    dispatcher: Dispatcher, calls: Sequence[ChatCall]
) -> AsyncGenerator[proxy_pb2.Embedding]:
    """The embeddings of the calls, in order, once all are there: they count as memory of replies."""
    ends: dict[int, Done] = {}
    with dispatcher.quotas["replies"].hold(current_call().holder, 0) as hold:

        def keep(index: int, done: Done) -> None:
            hold.add(len(done.pooled))
            ends[index] = done

        await pool_all(partial(dispatcher.chat, context=current_call()), calls, keep)
        for index in range(len(calls)):
            usage = ends[index].usage
            yield proxy_pb2.Embedding(
                index=index,
                values=vector_of(ends[index]),
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
            )


def rerank_pairs(request: proxy_pb2.RerankRequest, *, max_images: int, timeout: float) -> PairScoring:
    """The pairs to score; InvalidRequest names the field at fault."""
    _check_count(request.documents, "documents")
    check_parts(len(request.query.parts) + sum(len(each.parts) for each in request.documents), "documents")
    query = _content(request.query, "query")
    pairs = [
        Pair(query, "query", _content(document, f"documents[{at}]"), f"documents[{at}]")
        for at, document in enumerate(request.documents)
    ]
    check_pairs(pairs, request.instruction, max_images)
    return PairScoring(_first(request, timeout, PoolingOptions()), tuple(pairs), request.instruction)


#: Fields of a prompt's one vector.
_OF_ONE_VECTOR = ("pooling", "generation_prompt", "chat_template_kwargs")


def _retriever_call(request: proxy_pb2.EmbedRequest, first: ChatCall, max_images: int) -> ChatCall:
    if len(request.messages) > 1:
        raise InvalidRequest("messages takes one query or document with tokens", param="messages")
    [message] = request.messages
    if (role := RETRIEVER_ROLES.get(message.role)) is None:
        roles = ", ".join(RETRIEVER_ROLES)
        raise InvalidRequest(f"messages[0].role must be one of {roles}", param="messages[0].role")
    check_parts(len(message.parts), "messages")
    content = content_of(message.parts, "messages[0]")
    if not content:
        raise InvalidRequest("messages[0].parts must not be empty", param="messages[0].parts")
    return retriever_call(first, role, content, max_images)


def _first(
    request: proxy_pb2.EmbedRequest | proxy_pb2.RerankRequest, timeout: float, pooling: PoolingOptions
) -> ChatCall:
    in_range("timeout", request.timeout, 0, 86400)
    options = processor_options(request.mm_processor_kwargs)
    seconds = min(request.timeout or timeout, timeout)
    label, salt = uuid.uuid4().hex, request.cache_salt
    return pooled_call(label, request.model, seconds, pooling, salt, options, request.priority)


def _check_count(given: Sequence[object], param: str) -> None:
    if not 0 < len(given) <= MAX_INPUTS:
        raise InvalidRequest(f"{param} takes 1 to {MAX_INPUTS}: send several requests", param=param)


def _prompt(given: proxy_pb2.EmbedInput, param: str) -> RawPrompt:
    prompt: RawPrompt = given.text or tuple(given.token_ids.ids)
    if not prompt:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if isinstance(prompt, str):
        check_text(len(prompt), param)
    else:
        check_token_count(len(prompt), param)
    return prompt


def _content(given: proxy_pb2.RankedContent, param: str) -> Content:
    content = content_of(given.parts, param)
    if not content:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return content
