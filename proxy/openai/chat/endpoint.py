"""POST /v1/chat/completions. Chunks that carry text alone come from a template that is rendered once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from triptych.base.config import MIB
from triptych.base.delta import Delta
from triptych.base.types import PositionLogprobs, TokenLogprob, Usage
from triptych.proxy.call.answer import (
    AnswerPiece,
    CallBegin,
    CallPiece,
    ChoiceReader,
    ReasoningPiece,
    whole_calls,
)
from triptych.proxy.call.chat import Admitted, ChatCall, Done, Output, Timings
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.endpoint import HttpReply, PostEndpoint
from triptych.proxy.http.json_body import DONE, event, to_json
from triptych.proxy.openai.chat.request import ChatBody, ChatReplyOptions, parse_body
from triptych.proxy.parsing.parse import Option, Parse
from triptych.proxy.pd.queries import PDQueries
from triptych.proxy.quotas.current_call import current_call

Json = dict[str, object]
_STAGES = ("queue", "fetch", "encode", "save", "load", "prefill", "decode")
#: OpenAI's word for the log-probability of a token that cannot be.
_IMPOSSIBLE = -9999.0


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}} if reasoning_tokens else {}),
    }


def timings_body(timings: Timings) -> Json:
    items = [{"mm_hash": item.mm_hash, "cache": item.cache} for item in timings.items]
    return {stage: round(getattr(timings, stage), 6) for stage in _STAGES} | {"items": items}


def finite_logprob(logprob: float) -> float:
    """The log-probability as JSON can have it: minus infinity becomes OpenAI's word for it."""
    return max(logprob, _IMPOSSIBLE)


def position_logprobs(position: PositionLogprobs) -> Json:
    """One output position in the shape of the chat and Responses APIs."""
    return {**_token(position.chosen), "top_logprobs": [_token(token) for token in position.top]}


def _token(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.utf8)}


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """The limits of one request: images, choices, bytes of its body, and seconds."""

    max_images: int = 16
    max_choices: int = 16
    max_body: int = 64 * MIB
    timeout: float = 300.0
    reject_unknown: bool = False


class CallEndpoint(PostEndpoint[P]):
    """An endpoint whose requests become calls, or questions to PD workers."""

    #: What it does, as OpenTelemetry's conventions for generative models name it; empty: it is not traced.
    operation: ClassVar[str] = ""
    #: The quota that has its requests' places.
    places: ClassVar[str] = "requests"

    def __init__(self, dispatcher: Dispatcher, queries: PDQueries, limits: ApiLimits) -> None:
        super().__init__(dispatcher.parsers, max_body=limits.max_body)
        self.dispatcher = dispatcher
        self.queries = queries
        self.limits = limits
        self.reject_unknown = limits.reject_unknown

    def check_place(self) -> None:
        self.dispatcher.quotas[self.places].hold(current_call().holder, 1).close()

    def parse_options(self, request_id: str) -> dict[str, Option]:
        """What most functions that parse a body want to know."""
        limits = self.limits
        return {"request_id": request_id, "max_images": limits.max_images, "timeout": limits.timeout}


def ends(outputs: Sequence[Output]) -> bool:
    """Whether a call's outputs end with these."""
    return isinstance(outputs[-1], Done) and outputs[-1].final


class ChatEndpoint(CallEndpoint[tuple[ChatCall, ChatReplyOptions]]):
    """A conversation in; the assistant's next message out."""

    operation = "chat"
    body = ChatBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[tuple[ChatCall, ChatReplyOptions]]:
        return Parse(parse_body, {**self.parse_options(request_id), "max_choices": self.limits.max_choices})

    async def answer(self, request: tuple[ChatCall, ChatReplyOptions], reply: HttpReply) -> None:
        call, options = request
        model = self.dispatcher.resolve_model(call.model)
        async with aclosing(self.dispatcher.chat(call, current_call())) as batches:
            if not options.stream:
                await reply.whole(await whole_reply(call.label, model, options, batches))
                return
            stream = ChatStream(call.label, model, options)
            await reply.stream(batches, lambda outputs: (stream.render(outputs), ends(outputs)))


def logprobs_body(positions: Sequence[PositionLogprobs]) -> Json:
    return {"content": [position_logprobs(position) for position in positions], "refusal": None}


def _head(request_id: str, kind: str, model: str) -> Json:
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": model}


