"""Tool calls as a Python list of calls with literal arguments: their reader."""

from __future__ import annotations

import ast
import json

from triptych.proxy.call.call_text import MAX_NAME, CallText, MalformedCall, Reading, Schemas

_MAX_PYTHON = 1 << 16


def read_lfm(text: CallText, schemas: Schemas) -> Reading[None]:
    """LFM's: the list between tags."""
    yield from read_pythonic(text, schemas)
    yield from text.skip("<|tool_call_end|>")


def read_pythonic(text: CallText, schemas: Schemas) -> Reading[None]:
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
