"""POST /v1/responses: OpenAI's Responses API without its memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing

from triptych.base.delta import Delta
from triptych.base.errors import RequestError
from triptych.base.types import FinishReason, PositionLogprobs, Usage
from triptych.proxy.call.answer import AnswerPiece, CallBegin, CallPiece, ChoiceReader, ReasoningPiece
from triptych.proxy.call.chat import Admitted, Done, Output
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import named_event, to_json
from triptych.proxy.openai.chat.endpoint import CallEndpoint, Json, ends, position_logprobs, timings_body
from triptych.proxy.openai.responses.request import ResponsesBody, ResponsesRequest, parse_responses
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.quotas.current_call import current_call

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseBook:
    """The response object while it grows. Every change is an event, numbered by `sequence_number`."""

    def __init__(self, request: ResponsesRequest, model: str) -> None:
        options, request_id = request.options, request.call.label
        self.begun = False
        self._output: list[Json] = []
        self.response = _response(request, model, self._output)
        self._answer = ChoiceReader(options.tools)
        self._timings = options.timings
        self._request_id = request_id
        #: The item that is open, the last one; empty where none is.
        self._item: Json = {}
        self._texts: list[str] = []
        self._waiting: list[PositionLogprobs] = []
        self._logprobs: list[Json] = []
        self._events = 0

    def take(self, outputs: Sequence[Output]) -> Iterator[Json]:
        """What a batch changes."""
        for output in outputs:
            if isinstance(output, Admitted):
                self._answer.begin(output)
                yield from self._begin()
            elif isinstance(output, Delta):
                self._waiting += output.logprobs
                yield from self._add_pieces(self._answer.read(output))
            else:
                yield from self._end(output)

    def fail(self, error: RequestError) -> list[Json]:
        """The end of a response that has begun and cannot go on."""
        code = _ERROR_CODES.get(error.status, "server_error")
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": error.message}
        return [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response=self.response),
        ]

    def _event(self, kind: str, **fields: object) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _begin(self) -> Iterator[Json]:
        if not self.begun:
            self.begun = True
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)

    def _add_pieces(self, pieces: Sequence[AnswerPiece]) -> Iterator[Json]:
        for piece in pieces:
            match piece:
                case ReasoningPiece(text=text):
                    yield from self._reason(text)
                case CallPiece(text=text):
                    self._texts.append(text)
                    yield self._event("response.function_call_arguments.delta", **self._place(), delta=text)
                case CallBegin(id=name):
                    yield from self._open("fc", "function_call", call_id=name, name=piece.name, arguments="")
                case str():
                    yield from self._text(piece)

    def _open(self, prefix: str, kind: str, **fields: object) -> Iterator[Json]:
        """A new item of the output, its last one."""
        yield from self._close("completed")
        number = len(self._output)
        self._item = {
            "id": f"{prefix}_{self._request_id}_{number}",
            "type": kind,
            **fields,
            "status": "in_progress",
        }
        yield self._event("response.output_item.added", output_index=number, item=self._item)
        self._output.append(self._item)

    def _place(self, **content: int) -> Json:
        """Where the last item, or its text, stands."""
        return {"item_id": self._item["id"], "output_index": len(self._output) - 1, **content}

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the item that is open, if one is, as its type has it."""
        if not self._item:
            return
        item, text = self._item, "".join(self._texts)
        item["status"] = status
        match item["type"]:
            case "function_call":
                item["arguments"] = text
                yield self._event(
                    "response.function_call_arguments.done",
                    **self._place(),
                    name=item["name"],
                    arguments=text,
                )
            case "reasoning":
                yield from self._end_part(text, "reasoning_text", {}, {})
            case _:
                self._logprobs += [position_logprobs(position) for position in self._waiting]
                more: Json = {"annotations": [], "logprobs": self._logprobs}
                fields: Json = {"logprobs": _short(self._logprobs)}
                yield from self._end_part(text, "output_text", more, fields)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        # The log-probabilities are those of the message's text.
        self._item, self._texts, self._waiting, self._logprobs = {}, [], [], []

    def _end_part(self, text: str, kind: str, more: Json, fields: Json) -> Iterator[Json]:
        part = {"type": kind, "text": text, **more}
        self._item["content"] = [part]
        place = self._place(content_index=0)
        yield self._event(f"response.{kind}.done", **place, text=text, **fields)
        yield self._event("response.content_part.done", **place, part=part)

    def _is_open(self, kind: str) -> bool:
        return self._item.get("type") == kind

    def _reason(self, text: str) -> Iterator[Json]:
        if not self._is_open("reasoning"):
            yield from self._open("rs", "reasoning", summary=[], content=[])
            part = {"type": "reasoning_text", "text": ""}
            yield self._event("response.content_part.added", **self._place(content_index=0), part=part)
        self._texts.append(text)
        yield self._event("response.reasoning_text.delta", **self._place(content_index=0), delta=text)

    def _text(self, text: str) -> Iterator[Json]:
        if not self._is_open("message"):
            yield from self._open_message()
        logprobs = [position_logprobs(position) for position in self._waiting]
        self._waiting.clear()
        self._logprobs += logprobs
        self._texts.append(text)
        place = self._place(content_index=0)
        yield self._event("response.output_text.delta", **place, delta=text, logprobs=_short(logprobs))

    def _open_message(self) -> Iterator[Json]:
        yield from self._open("msg", "message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": []}
        yield self._event("response.content_part.added", **self._place(content_index=0), part=part)

    def _end(self, done: Done) -> Iterator[Json]:
        yield from self._begin()
        rest, _ = self._answer.end(done)
        yield from self._add_pieces(rest)
        whole = done.reason is not FinishReason.LENGTH
        status = "completed" if whole else "incomplete"
        if not self._output:
            yield from self._open_message()
        yield from self._close(status)
        self.response["status"] = status
        if not whole:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = _usage(done.usage, self._answer.reasoning_tokens)
        if self._timings:
            self.response["triptych_timings"] = timings_body(done.timings)
        yield self._event(f"response.{status}", response=self.response)


