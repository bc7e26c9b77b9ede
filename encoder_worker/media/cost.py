"""The seconds that decoding a file takes, estimated from its header for the speed of this machine."""

from __future__ import annotations

import functools
import io
import logging
import time
from collections.abc import Iterator

from PIL import Image

logger = logging.getLogger(__name__)

#: CPU seconds of the reference clip on the machine that the figures below were taken on.
_REFERENCE_SECONDS = 0.0036
_REFERENCE_FRAMES = 4
#: Times that it is decoded: the best one counts, since others may use the core too.
_TRIES = 12

#: Nanoseconds for each pixel; byte of the file; byte of unpacked rows; row. Above what was measured of the
#: dearest contents, so that what is estimated as cheap is.
_PICTURES = {
    "PNG": (5.0, 8.0, 6.0, 150.0),
    "JPEG": (5.0, 10.0, 0.0, 0.0),
    "WEBP": (16.0, 12.0, 0.0, 0.0),
    "GIF": (8.0, 12.0, 0.0, 20.0),
    "BMP": (6.0, 2.0, 0.0, 20.0),
}
#: For each pixel in each further scan of a progressive JPEG.
_SCAN = 1.5
#: Bytes of a pixel in each mode of Pillow, at most.
_DEPTHS = {"1": 0.125, "L": 1.0, "P": 1.0, "LA": 2.0, "RGB": 3.0, "RGBA": 4.0}
#: For each sample of each channel, of files that lose nothing and of those that do; for each byte of a file.
_SAMPLE, _LOSSY_SAMPLE, _SOUND_BYTE = 12.0, 60.0, 10.0


@functools.cache
def slowness() -> float:
    """How many times longer than on the reference machine this one decodes, by a short clip made here."""
    frames = list(_reference_clip())
    took = min(_decode_all(frames) for _ in range(_TRIES))
    factor = took / _REFERENCE_SECONDS
    logger.info("the reference clip is decoded in %.1f ms of CPU: factor %.2f", took * 1e3, factor)
    return factor


def picture_seconds(header: Image.Image, nbytes: int, scans: int) -> float:
    """Of a picture that Pillow has opened and not decoded, in a file of so many bytes."""
    width, height = header.size
    pixel, file, raw, row = _PICTURES.get(header.format or "", _PICTURES["WEBP"])
    rows, pixels = height, width * height
    unpacked = 0.0
    if raw:
        deep = 2 if header.format == "PNG" and _is_deep(header) else 1
        unpacked = pixels * deep * _DEPTHS.get(header.mode, 4.0) + height
        if header.info.get("interlace"):
            rows, pixels = rows * 2, pixels * 2
    nanoseconds = pixels * (pixel + _SCAN * max(0, scans - 1)) + nbytes * file + unpacked * raw + rows * row
    return nanoseconds * 1e-9 * slowness()


def sound_seconds(frames: int, channels: int, nbytes: int, *, lossy: bool = False) -> float:
    """Of a sound of so many frames, in a file of so many bytes."""
    sample = _LOSSY_SAMPLE if lossy else _SAMPLE
    return (frames * channels * sample + nbytes * _SOUND_BYTE) * 1e-9 * slowness()


def _is_deep(header: Image.Image) -> bool:
    """Whether a PNG has 16 bits of each channel, which Pillow's mode does not say."""
    return any(isinstance(tile[3], str) and "16" in tile[3] for tile in getattr(header, "tile", ()))


def _reference_clip() -> Iterator[bytes]:
    import numpy as np

    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    for turn in range(_REFERENCE_FRAMES):
        file = io.BytesIO()
        frame = Image.fromarray(np.roll(noise, turn, axis=1)).resize((320, 240), Image.Resampling.BICUBIC)
        frame.save(file, "JPEG", quality=90)
        yield file.getvalue()


def _decode_all(frames: list[bytes]) -> float:
    start = time.thread_time()
    for frame in frames:
        with Image.open(io.BytesIO(frame), formats=("JPEG",)) as picture:
            picture.load()
    return time.thread_time() - start
