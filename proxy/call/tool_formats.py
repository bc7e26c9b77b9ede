"""The forms in which model families write tool calls, by vLLM's names of their parsers."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.proxy.call import json_calls, pythonic_calls, tagged_calls
from triptych.proxy.call.call_text import (
    MAX_CALLS,
    CallArguments,
    CallStart,
    CallText,
    EndOfText,
    MalformedCall,
    Reader,
    Reading,
    Schemas,
)
from triptych.proxy.call.tools import CallForm


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls begin with one of `opens`; `first`: only at the output's begin, and the reader reads it, too."""

    opens: tuple[str, ...]
    read: Reader
    first: bool = False


#: A forced call: the whole output is one call, or a list of calls, as JSON.
FORCED = ToolFormat(("{", "["), json_calls.read_list, first=True)
_HERMES = ToolFormat(("<tool_call>",), json_calls.read_hermes)
_HUNYUAN = ToolFormat(("<tool_calls",), tagged_calls.read_hunyuan)
FORMATS = {
    "hermes": _HERMES,
    "ernie45": _HERMES,
    "qwen3_coder": ToolFormat(("<tool_call>",), tagged_calls.read_coder),
    "glm45": ToolFormat(("<tool_call>",), tagged_calls.read_glm),
    "gemma4": ToolFormat(("<|tool_call>",), tagged_calls.read_gemma),
    "minimax_m2": ToolFormat(("<minimax:tool_call>",), tagged_calls.read_minimax),
    "minimax_m3": ToolFormat(("]<]minimax[>[<tool_call>",), tagged_calls.read_minimax_m3),
    "step3": ToolFormat(("<\uff5ctool_calls_begin\uff5c>",), tagged_calls.read_step),
    "hunyuan_a13b": _HUNYUAN,
    "hy_v3": _HUNYUAN,
    "kimi_k2": ToolFormat(("<|tool_calls_section_begin|>",), json_calls.read_kimi),
    "cohere_command3": ToolFormat(("<|START_ACTION|>",), json_calls.calls_until("<|END_ACTION|>")),
    "nemotron_json": ToolFormat(("<TOOLCALL>",), json_calls.calls_until("</TOOLCALL>")),
    "mistral": ToolFormat(("[TOOL_CALLS]",), json_calls.read_mistral),
    "llama3_json": ToolFormat(("<|python_tag|>", "{"), json_calls.read_llama, first=True),
    "lfm2": ToolFormat(("<|tool_call_start|>",), pythonic_calls.read_lfm),
    "pythonic": ToolFormat(("[",), pythonic_calls.read_pythonic, first=True),
}


#: White space before a call belongs to it, up to this many characters.
MAX_BLANKS = 64

Piece = str | CallStart | CallArguments


def make_parser(
    form: CallForm, *, parallel: bool, tool_format: str = "", schemas: Schemas | None = None
) -> ToolParser:
    """The parser of a model's `tool_format`, one of FORMATS; Hermes' where it names none."""
    if form is CallForm.JSON:
        return ToolParser(FORCED, {}, MAX_CALLS)
    named = FORMATS.get(tool_format, FORMATS["hermes"])
    return ToolParser(named, schemas or {}, MAX_CALLS if parallel else 1)


class ToolParser:
    """Takes the output's text piece by piece; gives content and at most `limit` calls, in order.

    Text without a name and the begin of arguments is content, as is the rest of a call that is malformed.
    """

    def __init__(self, tool_format: ToolFormat, schemas: Schemas, limit: int) -> None:
        self._format = tool_format
        self._schemas = schemas
        self._left = limit
        #: Text that may yet belong to a call.
        self._buffer = ""
        self._after_call = False
        #: No call can come any more.
        self._content_only = False
        #: What stands before the text of the call that is being read, and is content if it is none.
        self._opening = ""
        self._call: tuple[CallText, Reading[None]] | None = None
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        return self._advance(text, final=False)

    def finish(self) -> list[Piece]:
        """The rest, once no more text comes; a call that lacks only its closing tag counts."""
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> list[Piece]:
        self._pieces = []
        if self._call is None:
            self._buffer += text
        else:
            self._call[0].add(text)
        while self._call_step(*self._call, final) if self._call else self._content_step(final):
            pass
        return self._pieces

    def _content_step(self, final: bool) -> bool:
        """Takes text up to a call's begin; whether there may be more to do."""
        if self._after_call:
            self._buffer = self._buffer.lstrip()
        keep = 0
        if not (self._content_only or self._left <= 0):
            if self._begin_first() if self._format.first else self._begin_anywhere():
                return True
            keep = 0 if final or self._content_only else self._undecided()
        self._put(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _begin_first(self) -> bool:
        """Whether the output begins with a call."""
        start = self._buffer.lstrip()
        if any(start.startswith(tag) for tag in self._format.opens):
            self._begin(len(self._buffer) - len(start), "")
            return True
        self._content_only = not any(tag.startswith(start) for tag in self._format.opens)
        return False

    def _begin_anywhere(self) -> bool:
        [tag] = self._format.opens
        if (at := self._buffer.find(tag)) < 0:
            return False
        self._begin(at, tag)
        return True

    def _begin(self, at: int, tag: str) -> None:
        blanks = _blanks_before(self._buffer, at)
        self._put(self._buffer[: at - blanks])
        self._opening = self._buffer[at - blanks : at] + tag
        text = CallText(self._buffer[at + len(tag) :], self._left)
        self._buffer = ""
        self._call = text, self._format.read(text, self._schemas)

    def _undecided(self) -> int:
        """Characters at the end that may yet belong to a call: the beginning of a tag, white space."""
        buffer, opens = self._buffer, self._format.opens
        partial = len(buffer.lstrip()) if self._format.first else _begun(buffer, opens[0])
        return partial + _blanks_before(buffer, len(buffer) - partial)

    def _call_step(self, text: CallText, reading: Reading[None], final: bool) -> bool:
        """Reads on in a call; whether it has ended."""
        text.final = final
        try:
            next(reading)
        except StopIteration:
            rest = text.text[text.at :]
        except EndOfText:
            text.cut_off()
            rest = ""
        except MalformedCall:
            text.stop()
            rest = text.text[text.used :]
        else:
            self._report(text)
            return False
        self._report(text)
        self._call = None
        self._left -= text.calls
        self._after_call = text.calls > 0
        self._content_only = self._format.first
        if not text.calls:
            # The tag was mere text; what follows it may hold calls.
            self._put(self._opening)
            rest = text.text
        self._buffer = rest
        return True

    def _report(self, text: CallText) -> None:
        """Takes over what has been read; a call's arguments that came together are one piece."""
        parts = list[str]()
        for piece in [*text.pieces, None]:
            if isinstance(piece, CallArguments):
                parts.append(piece.text)
                continue
            if parts:
                self._pieces.append(CallArguments("".join(parts)))
                parts = []
            if piece is not None:
                self._pieces.append(piece)
        text.pieces = []

    def _put(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._after_call = False


def _blanks_before(text: str, end: int) -> int:
    """White space that may belong to a call at `end`: bounded, so that a run of it is held but once."""
    tail = text[max(end - MAX_BLANKS, 0) : end]
    return len(tail) - len(tail.rstrip())


def _begun(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag` without being all of it."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