def _reasoning_body(text: str) -> Json:
    """Clients know the one name or the other: DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call_body(call: CallBegin, arguments: str) -> Json:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class TextChunks:
    """The chunks of one choice that carry text and nothing else: nearly all that is ever sent.

    Everything but the text is the same in each of them and rendered once.
    """

    def __init__(self, head: Json, usage: Json) -> None:
        choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}
        before, after = event({**head, "choices": [choice], **usage}).split(b'"content":""')
        self._before, self._after = before + b'"content":', after
        self._between = self._after + self._before

    def render(self, texts: Sequence[str]) -> bytes:
        """One chunk for every text; at least one."""
        return self._before + self._between.join(map(to_json, texts)) + self._after


class ChoiceState:
    """One choice on its way: what of it has been read, and what still waits to be sent."""

    def __init__(self, options: ChatReplyOptions) -> None:
        self.reader = ChoiceReader(options.tools, reasoning=options.reasoning)
        self.begun = False
        self.pieces: list[AnswerPiece] = []
        self.reason = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []


class ChatStream:
    """The chunks of one streamed reply. Tokens whose text is held back go with the next chunk."""

    def __init__(self, request_id: str, model: str, options: ChatReplyOptions) -> None:
        self._options = options
        self._choices = [ChoiceState(options) for _ in range(options.n)]
        self._prompt: Sequence[int] | None = ()
        self._head = _head(request_id, "chat.completion.chunk", model)
        self._usage: Json = {"usage": None} if options.include_usage else {}
        self._texts: TextChunks | None = None
        if options.plain and not options.return_token_ids:
            self._texts = TextChunks(self._head, self._usage)

    def render(self, outputs: Sequence[Output]) -> bytes:
        """The events of a batch; empty when it has nothing to show yet."""
        first = self._choices[0]
        if self._texts is not None and first.begun and first.reader.plain and isinstance(outputs[-1], Delta):
            texts = [output.text for output in outputs if isinstance(output, Delta) and output.text]
            return self._texts.render(texts) if texts else b""
        return b"".join([self._one(output) for output in outputs])

    def _one(self, output: Output) -> bytes:
        if isinstance(output, Admitted):
            self._prompt = output.prompt_token_ids
            for choice in self._choices:
                choice.reader.begin(output)
            return b""
        index = output.choice
        first = b"" if self._choices[index].begun else self._first(index)
        if isinstance(output, Done):
            return first + self._last(index, output)
        state = self._choices[index]
        state.token_ids += output.token_ids
        state.logprobs += output.logprobs
        pieces = state.reader.read(output)
        if not pieces and self._has_waiting(index):
            pieces = [""]
        return first + b"".join([self._piece(index, piece) for piece in pieces])

    def _has_waiting(self, index: int) -> bool:
        """Whether tokens were asked for that no text carries: they are reported as they come."""
        choice = self._choices[index]
        return bool(choice.logprobs) or (self._options.return_token_ids and bool(choice.token_ids))

    def _first(self, index: int) -> bytes:
        self._choices[index].begun = True
        extra: Json = {}
        if self._options.return_token_ids and self._prompt is not None:
            extra["prompt_token_ids"], self._prompt = [*self._prompt], None
        return self._chunk(index, {"role": "assistant", "content": ""}, extra=extra)

    def _piece(self, index: int, piece: AnswerPiece) -> bytes:
        if isinstance(piece, str):
            return self._chunk(index, {"content": piece})
        if isinstance(piece, ReasoningPiece):
            return self._chunk(index, _reasoning_body(piece.text))
        if isinstance(piece, CallPiece):
            return self._chunk(
                index, {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
            )
        return self._chunk(index, {"tool_calls": [{"index": piece.index, **_call_body(piece, "")}]})

    def _last(self, index: int, done: Done) -> bytes:
        pieces, reason = self._choices[index].reader.end(done)
        parts = [self._piece(index, piece) for piece in pieces]
        extra: Json = {}
        if done.final and self._options.timings:
            extra["triptych_timings"] = timings_body(done.timings)
        parts.append(self._chunk(index, {}, reason, extra))
        if done.final and self._options.include_usage:
            parts.append(self._event([], {"usage": self._usage_of(done)}))
        if done.final:
            parts.append(DONE)
        return b"".join(parts)

    def _usage_of(self, done: Done) -> Json:
        return usage_body(done.usage, sum(choice.reader.reasoning_tokens for choice in self._choices))

    def _chunk(self, index: int, delta: Json, reason: str | None = None, extra: Json | None = None) -> bytes:
        """A chunk of one choice, with the tokens that have come since the last one."""
        state = self._choices[index]
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if state.logprobs:
            choice["logprobs"] = logprobs_body(state.logprobs)
            state.logprobs = []
        if self._options.return_token_ids:
            choice["token_ids"] = state.token_ids
        state.token_ids = []
        return self._event([choice], extra or {})

    def _event(self, choices: list[Json], extra: Json) -> bytes:
        return event({**self._head, "choices": choices, **self._usage, **extra})


async def whole_reply(
    request_id: str, model: str, options: ChatReplyOptions, batches: AsyncIterable[Sequence[Output]]
) -> bytes:
    """The JSON of a reply that is sent in one piece: everything up to the last choice's end."""
    choices = [ChoiceState(options) for _ in range(options.n)]
    prompt: Sequence[int] = ()
    last: Done | None = None
    async for outputs in batches:
        for output in outputs:
            if isinstance(output, Delta):
                state = choices[output.choice]
                state.token_ids += output.token_ids
                state.logprobs += output.logprobs
                state.pieces += state.reader.read(output)
            elif isinstance(output, Admitted):
                prompt = output.prompt_token_ids
                for choice in choices:
                    choice.reader.begin(output)
            else:
                state = choices[output.choice]
                rest, state.reason = state.reader.end(output)
                state.pieces += rest
                last = output
    assert last is not None and last.final
    reply = _head(request_id, "chat.completion", model)
    reply["choices"] = [_whole_choice(index, state, options) for index, state in enumerate(choices)]
    reply["usage"] = usage_body(last.usage, sum(choice.reader.reasoning_tokens for choice in choices))
    if options.return_token_ids:
        reply["prompt_token_ids"] = [*prompt]
    if options.timings:
        reply["triptych_timings"] = timings_body(last.timings)
    return to_json(reply)


def _whole_choice(index: int, state: ChoiceState, options: ChatReplyOptions) -> Json:
    texts = [piece for piece in state.pieces if isinstance(piece, str)]
    text, others = "".join(texts), state.pieces if len(texts) < len(state.pieces) else ()
    calls = [_call_body(call, arguments) for call, arguments in whole_calls(others)]
    reasoning = "".join([piece.text for piece in others if isinstance(piece, ReasoningPiece)])
    content = None if (calls or reasoning) and not text else text
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= _reasoning_body(reasoning)
    if calls:
        message["tool_calls"] = calls
    choice: Json = {
        "index": index,
        "message": message,
        "logprobs": logprobs_body(state.logprobs) if options.logprobs else None,
        "finish_reason": state.reason,
    }
    if options.return_token_ids:
        choice["token_ids"] = state.token_ids
    return choice
