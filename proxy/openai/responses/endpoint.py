"""POST /v1/responses: OpenAI's Responses API without its memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing

from triptych.base.errors import RequestError
from triptych.base.types import FinishReason, PositionLogprobs, Usage
from triptych.proxy.call.answer import AnswerPiece, CallBegin, CallPiece, ChoiceReader, ReasoningPiece
from triptych.proxy.call.chat import Delta, Done, Output, Started
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.endpoint import HttpReply, PostEndpoint, WritePacer
from triptych.proxy.http.json_body import named_event, to_json
from triptych.proxy.openai.chat.endpoint import Json, position_logprobs, timings_body
from triptych.proxy.openai.responses.request import ResponsesBody, ResponsesRequest, parse_responses

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
        self._message: Json | None = None
        self._reasoning: Json | None = None
        self._call: Json | None = None
        self._texts: list[str] = []
        self._waiting: list[PositionLogprobs] = []
        self._logprobs: list[Json] = []
        self._events = 0

    def take(self, outputs: Sequence[Output]) -> Iterator[Json]:
        """What a batch changes."""
        for output in outputs:
            if isinstance(output, Started):
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
            if isinstance(piece, ReasoningPiece):
                yield from self._reason(piece.text)
                continue
            yield from self._close_reasoning("completed")
            if isinstance(piece, CallPiece):
                assert self._call is not None
                self._texts.append(piece.text)
                yield self._event(
                    "response.function_call_arguments.delta", **self._call_place(), delta=piece.text
                )
                continue
            yield from self._close_call("completed")
            if isinstance(piece, str):
                yield from self._text(piece)
            else:
                yield from self._open_call(piece)

    def _reason(self, text: str) -> Iterator[Json]:
        if self._reasoning is None:
            number = len(self._output)
            self._reasoning = {
                "id": f"rs_{self._request_id}_{number}",
                "type": "reasoning",
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
            yield self._event("response.output_item.added", output_index=number, item=self._reasoning)
            self._output.append(self._reasoning)
            part = {"type": "reasoning_text", "text": ""}
            yield self._event("response.content_part.added", **self._place(self._reasoning), part=part)
        self._texts.append(text)
        yield self._event("response.reasoning_text.delta", **self._place(self._reasoning), delta=text)

    def _close_reasoning(self, status: str) -> Iterator[Json]:
        if self._reasoning is None:
            return
        item, place, text = self._reasoning, self._place(self._reasoning), "".join(self._texts)
        part = {"type": "reasoning_text", "text": text}
        item["content"], item["status"] = [part], status
        yield self._event("response.reasoning_text.done", **place, text=text)
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)
        # The log-probabilities are those of the message's text.
        self._reasoning, self._texts, self._waiting = None, [], []

    def _text(self, text: str) -> Iterator[Json]:
        if self._message is None:
            yield from self._open_message()
        assert self._message is not None
        logprobs = [position_logprobs(position) for position in self._waiting]
        self._waiting.clear()
        self._logprobs += logprobs
        self._texts.append(text)
        short = [{key: value for key, value in entry.items() if key != "bytes"} for entry in logprobs]
        yield self._event(
            "response.output_text.delta", **self._place(self._message), delta=text, logprobs=short
        )

    def _open_message(self) -> Iterator[Json]:
        number = len(self._output)
        self._message = {
            "id": f"msg_{self._request_id}_{number}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        yield self._event("response.output_item.added", output_index=number, item=self._message)
        self._output.append(self._message)
        part = {"type": "output_text", "text": "", "annotations": []}
        yield self._event("response.content_part.added", **self._place(self._message), part=part)

    def _place(self, item: Json) -> Json:
        """Where the text of `item`, the last one, stands."""
        return {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _close_message(self, status: str) -> Iterator[Json]:
        if self._message is None:
            return
        place, text = self._place(self._message), "".join(self._texts)
        self._logprobs += [position_logprobs(position) for position in self._waiting]
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        short = [{key: value for key, value in entry.items() if key != "bytes"} for entry in self._logprobs]
        self._message["content"], self._message["status"] = [part], status
        yield self._event("response.output_text.done", **place, text=text, logprobs=short)
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=self._message)
        self._message, self._texts, self._waiting, self._logprobs = None, [], [], []

    def _open_call(self, call: CallBegin) -> Iterator[Json]:
        yield from self._close_message("completed")
        number = len(self._output)
        self._call = {
            "id": f"fc_{self._request_id}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        yield self._event("response.output_item.added", output_index=number, item=self._call)
        self._output.append(self._call)

    def _call_place(self) -> Json:
        assert self._call is not None
        return {"item_id": self._call["id"], "output_index": len(self._output) - 1}

    def _close_call(self, status: str) -> Iterator[Json]:
        if self._call is None:
            return
        item, place, text = self._call, self._call_place(), "".join(self._texts)
        item |= {"arguments": text, "status": status}
        yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)
        # The log-probabilities are those of the message's text.
        self._call, self._texts, self._waiting = None, [], []

    def _end(self, done: Done) -> Iterator[Json]:
        yield from self._begin()
        rest, _ = self._answer.end(done)
        yield from self._add_pieces(rest)
        whole = done.reason is not FinishReason.LENGTH
        status = "completed" if whole else "incomplete"
        yield from self._close_reasoning(status)
        yield from self._close_call(status)
        if not self._output:
            yield from self._open_message()
        yield from self._close_message(status)
        self.response["status"] = status
        if not whole:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = _usage(done.usage, self._answer.reasoning_tokens)
        if self._timings:
            self.response["triptych_timings"] = timings_body(done.timings)
        yield self._event(f"response.{status}", response=self.response)


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


class ResponsesEndpoint(PostEndpoint[ResponsesRequest]):
    """Translates to a chat call and back; nothing is kept between requests."""

    body = ResponsesBody

    def __init__(self, dispatcher: Dispatcher, *, max_images: int, max_body: int, timeout: float) -> None:
        super().__init__(dispatcher.quotas["parser"], max_body=max_body)
        self._dispatcher = dispatcher
        self._max_images = max_images
        self._timeout = timeout

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> ResponsesRequest:
        return parse_responses(raw, request_id, max_images=self._max_images, timeout=self._timeout)

    async def answer(self, request: ResponsesRequest, reply: HttpReply) -> None:
        book = ResponseBook(request, self._dispatcher.resolve_model(request.call.model))
        try:
            await self._answer(request, book, reply)
        except RequestError as error:
            named = request.names.translated(error)
            if not (request.options.stream and book.begun):
                raise named from None
            await reply.part(b"".join(map(named_event, book.fail(named))), last=True)

    async def _answer(self, request: ResponsesRequest, book: ResponseBook, reply: HttpReply) -> None:
        async with aclosing(self._dispatcher.chat(request.call)) as batches:
            if not request.options.stream:
                async for outputs in batches:
                    for _ in book.take(outputs):
                        pass
                await reply.whole(to_json(book.response))
                return
            pace = WritePacer()
            async for outputs in batches:
                # Each event is rendered before the next one changes the response.
                if part := b"".join(map(named_event, book.take(outputs))):
                    last = isinstance(outputs[-1], Done)
                    await reply.part(part, last=last)
                    if not last and (pause := pace.pause()):
                        await asyncio.sleep(pause)
