"""Sounds in M4A and WebM: decoded by a process, within limits."""

from __future__ import annotations

import numpy as np
import pytest

from support.data.sounds import sound
from support.sounds.files import KINDS, encoded, hours, spoken
from support.videos.clips import huge_header, make_clip
from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media import decoder_process
from triptych.encoder_worker.media.audio import AudioLimits, SoundProcess, decode_audio

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


LIMITS = AudioLimits(seconds=60)
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
        decode_audio(make(), 16_000, LIMITS)
    assert caught.value.param == "audio"


def test_a_process_that_takes_too_long_is_killed() -> None:
    limits = AudioLimits(seconds=1e6, decode_seconds=0.05)
    with SoundProcess(hours(1), limits) as process, pytest.raises(TooLarge, match="not decoded within"):
        list(process.blocks())


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"install triptych\[video\]"):
        decode_audio(spoken(), 16_000, AudioLimits())
