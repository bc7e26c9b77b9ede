"""The input items of a Responses request as messages of OpenAI's chat API, and back to their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from triptych.base.errors import InvalidRequest, RequestError

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_MESSAGE = re.compile(r"messages\[(\d+)\]")
#: Names of chat fields and what they are called here, in the order in which they are looked for.
_NAMES = (
    (re.compile(r"\.image_url\.url\b"), ".image_url"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
)


class FieldNames:
    """Names fields of the chat request by those of the client's; `places` has one path per message."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places

    def translated(self, error: RequestError) -> RequestError:
        param = error.param and self.of(error.param)
        return type(error)(self.of(error.message), param=param, retry_after=error.retry_after)

    def of(self, text: str) -> str:
        """`text` with the paths of chat fields replaced."""
        text = _MESSAGE.sub(self._place, text)
        for pattern, name in _NAMES:
            text = pattern.sub(name, text)
        return text

    def _place(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return self._places[index] if index < len(self._places) else match[0]


class Conversation:
    """Collects items; `messages` are OpenAI's chat messages, `places` the path of each."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def take(self, item: Any, place: str) -> None:
        """One input item. InvalidRequest when it is of a kind that is not served."""
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{place} must be an object", param=place)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, place)
        elif kind == "function_call":
            self._call(item, place)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{place}.output", flat=True)
            call_id = _string(item, "call_id", place)
            self.add({"role": "tool", "tool_call_id": call_id, "content": content}, place)
        elif kind != "reasoning":
            known = "message, function_call, function_call_output or reasoning"
            raise InvalidRequest(f"{place}.type must be {known}", param=f"{place}.type")

    def _message(self, item: Mapping[str, Any], place: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidRequest(f"{place}.role must be one of {', '.join(_ROLES)}", param=f"{place}.role")
        content = _content(item.get("content"), f"{place}.content", flat=role != "user")
        self.add({"role": role, "content": content}, place)

    def _call(self, item: Mapping[str, Any], place: str) -> None:
        """Calls belong to the assistant's message before them."""
        function = {
            "name": _string(item, "name", place),
            "arguments": _string(item, "arguments", place),
        }
        call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
        if not (self.messages and self.messages[-1]["role"] == "assistant"):
            self.add({"role": "assistant", "content": ""}, place)
        self.messages[-1].setdefault("tool_calls", []).append(call)


def _string(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}.{name} must be a string", param=f"{place}.{name}")
    return value


def _content(content: Any, place: str, *, flat: bool) -> Any:
    """A message's content; `flat`: texts alone become one string, as templates expect of these roles."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{place} must be a string or a list of parts", param=place)
    parts = [_part(part, f"{place}[{at}]") for at, part in enumerate(content)]
    if flat and all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, place: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and (field := _TEXT_PARTS.get(kind)):
        return {"type": "text", "text": _string(part, field, place)}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise InvalidRequest(
                f"{place}.file_id is not supported: send the image as image_url", param=f"{place}.file_id"
            )
        url = _string(part, "image_url", place)
        return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
    raise InvalidRequest(
        f"{place}.type must be input_text, input_image, output_text or refusal", param=f"{place}.type"
    )
