"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing

import msgspec

from triptych.base.delta import Delta
from triptych.base.errors import RequestError
from triptych.base.types import FinishReason, Usage
from triptych.proxy.call.answer import AnswerPiece, CallBegin, CallPiece, ChoiceReader, ReasoningPiece
from triptych.proxy.call.chat import Admitted, Done, Output
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import MESSAGES_PATH, named_event, to_json
from triptych.proxy.openai.chat.endpoint import CallEndpoint, Json, ends
from triptych.proxy.openai.messages.request import (
    CountTokensBody,
    MessagesBody,
    MessagesRequest,
    parse_count_tokens,
    parse_messages,
)
from triptych.proxy.openai.tokenize import TokenizeEndpoint, TokenizeQuery, query_of
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.quotas.current_call import current_call

#: Of each kind of block: its text's field, and how deltas of it are called.
_TEXTS = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


class MessageBook:
    """The message while it grows. Every change is an event."""

    def __init__(self, request: MessagesRequest, model: str) -> None:
        self._answer = ChoiceReader(request.options.tools)
        self._content: list[Json] = []
        #: The texts of the last block.
        self._texts: list[str] | None = None
        self.message: Json = {
            "id": f"msg_{request.call.label}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def take(self, outputs: Sequence[Output]) -> Iterator[Json]:
        """What a batch changes."""
        for output in outputs:
            if isinstance(output, Admitted):
                self._answer.begin(output)
                self.message["usage"] = _usage(Usage(len(output.prompt_token_ids), 0, 0), 0)
                yield {"type": "message_start", "message": self.message}
                yield {"type": "ping"}
            elif isinstance(output, Delta):
                yield from self._add_pieces(self._answer.read(output))
            else:
                yield from self._end(output)

    def events(self, outputs: Sequence[Output]) -> tuple[bytes, bool]:
        """The events of a batch, each rendered before the next one changes the message; whether it ends."""
        return b"".join(map(named_event, self.take(outputs))), ends(outputs)

    def _add_pieces(self, pieces: Sequence[AnswerPiece]) -> Iterator[Json]:
        for piece in pieces:
            match piece:
                case ReasoningPiece(text=text):
                    yield from self._text(text, {"type": "thinking", "thinking": "", "signature": ""})
                case CallBegin(id=name):
                    call: Json = {"type": "tool_use", "id": name, "name": piece.name, "input": {}}
                    yield from self._open(call)
                case CallPiece(text=text):
                    yield self._delta(text)
                case str():
                    yield from self._text(piece, {"type": "text", "text": ""})

    def _text(self, text: str, block: Json) -> Iterator[Json]:
        """More text of the last block, or of a new one where that is of another type."""
        if self._texts is None or self._content[-1]["type"] != block["type"]:
            yield from self._open(block)
        yield self._delta(text)

    def _open(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._content.append(block)
        self._texts = []
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _delta(self, text: str) -> Json:
        assert self._texts is not None
        self._texts.append(text)
        field, kind = _TEXTS[str(self._content[-1]["type"])]
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._texts is None:
            return
        block, text, self._texts = self._content[-1], "".join(self._texts), None
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[str(block["type"])] = text
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _end(self, done: Done) -> Iterator[Json]:
        rest, reason = self._answer.end(done)
        yield from self._add_pieces(rest)
        yield from self._close()
        ending = {"stop_reason": _stop_reason(done, reason), "stop_sequence": done.stop_sequence or None}
        usage = _usage(done.usage, self._answer.reasoning_tokens)
        self.message |= {**ending, "usage": usage}
        yield {"type": "message_delta", "delta": ending, "usage": usage}
        yield {"type": "message_stop"}


def _stop_reason(done: Done, reason: str) -> str:
    if done.reason is FinishReason.LENGTH:
        return "max_tokens"
    if reason == "tool_calls":
        return "tool_use"
    return "stop_sequence" if done.stop_sequence else "end_turn"


def _input(arguments: str) -> object:
    """A call's input; as Anthropic gives it where it is no JSON object."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return {"INVALID_JSON": arguments}


def _usage(usage: Usage, reasoning_tokens: int) -> Json:
    """Input tokens are counted without those of the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }


class MessagesEndpoint(CallEndpoint[MessagesRequest]):
    """Translates to a chat call and back; nothing is kept between requests."""

    operation = "chat"
    body = MessagesBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[MessagesRequest]:
        return Parse(parse_messages, self.parse_options(request_id))

    async def answer(self, request: MessagesRequest, reply: HttpReply) -> None:
        book = MessageBook(request, self.dispatcher.resolve_model(request.call.model))
        try:
            async with aclosing(self.dispatcher.chat(request.call, current_call())) as batches:
                if request.options.stream:
                    await reply.stream(batches, book.events)
                    return
                async for outputs in batches:
                    book.events(outputs)
        except RequestError as error:
            raise request.names.translated(error) from None
        await reply.whole(to_json(book.message))


def parse_count_query(raw: bytes, request_id: str, *, max_images: int) -> TokenizeQuery:
    """The question for the tokens of the conversation that `raw` (JSON) holds."""
    return query_of(parse_count_tokens(raw, request_id, max_images=max_images).call)


class CountTokensEndpoint(TokenizeEndpoint):
    """The tokens of a conversation; an image counts as one."""

    body = CountTokensBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[TokenizeQuery]:
        return Parse(parse_count_query, {"request_id": request_id, "max_images": self.limits.max_images})

    async def answer(self, request: TokenizeQuery, reply: HttpReply) -> None:
        tokens = (await self.tokenized(request)).token_ids
        await reply.whole(to_json({"input_tokens": len(tokens)}))


#: What the front door serves of this edge, by path.
ENDPOINTS = {MESSAGES_PATH: MessagesEndpoint, f"{MESSAGES_PATH}/count_tokens": CountTokensEndpoint}
