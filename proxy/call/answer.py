"""One choice's output as clients see it: content and tool calls in order, and why it ended."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Protocol

import msgspec

from triptych.base.types import FinishReason
from triptych.proxy.call.chat import Delta, Done
from triptych.proxy.call.tools import CallForm

OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: White space before a call belongs to it.
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
    return JsonCalls() if form is CallForm.JSON else TaggedCalls(max_calls=None if parallel else 1)


class _TaggedCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def read_call(text: str) -> CallText | None:
    """The call that `text` is as JSON: {"name": …, "arguments": {…}}; None for any other text."""
    try:
        call = msgspec.json.decode(text, type=_TaggedCall)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return _call_text(call)


def _call_text(call: _TaggedCall) -> CallText | None:
    arguments = bytes(call.arguments).decode().strip()
    return CallText(call.name, arguments) if call.name and arguments.startswith("{") else None


class TaggedCalls:
    """Calls between `<tool_call>` and `</tool_call>`, as Qwen's templates teach them; at most `max_calls`."""

    def __init__(self, max_calls: int | None = None) -> None:
        self._left = max_calls
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


Shown = str | ShownCall


class ChoiceReader:
    """Finds the tool calls in one choice's output. With `calls` NONE the text passes as it comes."""

    def __init__(self, calls: CallForm = CallForm.NONE, *, parallel: bool = True) -> None:
        self._parser = None if calls is CallForm.NONE else make_parser(calls, parallel=parallel)
        self._calls = 0

    def read(self, delta: Delta) -> list[Shown]:
        """What new output shows; text that may yet be a call is held back."""
        if self._parser is None:
            return [delta.text] if delta.text else []
        return self._shown(self._parser.feed(delta.text))

    def end(self, done: Done) -> tuple[list[Shown], str]:
        """What was held back, and OpenAI's finish reason."""
        rest = self._shown(self._parser.finish()) if self._parser else []
        called = self._calls > 0 and done.reason is FinishReason.STOP
        return rest, "tool_calls" if called else done.reason.value

    def _shown(self, pieces: list[Piece]) -> list[Shown]:
        shown: list[Shown] = []
        for piece in pieces:
            if isinstance(piece, str):
                shown.append(piece)
                continue
            shown.append(ShownCall(self._calls, f"call_{uuid.uuid4().hex[:24]}", piece.name, piece.arguments))
            self._calls += 1
        return shown
