"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from triptych.errors import InvalidRequest
from triptych.protos import pd_pb2
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.validation import check_text, check_token_count
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.exchange import JsonEndpoint, Reply
from triptych.proxy.http.json_body import decode_body
from triptych.proxy.openai.chat.request import call_of
from triptych.proxy.openai.chat.types import ChatBody
from triptych.proxy.pd.queries import PDQueries, QueryTurns
from triptych.proxy.pd.wire import prompt_to_proto, template_to_proto
from triptych.proxy.splitter import pd_messages

_json = msgspec.json.Encoder().encode


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or messages as POST /v1/chat/completions takes them."""

    prompt: str | None = None
    messages: list[Any] | None = None
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """A question to a PD worker, and whose model it is about."""

    model: str
    message: pd_pb2.TokenizeRequest


class TokenizeEndpoint(JsonEndpoint[Query]):
    """The token ids of a prompt; an item is one placeholder token in it."""

    _decoder = msgspec.json.Decoder(TokenizeBody)

    def __init__(
        self,
        dispatcher: Dispatcher,
        queries: PDQueries,
        turns: QueryTurns,
        *,
        max_images: int,
        max_body: int,
    ) -> None:
        super().__init__(max_body=max_body)
        self._dispatcher = dispatcher
        self._queries = queries
        self._turns = turns
        self._max_images = max_images

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> Query:
        body = decode_body(self._decoder, raw)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt or messages must be there, and not both", param="prompt")
        if body.add_special_tokens is False and body.prompt is not None:
            raise InvalidRequest("add_special_tokens: false is not served", param="add_special_tokens")
        if body.return_token_strs:
            raise InvalidRequest(
                "return_token_strs is not served: send the ids to /detokenize", param="return_token_strs"
            )
        if body.prompt is not None:
            check_text(len(body.prompt), "prompt")
            return Query(body.model or "", pd_pb2.TokenizeRequest(prompt=prompt_to_proto(body.prompt)))
        call = self._call(body, request_id)
        return Query(
            call.model,
            pd_pb2.TokenizeRequest(
                messages=pd_messages(call.messages), template=template_to_proto(call.template)
            ),
        )

    def _call(self, body: TokenizeBody, request_id: str) -> ChatCall:
        chat = ChatBody(
            messages=body.messages or [],
            model=body.model,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        return call_of(chat, request_id, max_images=self._max_images, timeout=1.0)[0]

    async def answer(self, request: Query, reply: Reply) -> None:
        model = self._dispatcher.resolve_model(request.model)
        async with self._turns.turn():
            found = await self._queries.tokenize(model, request.message)
        count = len(found.token_ids)
        await reply.whole(
            _json({"count": count, "max_model_len": found.max_model_len, "tokens": found.token_ids})
        )


class DetokenizeEndpoint(JsonEndpoint[DetokenizeBody]):
    """The text of token ids, special tokens included."""

    _decoder = msgspec.json.Decoder(DetokenizeBody)

    def __init__(
        self, dispatcher: Dispatcher, queries: PDQueries, turns: QueryTurns, *, max_body: int
    ) -> None:
        super().__init__(max_body=max_body)
        self._dispatcher = dispatcher
        self._queries = queries
        self._turns = turns

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> DetokenizeBody:
        body = decode_body(self._decoder, raw)
        check_token_count(len(body.tokens), "tokens")
        if any(not 0 <= token < 1 << 32 for token in body.tokens):
            raise InvalidRequest("tokens must hold token ids: integers from 0", param="tokens")
        return body

    async def answer(self, request: DetokenizeBody, reply: Reply) -> None:
        model = self._dispatcher.resolve_model(request.model or "")
        async with self._turns.turn():
            text = await self._queries.detokenize(model, request.tokens)
        await reply.whole(_json({"prompt": text}))
