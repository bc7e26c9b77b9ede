"""One choice's output as clients see it: reasoning, content and tool calls in order, and why it ended."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Protocol

import msgspec

from triptych.base.types import FinishReason
from triptych.proxy.call.chat import Delta, Done, Started
from triptych.proxy.call.reasoning import ReasoningSplitter
from triptych.proxy.call.tools import CallForm

OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: So much white space before a call belongs to it.
MAX_BLANKS = 64
_OUTSIDE = re.compile(r'["<\\]')
_INSIDE = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class CallText:
    """One call; `arguments` is the JSON object as the model wrote it."""

    name: str
    arguments: str


Piece = str | CallText


class ToolParser(Protocol):
    """Takes the output's text piece by piece; gives content and calls in order."""

    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def make_parser(form: CallForm, *, parallel: bool) -> ToolParser:
    return JsonCalls() if form is CallForm.JSON else TaggedCalls(most=None if parallel else 1)


class _TaggedCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def read_call(text: str) -> CallText | None:
    """The call that `text` is as JSON: {"name": …, "arguments": {…}}; None when it is none."""
    try:
        call = msgspec.json.decode(text, type=_TaggedCall)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return _call_text(call)


def _call_text(call: _TaggedCall) -> CallText | None:
    arguments = bytes(call.arguments).decode().strip()
    return CallText(call.name, arguments) if call.name and arguments.startswith("{") else None


