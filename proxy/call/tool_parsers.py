"""Parsers that find tool calls in an output: pieces of text in, content and calls in order out."""

from __future__ import annotations

import re
from typing import Protocol

from triptych.proxy.call.tool_formats import FORMATS, CallText, Schemas, ToolFormat, read_json
from triptych.proxy.call.tools import CallForm

#: So much white space before a call belongs to it.
MAX_BLANKS = 64
_OUTSIDE = re.compile(r'["<\\]')
_INSIDE = re.compile(r'["\\]')

Piece = str | CallText


class ToolParser(Protocol):
    """Takes the output's text piece by piece; gives content and calls in order."""

    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def make_parser(
    form: CallForm, *, parallel: bool, tool_format: str = "", schemas: Schemas | None = None
) -> ToolParser:
    """The parser of a model's `tool_format`, one of FORMATS; Hermes' where it names none."""
    if form is CallForm.JSON:
        return JsonCalls()
    named = FORMATS.get(tool_format, FORMATS["hermes"])
    limit = None if parallel else 1
    return (TaggedCalls if named.close else TrailingCalls)(named, schemas or {}, limit)


class TaggedCalls:
    """Calls between an opening and a closing tag, such as `<tool_call>`; at most `limit`."""

    def __init__(self, tool_format: ToolFormat, schemas: Schemas, limit: int | None = None) -> None:
        self._format = tool_format
        self._schemas = schemas
        [self._open], self._close = tool_format.opens, tool_format.close
        self._left = limit
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
        start = self._buffer.find(self._open) if self._left != 0 else -1
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
        partial = _begun(text, self._open)
        return partial + _blanks_before(text, len(text) - partial)

    def _begin_call(self, start: int) -> None:
        self._in_call, self._in_string = True, False
        self._start, self._scan = start, start + len(self._open)

    def _in_call_step(self, pieces: list[Piece], final: bool) -> bool:
        """Looks through a call's body; whether there may be more to do."""
        body = self._start + len(self._open)
        end = self._find_close()
        if end is None and not final:
            return False
        if end is None:
            call = self._read(self._buffer[body:])
            rest = len(self._buffer)
        else:
            call = self._read(self._buffer[body:end]) if end >= 0 else None
            rest = end + len(self._close)
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

    def _read(self, text: str) -> CallText | None:
        calls = self._format.read(text, self._schemas)
        return calls[0] if calls else None

    def _find_close(self) -> int | None:
        """Where the closing tag stands; -1: it is no call; None: not there yet."""
        if self._format.quoted:
            return self._find_unquoted_close()
        at = self._buffer.find(self._close, self._scan)
        self._scan = max(self._scan, len(self._buffer) - len(self._close) + 1)
        return at if at >= 0 else None

    def _find_unquoted_close(self) -> int | None:
        """The first closing tag outside of JSON strings."""
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
                if self._buffer.startswith(self._close, at):
                    return at
                return None if self._close.startswith(self._buffer[at:]) else -1
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


def _begun(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag` without being all of it."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


class TrailingCalls:
    """Calls up to the end of the output, from an opening text on: all of it is held back."""

    def __init__(self, tool_format: ToolFormat, schemas: Schemas, limit: int | None = None) -> None:
        self._format = tool_format
        self._schemas = schemas
        self._limit = limit
        self._parts: list[str] = []
        #: Undecided text.
        self._buffer = ""
        self._in_call = False
        self._text_only = False

    def feed(self, text: str) -> list[Piece]:
        if self._in_call:
            self._parts.append(text)
            return []
        self._buffer += text
        return self._first() if self._format.first else self._anywhere()

    def finish(self) -> list[Piece]:
        text = "".join([*self._parts, self._buffer])
        self._parts, self._buffer = [], ""
        calls = self._format.read(text, self._schemas) if self._in_call else None
        if not calls:
            return [text] if text else []
        return list(calls[: self._limit])

    def _first(self) -> list[Piece]:
        begin = self._buffer.lstrip()
        if not self._text_only and any(begin.startswith(tag) for tag in self._format.opens):
            return self._hold("", self._buffer)
        if not self._text_only and any(tag.startswith(begin) for tag in self._format.opens):
            return []
        self._text_only = True
        text, self._buffer = self._buffer, ""
        return [text] if text else []

    def _anywhere(self) -> list[Piece]:
        [tag] = self._format.opens
        at = self._buffer.find(tag)
        if at >= 0:
            return self._hold(self._buffer[:at].rstrip(), self._buffer[at:])
        certain = self._buffer[: len(self._buffer) - _begun(self._buffer, tag)].rstrip()
        self._buffer = self._buffer[len(certain) :]
        return [certain] if certain else []

    def _hold(self, before: str, rest: str) -> list[Piece]:
        self._in_call, self._parts, self._buffer = True, [rest], ""
        return [before] if before else []


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
        if calls := read_json(text):
            return list(calls)
        return [text] if text else []
