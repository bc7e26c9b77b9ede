"""The reasoning in one choice's output, told from its answer by the markers that its PD worker names."""

from __future__ import annotations

import enum

from triptych.base.types import ReasoningMarkers

#: So much white space may stand before the start marker.
_MAX_BLANKS = 64


class _Place(enum.Enum):
    BEFORE = enum.auto()
    LABEL = enum.auto()
    REASONING = enum.auto()
    BREAK = enum.auto()
    ANSWER = enum.auto()


class ReasoningSplitter:
    """Takes the output's text piece by piece and gives its reasoning and its answer.

    The markers, and the line breaks beside them, are part of neither. An output that does not begin with
    reasoning is all answer, whatever markers it holds.
    """

    def __init__(self, markers: ReasoningMarkers) -> None:
        self._markers = markers
        self._place = _Place.LABEL if markers.begun else _Place.BEFORE
        #: Text that is not decided yet.
        self._buffer = ""

    @property
    def reasons(self) -> bool:
        """Whether new text would be reasoning."""
        return self._place in (_Place.LABEL, _Place.REASONING)

    @property
    def answers(self) -> bool:
        """Whether all further text is the answer's, and none is held back."""
        return self._place is _Place.ANSWER

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are certain now."""
        return self._split(text, final=False)

    def finish(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
        return self._split("", final=True)

    def _split(self, text: str, *, final: bool) -> tuple[str, str]:
        if self._place is _Place.ANSWER:
            return "", text
        self._buffer += text
        if self._place is _Place.BEFORE:
            self._find_start(final)
        if self._place is _Place.LABEL:
            self._drop_label(final)
        reasoning = self._take_reasoning(final) if self._place is _Place.REASONING else ""
        if self._place is _Place.BREAK:
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._place = _Place.ANSWER
        if self._place is not _Place.ANSWER:
            return reasoning, ""
        answer, self._buffer = self._buffer, ""
        return reasoning, answer

    def _find_start(self, final: bool) -> None:
        start, text = self._markers.start, self._buffer.lstrip()
        blanks = len(self._buffer) - len(text)
        if text.startswith(start):
            self._place, self._buffer = _Place.LABEL, text[len(start) :]
        elif final or blanks > _MAX_BLANKS or not start.startswith(text):
            self._place = _Place.ANSWER

    def _drop_label(self, final: bool) -> None:
        label, text = self._markers.label, self._buffer.lstrip("\n")
        if final or (text and not (label.startswith(text) and text != label)):
            self._place, self._buffer = _Place.REASONING, text.removeprefix(label)

    def _take_reasoning(self, final: bool) -> str:
        """The reasoning up to its end marker, or up to what may yet be line breaks and that marker."""
        end, text = self._markers.end, self._buffer
        at = text.find(end)
        if at >= 0:
            self._place, self._buffer = _Place.BREAK, text[at + len(end) :]
            return text[:at].rstrip("\n")
        keep = 0 if final else next((n for n in range(len(end) - 1, 0, -1) if text.endswith(end[:n])), 0)
        certain = text[: len(text) - keep]
        if not final:
            certain = certain.rstrip("\n")
        self._buffer = text[len(certain) :]
        return certain