class TaggedCalls:
    """Calls between `<tool_call>` and `</tool_call>`, as Qwen's templates teach them; at most `most`."""

    def __init__(self, most: int | None = None) -> None:
        self._left = most
        #: Text that is not decided yet; from a call's tag on while `_in_call`.
        self._buffer = ""
        self._in_call = False
        self._after_call = False
        #: Where the call's tag stands in the buffer.
        self._start = 0
        #: How far a call's body is looked through, and whether a JSON string is open there.
        self._scan = 0
        self._in_string = False

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._advance(final=False)

    def finish(self) -> list[Piece]:
        """The rest, once no more text comes; a call that lacks only its closing tag counts."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._in_call_step(pieces, final) if self._in_call else self._text_step(pieces, final):
            pass
        return pieces

    def _text_step(self, pieces: list[Piece], final: bool) -> bool:
        """Takes text up to a call's tag; whether there may be more to do."""
        if self._after_call:
            self._buffer = self._buffer.lstrip()
        start = self._buffer.find(OPEN) if self._left != 0 else -1
        if start >= 0:
            self._begin_call(start)
            return True
        keep = 0 if final else self._undecided()
        self._put(pieces, self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _undecided(self) -> int:
        """Characters at the end that may yet belong to a call: the beginning of a tag, white space."""
        text = self._buffer
        if self._left == 0:
            return 0
        partial = next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)
        return partial + _blanks_before(text, len(text) - partial)

    def _begin_call(self, start: int) -> None:
        self._in_call, self._in_string = True, False
        self._start, self._scan = start, start + len(OPEN)

    def _in_call_step(self, pieces: list[Piece], final: bool) -> bool:
        """Looks through a call's body; whether there may be more to do."""
        body = self._start + len(OPEN)
        end = self._find_close()
        if end is None and not final:
            return False
        if end is None:
            call = read_call(self._buffer[body:])
            rest = len(self._buffer)
        else:
            call = read_call(self._buffer[body:end]) if end >= 0 else None
            rest = end + len(CLOSE)
        self._in_call = False
        if call is None:
            # The tag was mere text; what follows it may hold calls.
            self._put(pieces, self._buffer[:body])
            self._buffer = self._buffer[body:]
            return True
        self._put(pieces, self._buffer[: self._start - _blanks_before(self._buffer, self._start)])
        pieces.append(call)
        self._buffer = self._buffer[rest:]
        self._after_call = True
        if self._left is not None:
            self._left -= 1
        return True

    def _find_close(self) -> int | None:
        """Where the closing tag stands outside of JSON strings; -1: it is no call; None: not there yet."""
        while match := (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._scan):
            at, found = match.start(), match[0]
            if found == '"':
                self._in_string = not self._in_string
                self._scan = at + 1
            elif found == "\\":
                if not self._in_string:
                    return -1
                if at + 1 == len(self._buffer):
                    self._scan = at
                    return None
                self._scan = at + 2
            else:
                self._scan = at
                if self._buffer.startswith(CLOSE, at):
                    return at
                return None if CLOSE.startswith(self._buffer[at:]) else -1
        self._scan = len(self._buffer)
        return None

    def _put(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(text)
            self._after_call = False


def _blanks_before(text: str, end: int) -> int:
    """White space that may belong to a call at `end`: bounded, so that a run of it is held but once."""
    tail = text[max(end - MAX_BLANKS, 0) : end]
    return len(tail) - len(tail.rstrip())


class JsonCalls:
    """A forced call: the whole output is one call, or a list of calls, as JSON; else it is text."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        self._parts.append(text)
        return []

    def finish(self) -> list[Piece]:
        text = "".join(self._parts)
        self._parts = []
        try:
            calls = msgspec.json.decode(text, type=list[_TaggedCall])
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            call = read_call(text)
            return [call] if call else [text] if text else []
        found = [_call_text(call) for call in calls]
        if not found or None in found:
            return [text]
        return [call for call in found if call]


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call as clients see it: its place among the choice's calls, and an id to answer to."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ShownReasoning:
    """Reasoning, which comes before content and calls."""

    text: str


Shown = str | ShownCall | ShownReasoning


class ChoiceReader:
    """Finds reasoning and tool calls in one choice's output. With `calls` NONE the answer passes as it comes.

    `reasoning_tokens` counts the tokens whose text is reasoning; with `reasoning` False it is not shown.
    """

    def __init__(
        self, calls: CallForm = CallForm.NONE, *, parallel: bool = True, reasoning: bool = True
    ) -> None:
        self._parser = None if calls is CallForm.NONE else make_parser(calls, parallel=parallel)
        self._calls = 0
        self._splitter: ReasoningSplitter | None = None
        self._with_reasoning = reasoning
        self.reasoning_tokens = 0

    def begin(self, started: Started) -> None:
        """The output is that of a prompt after which the model may reason."""
        if started.reasoning is not None:
            self._splitter = ReasoningSplitter(started.reasoning)

    @property
    def plain(self) -> bool:
        """Whether all further text is content as it comes."""
        return self._parser is None and (self._splitter is None or self._splitter.answers)

    def read(self, delta: Delta) -> list[Shown]:
        """What new output shows; text that may yet be a marker or a call is held back."""
        text, shown = delta.text, list[Shown]()
        if self._splitter is not None and not self._splitter.answers:
            reasoning, text = self._splitter.feed(text)
            if reasoning or self._splitter.reasons:
                self.reasoning_tokens += len(delta.token_ids)
            shown = self._reasoning(reasoning)
        if self._parser is not None:
            return shown + self._shown(self._parser.feed(text))
        return [*shown, text] if text else shown

    def end(self, done: Done) -> tuple[list[Shown], str]:
        """What was held back, and OpenAI's finish reason."""
        reasoning, text = self._splitter.finish() if self._splitter is not None else ("", "")
        rest = self._reasoning(reasoning)
        if self._parser is not None:
            rest += self._shown(self._parser.feed(text)) + self._shown(self._parser.finish())
        elif text:
            rest.append(text)
        called = self._calls > 0 and done.reason is FinishReason.STOP
        return rest, "tool_calls" if called else done.reason.value

    def _reasoning(self, text: str) -> list[Shown]:
        return [ShownReasoning(text)] if text and self._with_reasoning else []

    def _shown(self, pieces: list[Piece]) -> list[Shown]:
        shown: list[Shown] = []
        for piece in pieces:
            if isinstance(piece, str):
                shown.append(piece)
                continue
            shown.append(ShownCall(self._calls, f"call_{uuid.uuid4().hex[:24]}", piece.name, piece.arguments))
            self._calls += 1
        return shown
