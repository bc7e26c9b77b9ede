"""What a parser of tool calls gives, joined: content as texts, calls as pairs of name and arguments."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.proxy.call.call_text import CallArguments, CallStart
from triptych.proxy.call.tool_formats import Piece


def joined(pieces: Iterable[Piece]) -> list[object]:
    """Neighbouring content and a call's arguments are each one string."""
    parts: list[object] = []
    for piece in pieces:
        last = parts[-1] if parts else None
        if isinstance(piece, CallStart):
            parts.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert isinstance(last, tuple), "arguments follow their call's start"
            parts[-1] = (last[0], last[1] + piece.text)
        elif isinstance(last, str):
            parts[-1] = last + piece
        else:
            parts.append(piece)
    return parts
