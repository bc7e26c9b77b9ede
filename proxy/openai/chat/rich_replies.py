"""Replies with several choices, log-probabilities or tool calls, in OpenAI's shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from triptych.proxy.call.answer import Answer, Shown, ShownCall
from triptych.proxy.call.chat import Delta, Done, Output, Started
from triptych.proxy.http.sse import DONE
from triptych.proxy.openai.chat.replies import timings_body, usage_body
from triptych.proxy.openai.chat.request import ChatOptions
from triptych.types import PositionLogprobs, TokenLogprob

#: OpenAI's word for a token that cannot be.
_IMPOSSIBLE = -9999.0
_json = msgspec.json.Encoder().encode


def logprobs_body(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    content = [
        {**_token(position.chosen), "top_logprobs": [_token(token) for token in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    logprob = max(token.logprob, _IMPOSSIBLE)
    return {"token": token.text, "logprob": logprob, "bytes": list(token.utf8)}


def _call_body(call: ShownCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class _Choice:
    """One choice on its way: what of it has been read, and what still waits to be sent."""

    def __init__(self, options: ChatOptions) -> None:
        self.answer = Answer(options.calls, parallel=options.parallel_calls)
        self.begun = False
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []

    def take(self, delta: Delta) -> list[Shown]:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        return self.answer.take(delta)


class RichStream:
    """The chunks of one streamed reply. Tokens whose text is held back go with the next chunk."""

    def __init__(self, request_id: str, model: str, options: ChatOptions) -> None:
        self._options = options
        self._choices = [_Choice(options) for _ in range(options.n)]
        self._prompt: tuple[int, ...] | None = ()
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    def render(self, outputs: Sequence[Output]) -> bytes:
        """The events of a batch; empty when it has nothing to show yet."""
        return b"".join([self._one(output) for output in outputs])

    def _one(self, output: Output) -> bytes:
        if isinstance(output, Started):
            self._prompt = output.prompt_token_ids
            return b""
        index = output.choice
        first = b"" if self._choices[index].begun else self._first(index)
        if isinstance(output, Done):
            return first + self._last(index, output)
        shown = self._choices[index].take(output)
        if not shown and self._has_waiting(index):
            shown = [""]
        return first + b"".join([self._piece(index, piece) for piece in shown])

    def _has_waiting(self, index: int) -> bool:
        """Whether tokens were asked for that no text carries: they are told as they come."""
        choice = self._choices[index]
        return bool(choice.logprobs) or (self._options.return_token_ids and bool(choice.token_ids))

    def _first(self, index: int) -> bytes:
        self._choices[index].begun = True
        extra: dict[str, Any] = {}
        if self._options.return_token_ids and self._prompt is not None:
            extra["prompt_token_ids"], self._prompt = self._prompt, None
        return self._chunk(index, {"role": "assistant", "content": ""}, extra=extra)

    def _piece(self, index: int, piece: Shown) -> bytes:
        if isinstance(piece, str):
            return self._chunk(index, {"content": piece})
        body = _call_body(piece)
        arguments = {"index": piece.index, "function": {"arguments": piece.arguments}}
        body["function"] = {"name": piece.name, "arguments": ""}
        return self._chunk(index, {"tool_calls": [{"index": piece.index, **body}]}) + self._chunk(
            index, {"tool_calls": [arguments]}
        )

    def _last(self, index: int, done: Done) -> bytes:
        shown, reason = self._choices[index].answer.end(done)
        parts = [self._piece(index, piece) for piece in shown]
        extra: dict[str, Any] = {}
        if done.final and self._options.timings:
            extra["triptych_timings"] = timings_body(done.timings)
        parts.append(self._chunk(index, {}, reason, extra))
        if done.final and self._options.include_usage:
            parts.append(self._event([], {"usage": usage_body(done.usage)}))
        if done.final:
            parts.append(DONE)
        return b"".join(parts)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk of one choice, with the tokens that have come since the last one."""
        state = self._choices[index]
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if state.logprobs:
            choice["logprobs"] = logprobs_body(state.logprobs)
            state.logprobs = []
        if self._options.return_token_ids:
            choice["token_ids"] = state.token_ids
        state.token_ids = []
        return self._event([choice], extra or {})

    def _event(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._options.include_usage else {}
        return b"data: " + _json({**self._head, "choices": choices, **usage, **extra}) + b"\n\n"


class RichReply:
    """A reply that is sent in one piece: collects outputs until the last choice is done."""

    def __init__(self, request_id: str, model: str, options: ChatOptions) -> None:
        self._request_id = request_id
        self._model = model
        self._options = options
        self._choices = [_Choice(options) for _ in range(options.n)]
        self._shown: list[list[Shown]] = [[] for _ in range(options.n)]
        self._reasons = [""] * options.n
        self._prompt: tuple[int, ...] = ()
        self._done: Done | None = None

    def take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, Started):
                self._prompt = output.prompt_token_ids
            elif isinstance(output, Delta):
                self._shown[output.choice] += self._choices[output.choice].take(output)
            else:
                rest, self._reasons[output.choice] = self._choices[output.choice].answer.end(output)
                self._shown[output.choice] += rest
                self._done = output if output.final else self._done

    def body(self) -> bytes:
        """The JSON reply; only after the last Done."""
        assert self._done is not None
        reply: dict[str, Any] = {
            "id": f"chatcmpl-{self._request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [self._choice(index) for index in range(self._options.n)],
            "usage": usage_body(self._done.usage),
        }
        if self._options.return_token_ids:
            reply["prompt_token_ids"] = self._prompt
        if self._options.timings:
            reply["triptych_timings"] = timings_body(self._done.timings)
        return _json(reply)

    def _choice(self, index: int) -> dict[str, Any]:
        state, shown = self._choices[index], self._shown[index]
        calls = [_call_body(piece) for piece in shown if isinstance(piece, ShownCall)]
        text = "".join(piece for piece in shown if isinstance(piece, str))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": logprobs_body(state.logprobs) if self._options.logprobs else None,
            "finish_reason": self._reasons[index],
        }
        if self._options.return_token_ids:
            choice["token_ids"] = state.token_ids
        return choice
