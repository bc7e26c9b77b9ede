"""Log of events that may come often: the first of a kind at once, those after it as one line a minute."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = 60.0
#: Characters of an event's text in the log.
_SHOWN = 300


@dataclass(slots=True)
class _Kind:
    """The events of one kind since its last line."""

    level: int
    count: int = 0
    text: str = ""


class PeriodicLog:
    """The lines of one logger. The caller bounds the number of kinds; an event costs no line of its own.

    `later` calls a function after so many seconds, as an event loop does.
    """

    def __init__(
        self, logger: logging.Logger, later: Callable[[float, Callable[[], None]], object] | None = None
    ) -> None:
        self._logger = logger
        self._later = later
        self._kinds: dict[str, _Kind] = {}

    def add(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """An event; `text` may hold a client's words."""
        known = self._kinds.get(kind)
        if known is None:
            self._logger.log(level, "%s: %s", kind, _shown(text))
            self._wait(kind, level)
        else:
            known.count, known.text = known.count + 1, text

    def _wait(self, kind: str, level: int) -> None:
        self._kinds[kind] = _Kind(level)
        later = self._later or asyncio.get_running_loop().call_later
        later(SECONDS, lambda: self._tell(kind))

    def _tell(self, kind: str) -> None:
        known = self._kinds.pop(kind)
        if known.count:
            self._logger.log(
                known.level,
                "%s: %d more in %.0f s, the last: %s",
                kind,
                known.count,
                SECONDS,
                _shown(known.text),
            )
            self._wait(kind, known.level)


def _shown(text: str) -> str:
    """The text in one line of printable characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:_SHOWN])
