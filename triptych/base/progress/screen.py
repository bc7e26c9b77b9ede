"""What a terminal can do, and the escape sequences that all writers to one terminal agree on.

Bars are below the cursor, and the cursor stays at the beginning of an empty line above them. Whatever another
process prints begins there, and a line of a log first erases what is below: no line is ever mixed with a bar.
rich's own Live leaves the cursor below its bars, where it expects no other process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TextIO

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


def frame(lines: Sequence[str]) -> str:
    """The text that draws these lines below the cursor, which stays where it is."""
    if not lines:
        return CLEAR
    return CLEAR + "".join(f"\n{line}" for line in lines) + f"\r\x1b[{len(lines)}A"
