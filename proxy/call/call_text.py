"""The text of tool calls as it comes from the model, for readers that wait where it ends.

A reader is a generator: it yields where it needs more text. It moves `CallText.at` behind what it has read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from triptych.base.request import MAX_DEPTH

T = TypeVar("T")
Reading = Generator[None, None, T]
#: Calls of one choice, where they may be parallel.
MAX_CALLS = 1 << 20
#: Characters of a function's name with the white space around it.
MAX_NAME = 128
_MAX_SCALAR = 1024
_NAME = re.compile(r"[\w.-]{1,64}")
_BLANKS = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR_END = re.compile(r"[\s,\]}]")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


#: The parameters' JSON schema of every function.
Schemas = Mapping[str, Mapping[str, Any]]


class MalformedCall(Exception):
    """The text is no call, or does not go on as one."""


class EndOfText(MalformedCall):
    """The output has ended amid a call."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the last call's arguments: together they are a JSON object."""

    text: str


class CallText:
    """Text with a position in it, and what has been read of it as `pieces`; at most `limit` calls."""

    def __init__(self, text: str, limit: int = MAX_CALLS) -> None:
        self.text = text
        self.at = 0
        self.final = False
        self.pieces: list[CallStart | CallArguments] = []
        self.calls = 0
        #: Text before it has become part of a call: it cannot be content any more.
        self.used = 0
        self._limit = limit
        #: Whether arguments are passed on as they are read.
        self._passing = False
        self._has_arguments = False

    def add(self, text: str) -> None:
        self.text = self.text[self.used :] + text
        self.at, self.used = self.at - self.used, 0

    def cut_off(self) -> None:
        """The output has ended: what is left of arguments that are passed on."""
        if self._passing:
            self.at = len(self.text)
            self._pass_on()

    # Calls

    def begin(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise MalformedCall
        self.calls += 1
        self._has_arguments = False
        self.used = self.at
        if self.calls <= self._limit:
            self.pieces.append(CallStart(name))

    def argument(self, key: str, value: str) -> None:
        """One argument of a call, its value as JSON."""
        self.put(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: {value}")
        self._has_arguments = True
        self.used = self.at

    def finish(self) -> None:
        """The end of a call whose arguments were given one by one."""
        self.put("}" if self._has_arguments else "{}")
        self.used = self.at

    def put(self, text: str) -> None:
        """A piece of arguments; calls beyond the limit are left out."""
        if text and self.calls <= self._limit:
            self.pieces.append(CallArguments(text))

    def _pass_on(self) -> None:
        self.put(self.text[self.used : self.at])
        self.used = self.at

    # Text

    def more(self) -> Reading[None]:
        """Waits for more text."""
        if self._passing:
            self._pass_on()
        if self.final:
            raise EndOfText
        yield

    def peek(self) -> Reading[str]:
        """The next character."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def blanks(self) -> Reading[None]:
        while True:
            match = _BLANKS.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return
            yield from self.more()

    def starts(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next."""
        while not self.text.startswith(literal, self.at):
            if not literal.startswith(self.text[self.at : self.at + len(literal)]):
                return False
            yield from self.more()
        return True

    def skip(self, literal: str) -> Reading[bool]:
        """Passes over white space, and over `literal` where it comes next."""
        yield from self.blanks()
        present = yield from self.starts(literal)
        if present:
            self.at += len(literal)
        return present

    def take(self, literal: str) -> Reading[None]:
        """Passes over white space and `literal`."""
        if not (yield from self.skip(literal)):
            raise MalformedCall

    def until(self, *tags: str, limit: int | None = None, or_end: bool = False) -> Reading[tuple[str, str]]:
        """The text before the first of `tags`, and this tag, both passed over; "" for the output's end."""
        longest, scanned = max(map(len, tags)), 0
        while True:
            places = [(at, tag) for tag in tags if (at := self.text.find(tag, self.at + scanned)) >= 0]
            at, tag = min(places, default=(len(self.text), ""))
            # A tag that begins at the end may yet be there.
            certain = at - self.at if tag else max(len(self.text) - self.at - longest + 1, 0)
            if limit is not None and certain > limit:
                raise MalformedCall
            if tag or (or_end and self.final):
                before = self.text[self.at : at]
                self.at = at + len(tag)
                return before, tag
            scanned = certain
            yield from self.more()

    # JSON

    def string(self) -> Reading[str]:
        """The JSON text of a string. In arguments that are passed on, bare control characters get escaped."""
        yield from self.take('"')
        parts = ['"']
        while True:
            match = _PLAIN.match(self.text, self.at)
            assert match is not None
            parts.append(match[0])
            self.at = match.end()
            char = yield from self.peek()
            if char == "\\":
                parts.append((yield from self._escape()))
                continue
            if char == '"':
                self.at += 1
                return "".join([*parts, '"'])
            if char >= " ":
                continue
            if not self._passing:
                raise MalformedCall
            # Models write them bare.
            self._pass_on()
            self.put(json.dumps(char)[1:-1])
            self.at += 1
            self.used = self.at

    def _escape(self) -> Reading[str]:
        while not (match := _ESCAPE.match(self.text, self.at)):
            if not _PARTIAL_ESCAPE.fullmatch(self.text, self.at):
                raise MalformedCall
            yield from self.more()
        self.at = match.end()
        return match[0]

    def scalar(self) -> Reading[str]:
        """A JSON number, true, false or null."""
        while not (match := _SCALAR_END.search(self.text, self.at)):
            if len(self.text) - self.at > _MAX_SCALAR:
                raise MalformedCall
            yield from self.more()
        text = self.text[self.at : match.start()]
        if not _SCALAR.fullmatch(text):
            raise MalformedCall
        self.at = match.start()
        return text

    def value(self, depth: int = 0) -> Reading[None]:
        """Passes over one JSON value."""
        if depth > MAX_DEPTH:
            raise MalformedCall
        yield from self.blanks()
        first = yield from self.peek()
        if first == '"':
            yield from self.string()
        elif first in "{[":
            yield from self._container("}" if first == "{" else "]", depth)
        else:
            yield from self.scalar()

    def _container(self, close: str, depth: int) -> Reading[None]:
        self.at += 1
        closed = yield from self.skip(close)
        while not closed:
            if close == "}":
                yield from self.blanks()
                yield from self.string()
                yield from self.take(":")
            yield from self.value(depth + 1)
            closed = yield from self.skip(close)
            if not closed:
                yield from self.take(",")

    def captured(self, reading: Reading[None]) -> Reading[str]:
        """The text that `reading` passes over."""
        start = self.at - self.used
        yield from reading
        return self.text[self.used + start : self.at]

    def pass_arguments(self) -> Reading[None]:
        """Passes on a call's arguments, a JSON object, as they come."""
        self.used, self._passing = self.at, True
        yield from self.value()
        self._pass_on()
        self._passing = False

    def stop(self) -> None:
        """The text does not go on as a call: what has been read of arguments counts, and no more."""
        if self._passing:
            self._pass_on()
        self._passing = False


Reader = Callable[[CallText, Schemas], Reading[None]]
