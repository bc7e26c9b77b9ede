"""The forms in which model families write tool calls, by vLLM's names of their parsers.

A reader reads one call, or all that follow each other: JSON arguments as they come, others one by one.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from triptych.base.request import MAX_DEPTH
from triptych.proxy.call.call_text import (
    MAX_CALLS,
    MAX_NAME,
    CallArguments,
    CallStart,
    CallText,
    EndOfText,
    MalformedCall,
    Reading,
)
from triptych.proxy.call.tools import CallForm

#: The parameters' JSON schema of every function.
Schemas = Mapping[str, Mapping[str, Any]]
Reader = Callable[[CallText, Schemas], Reading[None]]
_MAX_PYTHON = 1 << 16
_QUOTE = '<|"|>'


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls begin with one of `opens`; `first`: only at the output's begin, and the reader reads it, too."""

    opens: tuple[str, ...]
    read: Reader
    first: bool = False


def _read_call(text: CallText, schemas: Schemas) -> Reading[None]:
    """{"name": …, "arguments": {…}}; Llama writes `parameters`. What is there twice counts once."""
    yield from text.take("{")
    name, held, begun = "", "", False
    closed = yield from text.skip("}")
    while not closed:
        yield from text.blanks()
        key = json.loads((yield from text.string()))
        yield from text.take(":")
        yield from text.blanks()
        if key == "name" and not name:
            name = json.loads((yield from text.string()))
            if held:
                text.begin(name)
                text.put(held)
                begun = True
        elif key in ("arguments", "parameters") and not (held or begun):
            if (yield from text.peek()) != "{":
                raise MalformedCall
            if name:
                text.begin(name)
                begun = True
                yield from text.pass_arguments()
            else:
                held = yield from text.captured(text.value())
        else:
            yield from text.value()
        closed = yield from text.skip("}")
        if not closed:
            yield from text.take(",")
    if not begun:
        text.begin(name)
        text.put("{}")
    text.used = text.at


def _read_hermes(text: CallText, schemas: Schemas) -> Reading[None]:
    try:
        yield from _read_call(text, schemas)
    except EndOfText:
        raise
    except MalformedCall:
        # Often there is a brace too few before the closing tag.
        text.stop()
        if not text.calls:
            raise
    yield from text.skip("</tool_call>")


def _read_list(text: CallText, schemas: Schemas) -> Reading[None]:
    """[{"name": …}, …], or one such object."""
    if not (yield from text.skip("[")):
        yield from _read_call(text, schemas)
        return
    while True:
        yield from _read_call(text, schemas)
        if (yield from text.skip("]")):
            return
        yield from text.take(",")


def _read_llama(text: CallText, schemas: Schemas) -> Reading[None]:
    """JSON objects, with semicolons between them."""
    yield from text.skip("<|python_tag|>")
    more = True
    while more:
        yield from _read_call(text, schemas)
        while (yield from text.skip(";")):
            pass
        more = (yield from text.peek()) == "{"


def _read_mistral(text: CallText, schemas: Schemas) -> Reading[None]:
    """A JSON list of calls; or a name, perhaps [CALL_ID]…[ARGS] or [ARGS], and the arguments."""
    yield from text.blanks()
    if (yield from text.peek()) == "[":
        yield from _read_list(text, schemas)
        return
    head, _ = yield from text.until("{", limit=2 * MAX_NAME)
    text.at -= 1
    text.begin(head.partition("[")[0].strip())
    yield from text.pass_arguments()


def _read_coder(text: CallText, schemas: Schemas) -> Reading[None]:
    """<function=NAME> with one <parameter=KEY> per argument."""
    yield from text.take("<function=")
    name, _ = yield from text.until(">", limit=MAX_NAME)
    text.begin(name)
    tag = "<parameter="
    while tag == "<parameter=":
        _, tag = yield from text.until("<parameter=", "</function>", "</tool_call>", or_end=True)
        if tag == "<parameter=":
            key, _ = yield from text.until(">", limit=MAX_NAME)
            value, _ = yield from text.until("</parameter>")
            text.argument(key, _typed(schemas, name, key, value.removeprefix("\n").removesuffix("\n")))
    text.finish()
    if tag == "</function>":
        yield from text.skip("</tool_call>")


def _read_glm(text: CallText, schemas: Schemas) -> Reading[None]:
    """The name, then pairs of <arg_key> and <arg_value>."""
    name, tag = yield from text.until("<arg_key>", "</tool_call>", limit=MAX_NAME)
    text.begin(name := name.strip())
    while tag == "<arg_key>":
        key, _ = yield from text.until("</arg_key>", limit=MAX_NAME)
        yield from text.take("<arg_value>")
        value, _ = yield from text.until("</arg_value>")
        text.argument(key.strip(), _typed(schemas, name, key.strip(), value))
        _, tag = yield from text.until("<arg_key>", "</tool_call>", or_end=True)
    text.finish()


