from __future__ import annotations

from triptych.proxy.admission import MIN_LOSSES, WINDOW_SECONDS, Backpressure


def losing(**options: bool) -> Backpressure:
    """A fifth of the encoder work is done again."""
    pressure = Backpressure(**options)
    for number in range(5 * MIN_LOSSES):
        pressure.record(1.0, 0.0, re_encode=number % 5 == 0)
    return pressure


def test_new_media_are_refused_while_too_much_is_encoded_again() -> None:
    assert losing().refuses_media(1.0)


def test_a_tenth_is_not_too_much() -> None:
    pressure = Backpressure()
    for number in range(10 * MIN_LOSSES):
        pressure.record(1.0, 0.0, re_encode=number % 10 == 0)
    assert not pressure.refuses_media(1.0)


def test_what_was_lost_before_the_window_counts_no_more() -> None:
    assert not losing().refuses_media(WINDOW_SECONDS + 1.0)


def test_a_few_losses_alone_say_nothing() -> None:
    pressure = Backpressure()
    for _ in range(MIN_LOSSES - 1):
        pressure.record(1.0, 0.0, re_encode=True)
    assert not pressure.refuses_media(1.0)


def test_without_flow_control_nothing_is_refused() -> None:
    assert not losing(flow_control=False).refuses_media(1.0)
