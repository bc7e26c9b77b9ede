"""One choice's output as clients see it: reasoning, content, tool calls in order, and why it ended."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.delta import Delta
from triptych.base.types import FinishReason, ReasoningMarkers
from triptych.proxy.call.call_text import CallArguments
from triptych.proxy.call.chat import Admitted, Done
from triptych.proxy.call.tool_formats import Piece, ToolParser, make_parser
from triptych.proxy.call.tools import NO_TOOLS, CallForm, ToolUse


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins: its place among the choice's calls, and an id to answer to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next piece of the arguments of the call at `index`, the last one."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Reasoning, which comes before content and calls."""

    text: str


AnswerPiece = str | CallBegin | CallPiece | ReasoningPiece


def whole_calls(pieces: Sequence[AnswerPiece]) -> list[tuple[CallBegin, str]]:
    """The calls with all of their arguments."""
    calls = [piece for piece in pieces if isinstance(piece, CallBegin)]
    parts: dict[int, list[str]] = {call.index: [] for call in calls}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            parts[piece.index].append(piece.text)
    return [(call, "".join(parts[call.index])) for call in calls]


class ChoiceReader:
    """Finds reasoning and calls of `tools` in one choice's output; without tools, the answer is its text.

    `reasoning_tokens` counts the tokens whose text is reasoning; with `reasoning` False it is left out.
    """

    def __init__(self, tools: ToolUse = NO_TOOLS, *, reasoning: bool = True) -> None:
        self._tools = tools
        self._parser = self._make_parser("")
        self._calls = 0
        self._splitter: ReasoningSplitter | None = None
        self._with_reasoning = reasoning
        self.reasoning_tokens = 0

    def begin(self, started: Admitted) -> None:
        """The output comes as `started` says: with reasoning or not, with calls in its model's form."""
        if started.HasField("reasoning"):
            form = started.reasoning
            markers = ReasoningMarkers(form.start, form.end, form.label, form.begun)
            self._splitter = ReasoningSplitter(markers)
        if started.tool_format:
            self._parser = self._make_parser(started.tool_format)

    def _make_parser(self, tool_format: str) -> ToolParser | None:
        if self._tools.form is CallForm.NONE:
            return None
        return make_parser(
            self._tools.form,
            parallel=self._tools.parallel,
            tool_format=tool_format,
            schemas=self._tools.schemas,
        )

    @property
    def plain(self) -> bool:
        """Whether all further text is content as it comes."""
        return self._parser is None and (self._splitter is None or self._splitter.answers)

    def read(self, delta: Delta) -> list[AnswerPiece]:
        """What new output adds; text that may yet be a marker or a call is held back."""
        text, pieces = delta.text, list[AnswerPiece]()
        if self._splitter is not None and not self._splitter.answers:
            reasoning, text = self._splitter.feed(text)
            if reasoning or self._splitter.reasons:
                self.reasoning_tokens += len(delta.token_ids)
            pieces = self._reasoning(reasoning)
        if self._parser is not None:
            return pieces + self._numbered(self._parser.feed(text))
        return [*pieces, text] if text else pieces

    def end(self, done: Done) -> tuple[list[AnswerPiece], str]:
        """What was held back, and OpenAI's finish reason."""
        reasoning, text = self._splitter.finish() if self._splitter is not None else ("", "")
        rest = self._reasoning(reasoning)
        if self._parser is not None:
            rest += self._numbered(self._parser.feed(text)) + self._numbered(self._parser.finish())
        elif text:
            rest.append(text)
        called = self._calls > 0 and done.reason is FinishReason.STOP
        return rest, "tool_calls" if called else done.reason.value

    def _reasoning(self, text: str) -> list[AnswerPiece]:
        return [ReasoningPiece(text)] if text and self._with_reasoning else []

    def _numbered(self, pieces: list[Piece]) -> list[AnswerPiece]:
        """The parser's pieces with the places and ids of calls."""
        numbered: list[AnswerPiece] = []
        for piece in pieces:
            if isinstance(piece, str):
                numbered.append(piece)
            elif isinstance(piece, CallArguments):
                numbered.append(CallPiece(self._calls - 1, piece.text))
            else:
                numbered.append(CallBegin(self._calls, f"call_{uuid.uuid4().hex[:24]}", piece.name))
                self._calls += 1
        return numbered


#: So much white space may stand before the start marker, and so many line breaks before the end marker.
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
        self._buffer = text
        if final or (text and not (label.startswith(text) and text != label)):
            self._place, self._buffer = _Place.REASONING, text.removeprefix(label)

    def _take_reasoning(self, final: bool) -> str:
        """The reasoning up to its end marker, or up to what may yet be line breaks and that marker."""
        end, text = self._markers.end, self._buffer
        at = text.find(end)
        if at >= 0:
            self._place, self._buffer = _Place.BREAK, text[at + len(end) :]
            return _without_breaks(text[:at])
        keep = 0 if final else next((n for n in range(len(end) - 1, 0, -1) if text.endswith(end[:n])), 0)
        certain = text[: len(text) - keep]
        if not final:
            certain = _without_breaks(certain)
        self._buffer = text[len(certain) :]
        return certain


def _without_breaks(text: str) -> str:
    """Bounded, so that a run of line breaks is held back but once."""
    kept, tail = text[:-_MAX_BLANKS], text[-_MAX_BLANKS:]
    return kept + tail.rstrip("\n")
