"""Sounds: their formats, and the process that decodes them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from support.data.sounds import audio_file, sound, tone
from support.sounds.files import KINDS, encoded, hours, spoken
from support.videos.clips import huge_header, make_clip
from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media import decoder_process
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


pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("container", "codec", "rate"), KINDS)
def test_a_sound_is_heard_in_every_format(container: str, codec: str, rate: int) -> None:
    wave = decode_audio(spoken(container, codec, rate), 16_000, AudioLimits())
    same = sound(1.0, seed=3, rate=rate)[:: max(1, rate // 16_000)]
    assert wave.dtype == np.float32
    assert abs(len(wave) - 16_000) < 3000
    assert 0.3 < float(np.abs(wave).mean() / np.abs(same).mean()) < 1.5


def test_a_lossless_sound_has_the_samples_that_were_encoded() -> None:
    wave = 0.4 * sound(0.5, seed=1)
    decoded = decode_audio(encoded("matroska", "flac", 16_000, wave), 16_000, AudioLimits())
    np.testing.assert_allclose(decoded, wave, atol=2 / 32768)


def test_channels_are_averaged_and_a_clips_sound_is_taken() -> None:
    stereo = encoded("mp4", "aac", 48_000, sound(0.5, rate=48_000), layout="stereo")
    assert len(decode_audio(stereo, 16_000, AudioLimits())) > 7000
    assert len(decode_audio(make_clip(sound=True), 16_000, AudioLimits())) > 10_000


SMALL_LIMITS = AudioLimits(seconds=60)
REFUSED = {
    "no audio track": (make_clip, InvalidRequest, "the file has no sound; send one with an audio track"),
    "truncated": (lambda: spoken("ipod", "aac", 44_100)[:2000], InvalidRequest, "damaged; convert it to M4A"),
    "a header of 10 GB": (huge_header, InvalidRequest, "damaged; convert it to M4A"),
    "an hour of silence": (lambda: hours(1), TooLarge, "longer than 60 s; send a shorter file"),
    "a codec": (lambda: encoded("mp4", "ac3", 48_000, sound(0.5)), InvalidRequest, "codec is not supported"),
    "nothing": (lambda: b"\x00\x00\x00\x18ftyp" + b"\x00" * 99, InvalidRequest, "truncated or damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused_with_a_remedy(name: str) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        decode_audio(make(), 16_000, SMALL_LIMITS)
    assert caught.value.param == "audio"


def test_a_process_that_takes_too_long_is_killed() -> None:
    limits = AudioLimits(seconds=1e6, decode_seconds=0.05)
    with pytest.raises(TooLarge, match=r"not decoded within the 0.05 s allowed.*--max-decode-seconds"):
        decode_audio(hours(1), 16_000, limits)


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"install triptych\[video\]"):
        decode_audio(spoken(), 16_000, AudioLimits())
