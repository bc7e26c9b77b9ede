"""Random recordings, and which of them are kept from training."""

from dataclasses import replace

import numpy as np
import pytest

from examples.demo_models.audio.recordings import (
    WINDOW_SECONDS,
    held_out,
    random_digits,
    random_recording,
    sound,
)
from triptych.demo.tones import RATE


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
