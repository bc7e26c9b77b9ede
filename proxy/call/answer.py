"""One choice's output as clients see it: content and tool calls in order, and why it ended."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from triptych.base.types import FinishReason
from triptych.proxy.call.chat import Delta, Done
from triptych.proxy.call.tool_parser import Piece, make_parser
from triptych.proxy.call.tools import CallForm


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call as clients see it: its place among the choice's calls, and an id to answer to."""

    index: int
    id: str
    name: str
    arguments: str


Shown = str | ShownCall


class ChoiceReader:
    """Finds the tool calls in one choice's output. With `calls` NONE the text passes as it comes."""

    def __init__(self, calls: CallForm = CallForm.NONE, *, parallel: bool = True) -> None:
        self._parser = None if calls is CallForm.NONE else make_parser(calls, parallel=parallel)
        self._calls = 0

    def read(self, delta: Delta) -> list[Shown]:
        """What new output shows; text that may yet be a call is held back."""
        if self._parser is None:
            return [delta.text] if delta.text else []
        return self._shown(self._parser.feed(delta.text))

    def end(self, done: Done) -> tuple[list[Shown], str]:
        """What was held back, and OpenAI's finish reason."""
        rest = self._shown(self._parser.finish()) if self._parser else []
        called = self._calls > 0 and done.reason is FinishReason.STOP
        return rest, "tool_calls" if called else done.reason.value

    def _shown(self, pieces: list[Piece]) -> list[Shown]:
        shown: list[Shown] = []
        for piece in pieces:
            if isinstance(piece, str):
                shown.append(piece)
                continue
            shown.append(ShownCall(self._calls, f"call_{uuid.uuid4().hex[:24]}", piece.name, piece.arguments))
            self._calls += 1
        return shown