def _typed(schemas: Schemas, name: str, key: str, value: str) -> str:
    """The JSON of an argument in plain text: a string where the schema says so, else as it reads."""
    properties = schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not (isinstance(schema, Mapping) and schema.get("type") == "string"):
        try:
            return json.dumps(msgspec.json.decode(value), ensure_ascii=False)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            pass
    return json.dumps(value, ensure_ascii=False)


def _read_gemma(text: CallText, schemas: Schemas) -> Reading[None]:
    """call:NAME{key:value}: JSON, but for keys without quotes and strings between quotes of its own."""
    yield from text.take("call:")
    name, _ = yield from text.until("{", limit=MAX_NAME)
    text.begin(name)
    closed = yield from text.skip("}")
    while not closed:
        key = yield from _gemma_key(text)
        text.argument(key, (yield from _gemma_value(text)))
        closed = yield from text.skip("}")
        if not closed:
            yield from text.take(",")
    text.finish()
    yield from text.skip("<tool_call|>")


def _gemma_key(text: CallText) -> Reading[str]:
    key, _ = yield from text.until(":", limit=2 * MAX_NAME)
    return key.strip().removeprefix(_QUOTE).removesuffix(_QUOTE).strip('"')


def _gemma_value(text: CallText, depth: int = 0) -> Reading[str]:
    """A value as JSON."""
    if depth > MAX_DEPTH:
        raise MalformedCall
    if (yield from text.skip(_QUOTE)):
        string, _ = yield from text.until(_QUOTE)
        return json.dumps(string, ensure_ascii=False)
    first = yield from text.peek()
    if first == '"':
        return (yield from text.string())
    if first not in "{[":
        return (yield from text.scalar())
    text.at += 1
    close, items = ("}" if first == "{" else "]"), list[str]()
    closed = yield from text.skip(close)
    while not closed:
        key = f"{json.dumps((yield from _gemma_key(text)))}: " if first == "{" else ""
        items.append(key + (yield from _gemma_value(text, depth + 1)))
        closed = yield from text.skip(close)
        if not closed:
            yield from text.take(",")
    return f"{first}{', '.join(items)}{close}"


def _read_pythonic(text: CallText, schemas: Schemas) -> Reading[None]:
    """[f(a=1), g(b="x")]: a Python list of calls with literal arguments."""
    yield from text.take("[")
    closed = False
    while not closed:
        name, _ = yield from text.until("(", limit=MAX_NAME)
        begun = False
        while not (yield from text.skip(")")):
            if begun:
                yield from text.take(",")
                if (yield from text.skip(")")):
                    break
            key, _ = yield from text.until("=", limit=MAX_NAME)
            if not key.strip().isidentifier():
                raise MalformedCall
            value = _python_literal((yield from text.captured(_python_value(text))))
            if not begun:
                text.begin(name.strip())
                begun = True
            text.argument(key.strip(), value)
        if not begun:
            text.begin(name.strip())
        text.finish()
        closed = yield from text.skip("]")
        if not closed:
            yield from text.take(",")
            closed = yield from text.skip("]")


def _python_value(text: CallText) -> Reading[None]:
    """Passes over a value, up to the comma or the parenthesis behind it."""
    start, depth = text.at - text.used, 0
    while text.at - text.used - start <= _MAX_PYTHON:
        char = yield from text.peek()
        if depth == 0 and char in ",)":
            return
        if char in "'\"":
            yield from _python_string(text, char)
            continue
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            break
        text.at += 1
    raise MalformedCall


def _python_string(text: CallText, quote: str) -> Reading[None]:
    if (yield from text.starts(quote * 3)):
        quote *= 3
    text.at += len(quote)
    while not (yield from text.starts(quote)):
        if (yield from text.peek()) == "\\":
            text.at += 1
            yield from text.peek()
        text.at += 1
    text.at += len(quote)


def _python_literal(text: str) -> str:
    """The JSON of a literal."""
    try:
        literal = json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
        literal.encode()  # a half of a surrogate pair is no text
        return literal
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedCall from None


#: A forced call: the whole output is one call, or a list of calls, as JSON.
FORCED = ToolFormat(("{", "["), _read_list, first=True)
FORMATS = {
    "hermes": ToolFormat(("<tool_call>",), _read_hermes),
    "qwen3_coder": ToolFormat(("<tool_call>",), _read_coder),
    "glm45": ToolFormat(("<tool_call>",), _read_glm),
    "gemma4": ToolFormat(("<|tool_call>",), _read_gemma),
    "mistral": ToolFormat(("[TOOL_CALLS]",), _read_mistral),
    "llama3_json": ToolFormat(("<|python_tag|>", "{"), _read_llama, first=True),
    "pythonic": ToolFormat(("[",), _read_pythonic, first=True),
}


