"""Log of events that may come often: the first of a kind at once, those after it as one line a minute."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

SECONDS = 60.0
#: Characters of an event's text in the log.
_SHOWN = 300


class PeriodicLog:
    """The lines of one logger. The caller bounds the number of kinds, and an event costs no line of its own.

    `later` calls a function after so many seconds, as an event loop does.
    """

    def __init__(
        self, logger: logging.Logger, later: Callable[[float, Callable[[], None]], object] | None = None
    ) -> None:
        self._logger = logger
        self._later = later
        #: Of each kind that was logged in the last minute, the events since, and the last one's text.
        self._since: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, text: str, level: int = logging.INFO) -> None:
        """An event; `text` may hold a client's words."""
        if kind in self._since:
            self._since[kind] = self._since[kind][0] + 1, text
        else:
            self._tell(level, kind, text)

    def _tell(self, level: int, kind: str, text: str) -> None:
        shown = "".join(character if character.isprintable() else "?" for character in text[:_SHOWN])
        self._logger.log(level, "%s: %s", kind, shown)
        self._since[kind] = 0, ""
        (self._later or asyncio.get_running_loop().call_later)(
            SECONDS, lambda: self._minute_over(level, kind)
        )

    def _minute_over(self, level: int, kind: str) -> None:
        count, text = self._since.pop(kind)
        if count:
            self._tell(level, kind, f"{count} more in {SECONDS:.0f} s, the last: {text}")
