"""Where a window of audio ends, and what was said in it: transformers' sequential long form, as decisions.

A window's output is cut into segments at its timestamps. What follows the last whole segment is heard again
as the beginning of the next window. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.types import TimestampTokens

#: Seconds of one frame of features; of all Whisper models.
FRAME_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Window:
    """Frames of a file: where the window begins, how many there are of it, and of the whole file."""

    start: int
    frames: int
    total: int

    @property
    def seconds(self) -> float:
        """When the window begins."""
        return self.start * FRAME_SECONDS


@dataclass(frozen=True, slots=True)
class Span:
    """One segment: seconds from the file's start, and its tokens [first, end) of the window's output."""

    start: float
    end: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A window's segments, and the frame where the next window begins."""

    spans: tuple[Span, ...]
    next_start: int


def hear(window: Window, token_ids: Sequence[int], times: TimestampTokens, *, full: int, eos: bool) -> Heard:
    """Cuts the output at its timestamps. `full`: frames of a whole window; `eos`: the last token ends it.

    The end token counts in the last window alone, as transformers has it.
    """
    final = window.start + full >= window.total
    ids = list(token_ids[:-1] if eos and not final else token_ids)
    is_time = [token >= times.first for token in ids]
    pairs = [index + 1 for index in range(len(ids) - 1) if is_time[index] and is_time[index + 1]]
    if not pairs:
        return Heard((_whole(window, ids, is_time, times),), window.start + window.frames)
    alone = is_time[-2:] == [False, True]
    cuts = [*pairs, len(ids)] if alone else [*pairs[:-1], pairs[-1] + 1]
    spans, first = [], 0
    for cut in cuts:
        last = ids[cut - 1] if cut != cuts[-1] or alone else ids[cut - 2]
        spans.append(Span(_seconds(window, ids[first], times), _seconds(window, last, times), first, cut))
        first = cut
    if alone:
        return Heard(tuple(spans), window.start + window.frames)
    steps = ids[first - 2] - times.first
    ahead = round(steps * times.seconds / FRAME_SECONDS)
    # A window that hears nothing before its own start must not be heard for ever.
    return Heard(tuple(spans), window.start + (ahead if ahead > 0 else window.frames))


def _whole(window: Window, ids: list[int], is_time: list[bool], times: TimestampTokens) -> Span:
    """The output as one segment, up to its last timestamp if it has one."""
    end = window.seconds + window.frames * FRAME_SECONDS
    said = [token for token, time in zip(ids, is_time, strict=True) if time]
    if said and said[-1] != times.first:
        end = _seconds(window, said[-1], times)
    return Span(window.seconds, end, 0, len(ids))


def _seconds(window: Window, token: int, times: TimestampTokens) -> float:
    return window.seconds + (token - times.first) * times.seconds
