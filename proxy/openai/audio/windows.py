"""Sequential long-form transcription, as in transformers: a window's segments, and the next window. Pure.

A window's output is split into segments at its timestamp tokens. The next window begins where the last
complete segment ends, so audio after it is transcribed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.types import TimestampTokens

#: Seconds of one feature frame, the same for all Whisper models.
FRAME_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Window:
    """A window of an audio file in feature frames: its first frame, its length, and the file's length."""

    start: int
    frames: int
    total: int

    @property
    def seconds(self) -> float:
        """Offset of the window in the file."""
        return self.start * FRAME_SECONDS


@dataclass(frozen=True, slots=True)
class Span:
    """A segment: start and end in the file in seconds, and its tokens [first, last) in the output."""

    start: float
    end: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class WindowSegments:
    """The segments of one window, and the first frame of the next window."""

    spans: tuple[Span, ...]
    next_start: int


def segment_window(
    window: Window, token_ids: Sequence[int], times: TimestampTokens, *, full: int, eos: bool
) -> WindowSegments:
    """Splits a window's output at its timestamp tokens.

    `full` is the length of a complete window in frames; `eos` says that the last token is end-of-sequence.
    As in transformers, that token belongs to a segment in the last window only.
    """
    final = window.start + full >= window.total
    ids = list(token_ids[:-1] if eos and not final else token_ids)
    is_time = [token >= times.first for token in ids]
    pairs = [index + 1 for index in range(len(ids) - 1) if is_time[index] and is_time[index + 1]]
    if not pairs:
        return WindowSegments((_whole(window, ids, is_time, times),), window.start + window.frames)
    alone = is_time[-2:] == [False, True]
    cuts = [*pairs, len(ids)] if alone else [*pairs[:-1], pairs[-1] + 1]
    spans, first = [], 0
    for cut in cuts:
        last = ids[cut - 1] if cut != cuts[-1] or alone else ids[cut - 2]
        spans.append(Span(_seconds(window, ids[first], times), _seconds(window, last, times), first, cut))
        first = cut
    if alone:
        return WindowSegments(tuple(spans), window.start + window.frames)
    steps = ids[first - 2] - times.first
    ahead = round(steps * times.seconds / FRAME_SECONDS)
    # A last timestamp of 0 would repeat this window for ever.
    return WindowSegments(tuple(spans), window.start + (ahead if ahead > 0 else window.frames))


def _whole(window: Window, ids: list[int], is_time: list[bool], times: TimestampTokens) -> Span:
    """The whole output as one segment, which ends at the last timestamp token if there is one."""
    end = window.seconds + window.frames * FRAME_SECONDS
    stamps = [token for token, time in zip(ids, is_time, strict=True) if time]
    if stamps and stamps[-1] != times.first:
        end = _seconds(window, stamps[-1], times)
    return Span(window.seconds, end, 0, len(ids))


def _seconds(window: Window, token: int, times: TimestampTokens) -> float:
    return window.seconds + (token - times.first) * times.seconds