def _short(logprobs: Sequence[Json]) -> list[Json]:
    return [{key: value for key, value in entry.items() if key != "bytes"} for entry in logprobs]


def _response(request: ResponsesRequest, model: str, output: list[Json]) -> Json:
    body = request.body
    return {
        "id": f"resp_{request.call.label}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "background": False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _usage(usage: Usage, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponsesEndpoint(CallEndpoint[ResponsesRequest]):
    """Translates to a chat call and back; nothing is kept between requests."""

    operation = "chat"
    body = ResponsesBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[ResponsesRequest]:
        return Parse(parse_responses, self.parse_options(request_id))

    async def answer(self, request: ResponsesRequest, reply: HttpReply) -> None:
        book = ResponseBook(request, self.dispatcher.resolve_model(request.call.model))
        try:
            await self._answer(request, book, reply)
        except RequestError as error:
            named = request.names.translated(error)
            if not (request.options.stream and book.begun):
                raise named from None
            await reply.error(named, event=b"".join(map(named_event, book.fail(named))))

    async def _answer(self, request: ResponsesRequest, book: ResponseBook, reply: HttpReply) -> None:
        async with aclosing(self.dispatcher.chat(request.call, current_call())) as batches:
            if not request.options.stream:
                async for outputs in batches:
                    for _ in book.take(outputs):
                        pass
                await reply.whole(to_json(book.response))
                return
            # Each event is rendered before the next one changes the response.
            await reply.stream(
                batches, lambda outputs: (b"".join(map(named_event, book.take(outputs))), ends(outputs))
            )


#: What the front door serves of this edge, by path.
ENDPOINTS = {"/v1/responses": ResponsesEndpoint}
