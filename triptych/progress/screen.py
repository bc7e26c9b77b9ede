"""What a terminal can do, and the escape sequences that all writers to one terminal agree on.

Bars are below the cursor, and the cursor stays at the beginning of an empty line above them. Whatever another
process prints begins there, and a line of a log first erases what is below: no line is ever mixed with a bar.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from triptych.progress.text import TerminalStyle

#: To the beginning of the line, and nothing from there on.
CLEAR = "\r\x1b[J"


def can_draw(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the stream is a terminal that moves its cursor."""
    try:
        terminal = stream.isatty()
    except ValueError:
        # It is closed.
        return False
    return terminal and environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def style_of(stream: TextIO, environ: Mapping[str, str] = os.environ) -> TerminalStyle:
    """Its characters by the stream's encoding; colours unless NO_COLOR is set."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return TerminalStyle(unicode=encoding.startswith("utf"), colour=not environ.get("NO_COLOR"))


def frame(lines: Sequence[str]) -> str:
    """The text that draws these lines below the cursor, which stays where it is."""
    if not lines:
        return CLEAR
    return CLEAR + "".join(f"\n{line}" for line in lines) + f"\r\x1b[{len(lines)}A"
