"""JSON texts within a request, such as a tool call's arguments: bounded as the body that holds them is."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_DEPTH, MAX_OPTIONS_BYTES, MAX_TOOLS_BYTES
from triptych.base.types import prepared
from triptych.proxy.http.json_body import check_values

#: Characters of a text with options, and of one with tools: four times what may be left of them, since white
#: space and escapes go.
MAX_OPTIONS_TEXT = 4 * MAX_OPTIONS_BYTES
MAX_TOOLS_TEXT = 4 * MAX_TOOLS_BYTES
#: Values of one field that takes any JSON: what is done with them afterwards is done at once.
MAX_FIELD_VALUES = 1 << 16
T = TypeVar("T")
_NESTED = (dict, list, tuple)


def decode_text(text: str, kind: type[T], param: str, most: int) -> T:
    """What the text holds. Its size is looked at first, then the number of its values: escapes hid them from
    whoever counted those of the body. InvalidRequest names `param`."""
    if len(text) > most:
        raise InvalidRequest(f"{param} must be at most {most} characters long", param=param)
    check_values(text, param)
    try:
        value = msgspec.json.decode(text, type=prepared(kind))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"{param} holds no such JSON: {error}", param=param) from None
    check_depth(value, param)
    return value


def check_depth(value: object, param: str) -> None:
    """InvalidRequest for lists and objects nested so deep that later readers would fail, or for too many."""
    level, count = [value], 0
    for _ in range(MAX_DEPTH + 1):
        count += len(level)
        if count > MAX_FIELD_VALUES:
            raise InvalidRequest(f"{param} holds more than {MAX_FIELD_VALUES} values: send less", param=param)
        nested = [it for it in level if isinstance(it, _NESTED)]
        if not nested:
            return
        level = [inner for it in nested for inner in (it.values() if isinstance(it, dict) else it)]
    raise InvalidRequest(f"{param} must not be nested deeper than {MAX_DEPTH}", param=param)
