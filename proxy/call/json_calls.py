"""Tool calls whose arguments are JSON: readers of each family's form, and of a forced call.

A reader reads one call, or all that follow each other; arguments are passed on as they come.
"""

from __future__ import annotations

import json
import re

from triptych.proxy.call.call_text import (
    MAX_NAME,
    CallText,
    EndOfText,
    MalformedCall,
    Reader,
    Reading,
    Schemas,
)

_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def read_call(text: CallText, schemas: Schemas) -> Reading[None]:
    """{"name": …, "arguments": {…}}; Llama writes `parameters`, Cohere `tool_name`, too.

    What is there twice counts once.
    """
    yield from text.take("{")
    name, held, begun = "", "", False
    closed = yield from text.skip("}")
    while not closed:
        yield from text.blanks()
        key = json.loads((yield from text.string()))
        yield from text.take(":")
        yield from text.blanks()
        if key in ("name", "tool_name") and not name:
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


def read_hermes(text: CallText, schemas: Schemas) -> Reading[None]:
    try:
        yield from read_call(text, schemas)
    except EndOfText:
        raise
    except MalformedCall:
        # Often there is a brace too few before the closing tag.
        text.stop()
        if not text.calls:
            raise
    yield from text.skip("</tool_call>")


def read_list(text: CallText, schemas: Schemas) -> Reading[None]:
    """[{"name": …}, …], or one such object."""
    if not (yield from text.skip("[")):
        yield from read_call(text, schemas)
        return
    while True:
        yield from read_call(text, schemas)
        if (yield from text.skip("]")):
            return
        yield from text.take(",")


def read_llama(text: CallText, schemas: Schemas) -> Reading[None]:
    """JSON objects, with semicolons between them."""
    yield from text.skip("<|python_tag|>")
    more = True
    while more:
        yield from read_call(text, schemas)
        while (yield from text.skip(";")):
            pass
        more = (yield from text.peek()) == "{"


def read_mistral(text: CallText, schemas: Schemas) -> Reading[None]:
    """A JSON list of calls; or a name, perhaps [CALL_ID]…[ARGS] or [ARGS], and the arguments."""
    yield from text.blanks()
    if (yield from text.peek()) == "[":
        yield from read_list(text, schemas)
        return
    head, _ = yield from text.until("{", limit=2 * MAX_NAME)
    text.at -= 1
    text.begin(head.partition("[")[0].strip())
    yield from text.pass_arguments()


def calls_until(close: str) -> Reader:
    """A reader of a list of calls, or of calls that follow each other, and of `close`."""

    def read(text: CallText, schemas: Schemas) -> Reading[None]:
        yield from read_list(text, schemas)
        while not (yield from text.skip(close)):
            if (yield from text.peek()) not in "[{":
                return
            yield from read_list(text, schemas)

    return read


def read_kimi(text: CallText, schemas: Schemas) -> Reading[None]:
    """functions.NAME:NUMBER and the arguments, one call after the other."""
    while (yield from text.skip("<|tool_call_begin|>")):
        head, _ = yield from text.until("<|tool_call_argument_begin|>", limit=2 * MAX_NAME)
        yield from text.blanks()
        named = _KIMI_ID.fullmatch(head.strip())
        if named is None or (yield from text.peek()) != "{":
            raise MalformedCall
        text.begin(named[1])
        yield from text.pass_arguments()
        yield from text.skip("<|tool_call_end|>")
        text.used = text.at
    yield from text.take("<|tool_calls_section_end|>")
