"""Dialled digits as sound, and which of them are kept from training."""

import io
from dataclasses import replace

import numpy as np
import pytest
import soundfile

from triptych.demo.audio.recordings import WINDOW_SECONDS, held_out, random_digits, random_recording, sound
from triptych.demo.audio.tones import DIGITS, RATE, Tone, pitches, play, tones_file


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


def test_a_file_of_tones_is_one_channel_of_sound_with_the_digits_in_order() -> None:
    waveform, rate = soundfile.read(io.BytesIO(tones_file("507")), dtype="float32")
    assert (rate, waveform.ndim) == (RATE, 1)
    pieces = [waveform[round(start * RATE) :][:2400] for start in (0.4, 0.65, 0.9)]
    assert [loudest(piece) for piece in pieces] == [pytest.approx(pitches(d), abs=4) for d in "507"]
    assert not waveform[: round(0.39 * RATE)].any()


@pytest.mark.parametrize("kept_out", [True, False])
def test_training_and_held_out_recordings_share_no_string(kept_out: bool) -> None:
    random = np.random.default_rng(0)
    digits = [random_digits(random, 3 + index % 6, kept_out=kept_out) for index in range(200)]
    assert {held_out(text) for text in digits} == {kept_out}


def test_recordings_fit_the_window_and_their_keys_follow_each_other() -> None:
    random = np.random.default_rng(1)
    for index in range(100):
        recording = random_recording(random, 3 + index % 6)
        times = [time for tone in recording.tones for time in (tone.start, tone.end)]
        assert times == sorted(times)
        assert times[-1] <= recording.seconds <= WINDOW_SECONDS
        waveform = sound(recording)
        assert len(waveform) == round(recording.seconds * RATE)
        assert np.abs(waveform).max() == pytest.approx(recording.level, rel=1e-4)


@pytest.mark.parametrize("coloured", [True, False])
def test_noise_has_the_power_asked_for(coloured: bool) -> None:
    recording = random_recording(np.random.default_rng(2), 8, snr=10.0)
    clean, noisy = (sound(replace(recording, snr=snr, coloured=coloured)) for snr in (None, 10.0))
    tone = recording.tones[0]
    inside = slice(round(tone.start * RATE) + 100, round(tone.end * RATE) - 100)
    scale = np.dot(noisy[inside], clean[inside]) / np.dot(clean[inside], clean[inside])
    noise = noisy - scale * clean
    ratio = np.mean((scale * clean[inside]) ** 2) / np.mean(noise**2)
    assert 10 * np.log10(ratio) == pytest.approx(10.0, abs=1.5)
