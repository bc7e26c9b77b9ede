"""Names of a chat request's fields turned into those of the request that it was made from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from triptych.base.errors import RequestError

#: A message, and a field of it that has a place of its own in some APIs.
_MESSAGE = re.compile(
    r"((messages\[\d+\])(?:\.content)?)(?:\[\d+\]\.image_url\b|\.tool_calls\[\d+\]\.function\.arguments)?"
)


class FieldNames:
    """`places` has the client's path of every message, and of fields of messages; `names` what others are
    called, in the order in which they are looked for."""

    def __init__(self, places: Mapping[str, str], names: Sequence[tuple[re.Pattern[str], str]]) -> None:
        self._places = places
        self._names = names

    def translated(self, error: RequestError) -> RequestError:
        param = error.param and self.of(error.param)
        return type(error)(self.of(error.message), param=param, retry_after=error.retry_after)

    def of(self, text: str) -> str:
        """`text` with the paths of chat fields replaced."""
        text = _MESSAGE.sub(self._place, text)
        for pattern, name in self._names:
            text = pattern.sub(name, text)
        return text

    def _place(self, match: re.Match[str]) -> str:
        """The longest part of the path that has a place, led back to it."""
        path = match[0]
        known = next((name for name in (path, match[1], match[2]) if name in self._places), "")
        return self._places[known] + path[len(known) :] if known else path