#: White space before a call belongs to it, up to this many characters.
MAX_BLANKS = 64

Piece = str | CallStart | CallArguments


def make_parser(
    form: CallForm, *, parallel: bool, tool_format: str = "", schemas: Schemas | None = None
) -> ToolParser:
    """The parser of a model's `tool_format`, one of FORMATS; Hermes' where it names none."""
    if form is CallForm.JSON:
        return ToolParser(FORCED, {}, MAX_CALLS)
    named = FORMATS.get(tool_format, FORMATS["hermes"])
    return ToolParser(named, schemas or {}, MAX_CALLS if parallel else 1)


class ToolParser:
    """Takes the output's text piece by piece; gives content and at most `limit` calls, in order.

    Text without a name and the begin of arguments is content, as is the rest of a call that is malformed.
    """

    def __init__(self, tool_format: ToolFormat, schemas: Schemas, limit: int) -> None:
        self._format = tool_format
        self._schemas = schemas
        self._left = limit
        #: Text that may yet belong to a call.
        self._buffer = ""
        self._after_call = False
        #: No call can come any more.
        self._content_only = False
        #: What stands before the text of the call that is being read, and is content if it is none.
        self._opening = ""
        self._call: tuple[CallText, Reading[None]] | None = None
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        return self._advance(text, final=False)

    def finish(self) -> list[Piece]:
        """The rest, once no more text comes; a call that lacks only its closing tag counts."""
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> list[Piece]:
        self._pieces = []
        if self._call is None:
            self._buffer += text
        else:
            self._call[0].add(text)
        while self._call_step(*self._call, final) if self._call else self._content_step(final):
            pass
        return self._pieces

    def _content_step(self, final: bool) -> bool:
        """Takes text up to a call's begin; whether there may be more to do."""
        if self._after_call:
            self._buffer = self._buffer.lstrip()
        keep = 0
        if not (self._content_only or self._left <= 0):
            if self._begin_first() if self._format.first else self._begin_anywhere():
                return True
            keep = 0 if final or self._content_only else self._undecided()
        self._put(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _begin_first(self) -> bool:
        """Whether the output begins with a call."""
        start = self._buffer.lstrip()
        if any(start.startswith(tag) for tag in self._format.opens):
            self._begin(len(self._buffer) - len(start), "")
            return True
        self._content_only = not any(tag.startswith(start) for tag in self._format.opens)
        return False

    def _begin_anywhere(self) -> bool:
        [tag] = self._format.opens
        if (at := self._buffer.find(tag)) < 0:
            return False
        self._begin(at, tag)
        return True

    def _begin(self, at: int, tag: str) -> None:
        blanks = _blanks_before(self._buffer, at)
        self._put(self._buffer[: at - blanks])
        self._opening = self._buffer[at - blanks : at] + tag
        text = CallText(self._buffer[at + len(tag) :], self._left)
        self._buffer = ""
        self._call = text, self._format.read(text, self._schemas)

    def _undecided(self) -> int:
        """Characters at the end that may yet belong to a call: the beginning of a tag, white space."""
        buffer, opens = self._buffer, self._format.opens
        partial = len(buffer.lstrip()) if self._format.first else _begun(buffer, opens[0])
        return partial + _blanks_before(buffer, len(buffer) - partial)

    def _call_step(self, text: CallText, reading: Reading[None], final: bool) -> bool:
        """Reads on in a call; whether it has ended."""
        text.final = final
        try:
            next(reading)
        except StopIteration:
            rest = text.text[text.at :]
        except EndOfText:
            text.cut_off()
            rest = ""
        except MalformedCall:
            text.stop()
            rest = text.text[text.used :]
        else:
            self._report(text)
            return False
        self._report(text)
        self._call = None
        self._left -= text.calls
        self._after_call = text.calls > 0
        self._content_only = self._format.first
        if not text.calls:
            # The tag was mere text; what follows it may hold calls.
            self._put(self._opening)
            rest = text.text
        self._buffer = rest
        return True

    def _report(self, text: CallText) -> None:
        """Takes over what has been read; a call's arguments that came together are one piece."""
        parts = list[str]()
        for piece in [*text.pieces, None]:
            if isinstance(piece, CallArguments):
                parts.append(piece.text)
                continue
            if parts:
                self._pieces.append(CallArguments("".join(parts)))
                parts = []
            if piece is not None:
                self._pieces.append(piece)
        text.pieces = []

    def _put(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._after_call = False


def _blanks_before(text: str, end: int) -> int:
    """White space that may belong to a call at `end`: bounded, so that a run of it is held but once."""
    tail = text[max(end - MAX_BLANKS, 0) : end]
    return len(tail) - len(tail.rstrip())


def _begun(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag` without being all of it."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
