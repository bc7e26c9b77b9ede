"""Audio files become mono waveforms at the model's rate, or an error that names the field."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from support.data.sounds import audio_file, sound, tone
from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media.audio import AudioLimits, MediaAudio, decode_audio

LIMITS = AudioLimits(seconds=60.0)
RATE = 16_000


def refused(data: bytes, limits: AudioLimits = LIMITS) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        decode_audio(data, RATE, limits)
    assert raised.value.param == "audio"
    assert raised.value.message.startswith("audio: ")
    return raised.value


def loudest(waveform: np.ndarray) -> float:
    """The strongest frequency in Hz of a second or more."""
    spectrum = np.abs(np.fft.rfft(waveform))
    return float(np.argmax(spectrum) * RATE / len(waveform))


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_survives_every_format_and_rate(kind: str, rate: int) -> None:
    waveform = decode_audio(audio_file(tone(2.0, 440.0, rate=rate), rate, kind), RATE, LIMITS)
    assert waveform.dtype == np.float32
    assert abs(len(waveform) - 2 * RATE) < RATE // 5  # MP3 pads its ends
    assert abs(loudest(waveform) - 440.0) < 2.0


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_samples_at_the_models_rate_are_the_files_own(kind: str) -> None:
    wanted = sound(9.0, seed=1).clip(-1, 1)
    waveform = decode_audio(audio_file(wanted, RATE, kind, subtype="PCM_24"), RATE, LIMITS)
    np.testing.assert_allclose(waveform, wanted, atol=1e-6)


def test_two_channels_become_their_mean() -> None:
    left, right = tone(0.5, 300.0), tone(0.5, 900.0)
    stereo = np.stack([left, right], axis=1)
    waveform = decode_audio(audio_file(stereo, RATE, "WAV", subtype="FLOAT"), RATE, LIMITS)
    np.testing.assert_allclose(waveform, (left + right) / 2, atol=1e-6)


def test_silence_is_sound() -> None:
    waveform = decode_audio(audio_file(np.zeros(RATE, dtype=np.float32), RATE, "WAV"), RATE, LIMITS)
    assert len(waveform) == RATE
    assert not waveform.any()


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_a_file_without_a_sample_is_refused(kind: str) -> None:
    error = refused(audio_file(np.zeros(0, dtype=np.float32), RATE, kind))
    assert error.status == 400


@pytest.mark.parametrize(
    "data", [b"", b"not a sound", b"\x89PNG\r\n", b"RIFF\0\0\0\0AVI ", b"FORM\0\0\0\0AIFF", b"caff\0\1\0\0"]
)
def test_other_bytes_are_refused_with_the_formats_named(data: bytes) -> None:
    assert "send one of these formats" in refused(data).message


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_a_file_whose_head_is_damaged_is_refused(kind: str) -> None:
    data = bytearray(audio_file(sound(1.0), RATE, kind))
    data[4:] = bytes(len(data) - 4)
    refused(bytes(data))


def test_a_longer_file_than_the_limit_is_refused_by_its_header() -> None:
    error = refused(audio_file(np.zeros(RATE * 3, dtype=np.float32), RATE, "FLAC"), AudioLimits(2.0))
    assert isinstance(error, TooLarge)
    assert "longer than 2 s" in error.message


def test_a_small_file_that_lies_about_its_length_stops_at_the_limit() -> None:
    data = bytearray(audio_file(np.zeros(RATE * 30, dtype=np.float32), RATE, "FLAC"))
    # STREAMINFO: 36 bits of sample count at the end of 8 bytes; 0 says that it is unknown.
    (fields,) = struct.unpack(">Q", data[18:26])
    data[18:26] = struct.pack(">Q", fields & ~((1 << 36) - 1))
    assert len(data) < 20_000
    assert isinstance(refused(bytes(data), AudioLimits(2.0)), TooLarge)


def test_samples_that_are_no_numbers_are_refused() -> None:
    samples = np.array([0.1, np.nan, np.inf], dtype=np.float32)
    assert "NaN or infinite" in refused(audio_file(samples, RATE, "WAV", subtype="FLOAT")).message


def test_samples_whose_features_would_overflow_are_refused() -> None:
    samples = np.full(RATE, 1e30, dtype=np.float32)
    assert "full scale" in refused(audio_file(samples, RATE, "WAV", subtype="FLOAT")).message
    loud = audio_file(np.full(RATE, 32767.0, dtype=np.float32), RATE, "WAV", subtype="FLOAT")
    assert decode_audio(loud, RATE, AudioLimits()).max() == 32767.0


def test_too_many_channels_are_refused() -> None:
    assert "9 channels" in refused(audio_file(np.zeros((99, 9), dtype=np.float32), RATE, "WAV")).message


def test_a_file_is_known_by_its_bytes() -> None:
    one, other = audio_file(tone(0.1, 300.0), RATE, "WAV"), audio_file(tone(0.1, 400.0), RATE, "WAV")
    assert MediaAudio(one, LIMITS).digest == MediaAudio(bytes(one), LIMITS).digest
    assert MediaAudio(one, LIMITS).digest != MediaAudio(other, LIMITS).digest
