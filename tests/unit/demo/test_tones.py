"""Dialled digits as sound."""

import numpy as np
import pytest

from triptych.demo.tones import DIGITS, RATE, Tone, pitches, play


def loudest(waveform: np.ndarray) -> list[int]:
    """The two strongest frequencies in Hz."""
    power = np.abs(np.fft.rfft(waveform * np.hanning(len(waveform)), RATE)) ** 2
    low, high = power[:1050].argmax(), 1050 + power[1050:2000].argmax()
    return [int(low), int(high)]


def test_every_digit_is_its_own_two_pitches() -> None:
    assert len({pitches(digit) for digit in DIGITS}) == 10
    for digit in DIGITS:
        waveform = play((Tone(digit, 0.1, 0.3),), 0.4)
        assert loudest(waveform[1600:4800]) == pytest.approx(pitches(digit), abs=3)
        assert not waveform[:1600].any() and not waveform[4800:].any()


@pytest.mark.parametrize("text", ["", "*", "12", "a"])
def test_what_is_no_digit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no digit"):
        pitches(text)
