"""Replies in OpenAI's shapes. A stream's chunks come from a template that is rendered once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from triptych.proxy.call.chat import Delta, Done, Output, Started, Timings
from triptych.proxy.http.sse import DONE, to_json
from triptych.proxy.openai.chat.request import ChatOptions
from triptych.types import Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_body(timings: Timings) -> dict[str, Any]:
    stages = ("queue", "fetch", "encode", "save", "load", "prefill", "decode")
    body: dict[str, Any] = {stage: round(getattr(timings, stage), 6) for stage in stages}
    body["items"] = [{"mm_hash": item.mm_hash, "cache": item.cache} for item in timings.items]
    return body


class TextChunks:
    """The chunks of one choice that carry text and nothing else: nearly all that is ever sent.

    Everything but the text is the same in each of them and rendered once.
    """

    def __init__(self, head: bytes, index: int, tail: bytes) -> None:
        self._before = head + b',"choices":[{"index":%d,"delta":{"content":' % index
        self._after = tail
        self._between = tail + self._before

    def render(self, texts: Sequence[str]) -> bytes:
        """One chunk for every text; at least one."""
        return self._before + self._between.join(map(to_json, texts)) + self._after


class SseStream:
    """The chunks of one streamed reply."""

    def __init__(self, request_id: str, model: str, options: ChatOptions) -> None:
        self._options = options
        self._prompt: tuple[int, ...] = ()
        self._begun = False
        head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + to_json(head)[:-1]
        usage = b',"usage":null' if options.include_usage else b""
        tail = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._texts = TextChunks(self._head, 0, tail)
        #: Whether deltas are shown as text alone.
        self._plain = not options.return_token_ids

    def render(self, outputs: Sequence[Output]) -> bytes:
        """The events of a batch; empty when it has nothing to show yet."""
        if self._plain and self._begun and isinstance(outputs[-1], Delta):
            texts = [output.text for output in outputs if isinstance(output, Delta) and output.text]
            return self._texts.render(texts) if texts else b""
        return b"".join([self._one(output) for output in outputs])

    def _one(self, output: Output) -> bytes:
        if isinstance(output, Started):
            self._prompt = output.prompt_token_ids
            return b""
        if isinstance(output, Done):
            return self._last(output)
        first = b"" if self._begun else self._first()
        if not self._plain:
            return first + self._rich(output)
        return first + (self._texts.render((output.text,)) if output.text else b"")

    def _rich(self, delta: Delta) -> bytes:
        """A chunk that holds more than text."""
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": delta.text},
            "token_ids": delta.token_ids,
            "logprobs": None,
            "finish_reason": None,
        }
        return self._chunk([choice], {})

    def _first(self) -> bytes:
        self._begun = True
        extra: dict[str, Any] = {}
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._options.return_token_ids:
            extra["prompt_token_ids"] = self._prompt
            choice["token_ids"] = []
        return self._chunk([choice], extra)

    def _last(self, done: Done) -> bytes:
        first = b"" if self._begun else self._first()
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": done.reason.value,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = []
        extra = {"triptych_timings": timings_body(done.timings)} if self._options.timings else {}
        end = self._chunk([choice], extra)
        if self._options.include_usage:
            end += self._chunk([], {"usage": usage_body(done.usage)})
        return first + end + DONE

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {"choices": choices}
        if self._options.include_usage:
            body["usage"] = None
        body.update(extra)
        return self._head + b"," + to_json(body)[1:] + b"\n\n"


class WholeReply:
    """A reply that is sent in one piece: collects outputs until Done."""

    def __init__(self, request_id: str, model: str, options: ChatOptions) -> None:
        self._request_id = request_id
        self._model = model
        self._options = options
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prompt: tuple[int, ...] = ()
        self._done: Done | None = None

    def take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, Delta):
                self._text.append(output.text)
                self._token_ids.extend(output.token_ids)
            elif isinstance(output, Started):
                self._prompt = output.prompt_token_ids
            else:
                self._done = output

    def body(self) -> bytes:
        """The JSON reply; only after Done."""
        assert self._done is not None
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(self._text), "refusal": None},
            "logprobs": None,
            "finish_reason": self._done.reason.value,
        }
        reply: dict[str, Any] = {
            "id": f"chatcmpl-{self._request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "usage": usage_body(self._done.usage),
        }
        if self._options.return_token_ids:
            choice["token_ids"] = self._token_ids
            reply["prompt_token_ids"] = self._prompt
        if self._options.timings:
            reply["triptych_timings"] = timings_body(self._done.timings)
        return to_json(reply)
