"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_TOKEN_IDS, TokenId
from triptych.protos import pd_pb2
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.prompt_length import characters_of
from triptych.proxy.call.validation import check_text, check_token_count
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import decode_body, to_json
from triptych.proxy.openai.chat.endpoint import CallEndpoint
from triptych.proxy.openai.chat.request import ChatBody, Messages, call_of
from triptych.proxy.openai.fields.sampling import (
    ChatTools,
    ContinueFinal,
    GenerationPrompt,
    ModelName,
    SpecialTokens,
    TemplateVariables,
)
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.pd.queries import Tokenized
from triptych.proxy.pd.wire import prompt_to_proto, template_to_proto
from triptych.proxy.splitter import pd_messages


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or messages as POST /v1/chat/completions takes them."""

    prompt: Annotated[str | None, Meta(description="A text.")] = None
    messages: Annotated[
        Messages | None,
        Meta(description="The conversation. Images are parts of a message's content."),
    ] = None
    model: ModelName = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    add_special_tokens: SpecialTokens = None
    chat_template_kwargs: TemplateVariables = None
    tools: ChatTools = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)],
        Meta(description="Token ids."),
    ]
    model: ModelName = None


@dataclass(frozen=True, slots=True)
class TokenizeQuery:
    """A question to a PD worker, whose model it is about, and how long a text it asks for."""

    model: str
    message: pd_pb2.TokenizeRequest
    characters: int
    param: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def parse_tokenize(raw: bytes, request_id: str, *, max_images: int) -> TokenizeQuery:
    """The question that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_tokenize_decoder, raw)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt or messages must be there, and not both", param="prompt")
    if body.add_special_tokens is False and body.prompt is not None:
        raise InvalidRequest("add_special_tokens: false is not served", param="add_special_tokens")
    if body.return_token_strs:
        raise InvalidRequest(
            "return_token_strs is not supported: send the ids to /detokenize", param="return_token_strs"
        )
    if body.prompt is not None:
        check_text(len(body.prompt), "prompt")
        message = pd_pb2.TokenizeRequest(prompt=prompt_to_proto(body.prompt))
        return TokenizeQuery(body.model or "", message, len(body.prompt), "prompt")
    chat = ChatBody(
        messages=body.messages or [],
        model=body.model,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    return query_of(call_of(chat, request_id, max_images=max_images, timeout=1.0)[0])


def query_of(call: ChatCall) -> TokenizeQuery:
    """The question for the tokens of a conversation."""
    messages = pd_messages(call.messages)
    check_text(len(messages), "messages")
    message = pd_pb2.TokenizeRequest(messages=messages, template=template_to_proto(call.template))
    return TokenizeQuery(call.model, message, characters_of(call.messages), "messages")


def parse_detokenize(raw: bytes) -> DetokenizeBody:
    """The token ids that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_detokenize_decoder, raw)
    check_token_count(len(body.tokens), "tokens")
    return body


class TokenizeEndpoint(CallEndpoint[TokenizeQuery]):
    """The token ids of a prompt; an item is one placeholder token in it."""

    places = "queries"
    body: type[msgspec.Struct] = TokenizeBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[TokenizeQuery]:
        return Parse(parse_tokenize, {"request_id": request_id, "max_images": self.limits.max_images})

    async def tokenized(self, query: TokenizeQuery) -> Tokenized:
        model = self.dispatcher.resolve_model(query.model)
        self.dispatcher.admission.check_length(model, query.characters, query.param)
        async with self.dispatcher.admission.query():
            return await self.queries.tokenize(model, query.message)

    async def answer(self, request: TokenizeQuery, reply: HttpReply) -> None:
        prompt = await self.tokenized(request)
        count = len(prompt.token_ids)
        await reply.whole(
            to_json({"count": count, "max_model_len": prompt.max_model_len, "tokens": prompt.token_ids})
        )


class DetokenizeEndpoint(CallEndpoint[DetokenizeBody]):
    """The text of token ids, special tokens included."""

    places = "queries"
    body = DetokenizeBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[DetokenizeBody]:
        return Parse(parse_detokenize)

    async def answer(self, request: DetokenizeBody, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.model or "")
        async with self.dispatcher.admission.query():
            text = await self.queries.detokenize(model, request.tokens)
        await reply.whole(to_json({"prompt": text}))
