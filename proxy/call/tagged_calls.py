"""Tool calls whose arguments stand in tags, or in a notation of the family: readers of each form.

Arguments come one by one. Where they are plain text, the function's schema says which are strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from triptych.base.request import MAX_DEPTH
from triptych.proxy.call.call_text import MAX_NAME, CallText, MalformedCall, Reading, Schemas
from triptych.proxy.call.json_calls import calls_until

_QUOTE = '<|"|>'
#: Step's tags have full-width bars, MiniMax-M3's a marker before them.
_BAR = "\uff5c"
_MARK = "]<]minimax[>["


def read_coder(text: CallText, schemas: Schemas) -> Reading[None]:
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
            text.argument(
                key, _typed(_part(schemas.get(name), key), value.removeprefix("\n").removesuffix("\n"))
            )
    text.finish()
    if tag == "</function>":
        yield from text.skip("</tool_call>")


def read_glm(text: CallText, schemas: Schemas) -> Reading[None]:
    """The name, then pairs of <arg_key> and <arg_value>."""
    name, tag = yield from text.until("<arg_key>", "</tool_call>", limit=MAX_NAME)
    text.begin(name := name.strip())
    yield from _read_pairs(text, schemas.get(name), tag)


def _read_pairs(text: CallText, schema: object, tag: str, mark: str = "") -> Reading[None]:
    """Pairs, the first one's key behind `tag`, up to the call's end. All tags end in `mark`."""
    while tag == f"<arg_key{mark}>":
        key, _ = yield from text.until(f"</arg_key{mark}>", limit=MAX_NAME)
        yield from text.take(f"<arg_value{mark}>")
        value, _ = yield from text.until(f"</arg_value{mark}>")
        text.argument(key.strip(), _typed(_part(schema, key.strip()), value))
        _, tag = yield from text.until(f"<arg_key{mark}>", f"</tool_call{mark}>", or_end=True)
    text.finish()


def read_hunyuan(text: CallText, schemas: Schemas) -> Reading[None]:
    """JSON; or <tool_call>NAME<tool_sep> and pairs as GLM writes them, all tags with one mark (Hy3)."""
    mark, _ = yield from text.until(">", limit=MAX_NAME)
    if mark and not mark.startswith(":"):
        raise MalformedCall
    close = f"</tool_calls{mark}>"
    yield from text.blanks()
    if (yield from text.peek()) in "[{":
        yield from calls_until(close)(text, schemas)
        return
    while (yield from text.skip(f"<tool_call{mark}>")):
        name, _ = yield from text.until(f"<tool_sep{mark}>", limit=MAX_NAME)
        text.begin(name := name.strip())
        _, tag = yield from text.until(f"<arg_key{mark}>", f"</tool_call{mark}>", or_end=True)
        yield from _read_pairs(text, schemas.get(name), tag, mark)
    yield from text.take(close)


def read_minimax(text: CallText, schemas: Schemas) -> Reading[None]:
    """MiniMax-M2's: one <invoke> after the other."""
    while (yield from text.skip("<invoke name=")):
        yield from _read_invoke(text, schemas)
    yield from text.take("</minimax:tool_call>")


def read_step(text: CallText, schemas: Schemas) -> Reading[None]:
    """Step-3's: one <steptml:invoke> after the other, each in tags of its own."""
    while (yield from text.skip(f"<{_BAR}tool_call_begin{_BAR}>")):
        yield from text.skip("function")
        yield from text.skip(f"<{_BAR}tool_sep{_BAR}>")
        yield from text.take("<steptml:invoke name=")
        yield from _read_invoke(text, schemas, "steptml:")
        yield from text.skip(f"<{_BAR}tool_call_end{_BAR}>")
        text.used = text.at
        yield from text.skip(f"<{_BAR}tool_sep{_BAR}>")
    yield from text.take(f"<{_BAR}tool_calls_end{_BAR}>")


def _read_invoke(text: CallText, schemas: Schemas, space: str = "") -> Reading[None]:
    """The name, then one <parameter> per argument, in tags of the name space."""
    name = yield from _attribute(text)
    text.begin(name)
    tag = parameter = f"<{space}parameter name="
    while tag == parameter:
        _, tag = yield from text.until(parameter, f"</{space}invoke>", or_end=True)
        if tag == parameter:
            key = yield from _attribute(text)
            value, _ = yield from text.until(f"</{space}parameter>")
            text.argument(key, _typed(_part(schemas.get(name), key), value))
    text.finish()


def _attribute(text: CallText) -> Reading[str]:
    """A tag's last attribute, in quotes, and the tag's end."""
    value, _ = yield from text.until(">", limit=MAX_NAME)
    return value.strip().strip("\"'")


def read_minimax_m3(text: CallText, schemas: Schemas) -> Reading[None]:
    """MiniMax-M3's: a marker before each tag, and an element for each argument, member and item."""
    while (yield from text.skip(f"{_MARK}<invoke name=")):
        name = yield from _attribute(text)
        text.begin(name)
        schema = schemas.get(name)
        tag = _MARK
        while tag:
            _, tag = yield from text.until(_MARK, or_end=True)
            if tag and (yield from text.skip("</invoke>")):
                tag = ""
            elif tag:
                key = yield from _element_name(text)
                text.argument(key, (yield from _element(text, key, _part(schema, key))))
        text.finish()
    yield from text.take(f"{_MARK}</tool_call>")


def _element_name(text: CallText) -> Reading[str]:
    yield from text.take("<")
    key, _ = yield from text.until(">", limit=MAX_NAME)
    return key


def _element(text: CallText, key: str, schema: object, depth: int = 0) -> Reading[str]:
    """The JSON of what stands in an element, and the element's end."""
    if depth > MAX_DEPTH:
        raise MalformedCall
    value, _ = yield from text.until(_MARK)
    keys, values = list[str](), list[str]()
    while not (yield from text.starts("</")):
        keys.append((yield from _element_name(text)))
        values.append((yield from _element(text, keys[-1], _part(schema, keys[-1]), depth + 1)))
        yield from text.until(_MARK)
    yield from text.take(f"</{key}>")
    kind = _type_of(schema)
    if not keys and not (kind in ("object", "array") and not value.strip()):
        return _typed(schema, value)
    if kind == "array" or (kind != "object" and set(keys) == {"item"}):
        return f"[{', '.join(values)}]"
    members = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in zip(keys, values, strict=True))
    return f"{{{', '.join(members)}}}"


def _part(schema: object, key: str) -> object:
    """The schema of one argument, member or item (of any `key`)."""
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else schema.get("items")


def _type_of(schema: object) -> object:
    return schema.get("type") if isinstance(schema, Mapping) else None


def _typed(schema: object, value: str) -> str:
    """The JSON of an argument in plain text: a string where the schema says so, else as it reads."""
    if _type_of(schema) != "string":
        try:
            return json.dumps(msgspec.json.decode(value), ensure_ascii=False)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            pass
    return json.dumps(value, ensure_ascii=False)


def read_gemma(text: CallText, schemas: Schemas) -> Reading[None]:
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
