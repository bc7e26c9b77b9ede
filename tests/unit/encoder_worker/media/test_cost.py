"""Estimates of decoding by headers alone: what is cheap stays cheap, what is dear is known before."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from support.data.sounds import audio_file
from triptych.base.errors import TooLarge
from triptych.encoder_worker.media import cost
from triptych.encoder_worker.media.audio import AudioLimits, MediaAudio
from triptych.encoder_worker.media.formats import decode_image
from triptych.encoder_worker.media.work import DecodeWork, TooHeavy


@pytest.fixture(autouse=True)
def reference_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "slowness", lambda: 1.0)


def header(width: int, height: int, depth: int = 8, color: int = 2) -> bytes:
    """The beginning of a PNG, which is all that an estimate reads."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(1 << 16)))


def picture(width: int, height: int, kind: str, **options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, kind, **options)
    return file.getvalue()


def seconds(data: bytes) -> float:
    """What the decoder is told before it decodes."""
    told = []

    def expect(seconds: float, nbytes: int) -> None:
        told.append(seconds)
        raise TooHeavy

    with pytest.raises(TooHeavy):
        decode_image(data, max_pixels=40_000_000, expect=expect)
    return told[0]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(header(1, 39_999_999), id="one pixel wide"),
        pytest.param(header(6320, 6320, 16, 6), id="16 bits of RGBA"),
        pytest.param(picture(4096, 4096, "JPEG", progressive=True), id="a progressive JPEG"),
        pytest.param(picture(5120, 4096, "WEBP", method=0), id="a large WebP"),
    ],
)
def test_a_picture_that_takes_long_is_known_by_its_header(data: bytes) -> None:
    work = DecodeWork(heavy=False)
    assert seconds(data) > 0.25
    with pytest.raises(TooHeavy):
        decode_image(data, max_pixels=40_000_000, expect=lambda s, n: work.expect("image", s, n))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("size", [(448, 448), (1920, 1080)])
def test_an_ordinary_picture_stays_in_a_thread(kind: str, size: tuple[int, int]) -> None:
    assert seconds(picture(*size, kind)) < 0.25


def test_an_estimate_above_the_limit_is_refused_with_the_field_and_the_remedy() -> None:
    work = DecodeWork(limit=1.0)
    with pytest.raises(TooLarge, match=r"image: .* s, more than the 1 s allowed.*--max-decode-seconds") as e:
        decode_image(
            header(1, 39_999_999), max_pixels=40_000_000, expect=lambda s, n: work.expect("image", s, n)
        )
    assert e.value.param == "image"


def test_estimates_follow_the_speed_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture(448, 448, "JPEG")
    usual = seconds(data)
    monkeypatch.setattr(cost, "slowness", lambda: 3.0)
    assert seconds(data) == pytest.approx(3 * usual)
    assert cost.sound_seconds(48_000, 2, 0) == pytest.approx(3 * 48_000 * 2 * 12e-9)


def test_a_sound_that_takes_long_is_known_by_its_header() -> None:
    wide = audio_file(np.zeros((192_000 * 20, 8), dtype=np.float32), 192_000, "FLAC")
    with pytest.raises(TooHeavy):
        MediaAudio(wide, AudioLimits(), DecodeWork(heavy=False))
    music = audio_file(np.zeros((44_100 * 60, 2), dtype=np.float32), 44_100, "MP3")
    with pytest.raises(TooHeavy):
        MediaAudio(music, AudioLimits(), DecodeWork(heavy=False))
    speech = audio_file(np.zeros(16_000 * 60, dtype=np.float32), 16_000, "WAV")
    MediaAudio(speech, AudioLimits(), DecodeWork(heavy=False))
