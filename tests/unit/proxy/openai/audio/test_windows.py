"""How a window's output is cut at its timestamps, against the cases of transformers' sequential rule."""

from __future__ import annotations

import pytest

from triptych.base.types import TimestampTokens
from triptych.proxy.openai.audio.transcriber import Span, Window, WindowSegments, segment_window

TIMES = TimestampTokens(5000, 0.02)
END = 2
FULL = 3000


def at(seconds: float) -> int:
    return TIMES.first + round(seconds / TIMES.seconds)


def cut(window: Window, *ids: int, eos: bool = True) -> WindowSegments:
    return segment_window(window, [*ids, END] if eos else ids, TIMES, full=FULL, eos=eos)


def shown(found: WindowSegments) -> list[tuple[float, float, int, int]]:
    return [(round(s.start, 2), round(s.end, 2), s.first, s.last) for s in found.spans]


MIDDLE = Window(3000, 3000, 9000)
LAST = Window(6000, 1500, 7500)


def test_the_next_window_begins_where_the_last_complete_segment_ends() -> None:
    found = cut(MIDDLE, at(0), 65, 66, at(4), at(4), 67, at(9), at(9.5), 68)
    assert shown(found) == [(30.0, 34.0, 0, 4), (34.0, 39.0, 4, 8)]
    assert found.next_start == 3000 + 900


def test_a_single_timestamp_at_the_end_means_that_silence_follows() -> None:
    found = cut(MIDDLE, at(0), 65, at(4), at(5), 66, at(9))
    assert shown(found) == [(30.0, 34.0, 0, 3), (35.0, 39.0, 3, 6)]
    assert found.next_start == 6000


def test_without_a_pair_of_timestamps_the_output_is_one_segment_up_to_the_last_one() -> None:
    found = cut(MIDDLE, at(0), 65, 66, at(7))
    assert shown(found) == [(30.0, 37.0, 0, 4)]
    assert found.next_start == 6000


@pytest.mark.parametrize("ids", [(), (65, 66), (at(0), 65)])
def test_a_segment_without_an_end_timestamp_lasts_for_the_whole_window(ids: tuple[int, ...]) -> None:
    assert shown(cut(MIDDLE, *ids)) == [(30.0, 60.0, 0, len(ids))]


def test_the_end_token_belongs_to_a_segment_in_the_last_window() -> None:
    found = cut(LAST, at(0), 65, at(4), at(5), 66, at(9))
    assert shown(found) == [(60.0, 64.0, 0, 4)]
    assert found.next_start == 6000 + 400
    whole = cut(LAST, at(0), 65, at(9))
    assert shown(whole) == [(60.0, 69.0, 0, 4)]
    assert whole.next_start == 7500


def test_an_output_that_reached_max_tokens_has_no_end_token() -> None:
    found = cut(MIDDLE, at(0), 65, at(4), at(4), eos=False)
    assert shown(found) == [(30.0, 34.0, 0, 4)]
    assert found.next_start == 3000 + 400


def test_a_window_whose_last_timestamp_is_zero_is_not_repeated() -> None:
    found = cut(MIDDLE, at(0), at(0), 65)
    assert found.next_start == 6000


def test_a_segment_holds_the_range_of_its_tokens() -> None:
    assert segment_window(Window(0, 200, 200), [65], TIMES, full=FULL, eos=False) == WindowSegments(
        (Span(0.0, 2.0, 0, 1),), 200
    )
