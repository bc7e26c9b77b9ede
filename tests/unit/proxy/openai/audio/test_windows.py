"""How a window's output is cut at its timestamps, against the cases of transformers' sequential rule."""

from __future__ import annotations

import pytest

from triptych.proxy.openai.audio.windows import Heard, Span, Window, hear
from triptych.types import TimestampTokens

TIMES = TimestampTokens(5000, 0.02)
END = 2
FULL = 3000


def at(seconds: float) -> int:
    return TIMES.first + round(seconds / TIMES.seconds)


def cut(window: Window, *ids: int, eos: bool = True) -> Heard:
    return hear(window, [*ids, END] if eos else ids, TIMES, full=FULL, eos=eos)


def shown(heard: Heard) -> list[tuple[float, float, int, int]]:
    return [(round(s.start, 2), round(s.end, 2), s.first, s.last) for s in heard.spans]


MIDDLE = Window(3000, 3000, 9000)
LAST = Window(6000, 1500, 7500)


def test_whole_segments_are_kept_and_the_unfinished_one_is_heard_again() -> None:
    heard = cut(MIDDLE, at(0), 65, 66, at(4), at(4), 67, at(9), at(9.5), 68)
    assert shown(heard) == [(30.0, 34.0, 0, 4), (34.0, 39.0, 4, 8)]
    assert heard.next_start == 3000 + 900


def test_one_timestamp_at_the_end_means_silence_after_it() -> None:
    heard = cut(MIDDLE, at(0), 65, at(4), at(5), 66, at(9))
    assert shown(heard) == [(30.0, 34.0, 0, 3), (35.0, 39.0, 3, 6)]
    assert heard.next_start == 6000


def test_without_a_pair_the_output_is_one_segment_up_to_its_last_timestamp() -> None:
    heard = cut(MIDDLE, at(0), 65, 66, at(7))
    assert shown(heard) == [(30.0, 37.0, 0, 4)]
    assert heard.next_start == 6000


@pytest.mark.parametrize("ids", [(), (65, 66), (at(0), 65)])
def test_without_an_end_a_segment_takes_the_whole_window(ids: tuple[int, ...]) -> None:
    assert shown(cut(MIDDLE, *ids)) == [(30.0, 60.0, 0, len(ids))]


def test_in_the_last_window_the_end_token_counts() -> None:
    heard = cut(LAST, at(0), 65, at(4), at(5), 66, at(9))
    assert shown(heard) == [(60.0, 64.0, 0, 4)]
    assert heard.next_start == 6000 + 400
    whole = cut(LAST, at(0), 65, at(9))
    assert shown(whole) == [(60.0, 69.0, 0, 4)]
    assert whole.next_start == 7500


def test_an_output_that_was_cut_at_its_longest_has_no_end_token() -> None:
    heard = cut(MIDDLE, at(0), 65, at(4), at(4), eos=False)
    assert shown(heard) == [(30.0, 34.0, 0, 4)]
    assert heard.next_start == 3000 + 400


def test_a_window_that_ends_where_it_begins_is_left_behind() -> None:
    heard = cut(MIDDLE, at(0), at(0), 65)
    assert heard.next_start == 6000


def test_a_span_holds_its_own_tokens() -> None:
    assert hear(Window(0, 200, 200), [65], TIMES, full=FULL, eos=False) == Heard((Span(0.0, 2.0, 0, 1),), 200)
