"""Decoding of images to RGB: known formats only, size checked before anything is decoded."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media.cost import picture_seconds
from triptych.encoder_worker.media.jpeg import decode_jpeg

#: Each scan of a progressive JPEG costs a pass over all pixels but only a few bytes of file.
MAX_JPEG_SCANS = 64
#: Pillow joins segments of one kind one by one, which is quadratic.
MAX_JPEG_SEGMENTS = 512
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def check_jpeg(data: bytes) -> int:
    """InvalidRequest(param "image") for a JPEG that would cost its decoder far more than its pixels.

    Counts segments and scans up to the end of the first picture; returns the scans, none of other files.
    """
    if not data.startswith(b"\xff\xd8"):
        return 0
    at, segments, scans = 2, 0, 0
    while match := _MARKER.search(data, at):
        marker, at = data[match.start() + 1], match.end()
        if marker == 0xD9:
            break
        segments += 1
        scans += marker == 0xDA
        if scans > MAX_JPEG_SCANS or segments > MAX_JPEG_SEGMENTS:
            raise _refused(f"more than {MAX_JPEG_SCANS} scans or {MAX_JPEG_SEGMENTS} segments")
        if marker not in (0x01, 0xD8):
            at += int.from_bytes(data[at : at + 2], "big")
    return scans


def webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Width and height that a WebP decoder allocates when it is opened; None for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + _little(data[24:27]), 1 + _little(data[27:30])
    if kind == b"VP8L":
        bits = _little(data[21:25])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"image: it has {what}; save it again without them", param="image")


logger = logging.getLogger(__name__)

#: Formats that may be decoded: untrusted bytes reach no other decoder.
#: Animated files give their first frame. No AVIF: its decoder has no limit on the frames that it scales.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
#: Encoded bytes of one item.
MAX_MEDIA_BYTES = 64 << 20
#: Bytes of a decoded pixel in Pillow's memory.
PIXEL_BYTES = 4

# --max-image-pixels is checked from the header before decoding; Pillow's own limit would overrule a higher
# one.
Image.MAX_IMAGE_PIXELS = None


def decode_image(
    data: bytes, *, max_pixels: int, expect: Callable[[float, int], None] | None = None
) -> Image.Image:
    """The RGB picture in `data`, equal to what transformers' `load_image` makes of the same file.

    `expect` is told the seconds and bytes that it takes, by its header, and may raise before it is decoded.

    TooLarge above `max_pixels` (width times height, from the header); InvalidRequest(param "image") for
    unknown formats and for truncated or damaged data. The messages never repeat the decoder's, which may
    contain memory addresses of this process.
    """
    scans = check_jpeg(data)
    if canvas := webp_canvas(data):
        _check_size(canvas, max_pixels)
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(
            "image: not a PNG, JPEG, WebP, GIF or BMP file; send one of these formats", param="image"
        ) from None
    except Exception as error:
        raise _damaged(error) from None
    with picture:
        _check_size(picture.size, max_pixels)
        if expect is not None:
            width, height = picture.size
            expect(picture_seconds(picture, len(data), scans), width * height * PIXEL_BYTES)
        try:
            if picture.format == "JPEG":
                orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
                if (decoded := decode_jpeg(data, picture, orientation)) is not None:
                    return decoded
            picture.load()
            _check_size(picture.size, max_pixels)
            # Each of the two makes a copy even where there is nothing to do.
            turned = picture.getexif().get(ExifTags.Base.Orientation, 1) != 1
            upright = ImageOps.exif_transpose(picture) if turned else picture
            plain = upright.mode == "RGB" and "transparency" not in upright.info
            return upright if plain else upright.convert("RGB")
        except InvalidRequest:
            raise
        except Exception as error:
            raise _damaged(error) from None


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidRequest("image: it has no pixels; send one with width and height above 0", param="image")
    if width * height > max_pixels:
        raise TooLarge(
            f"image: {width}x{height} is more than the {max_pixels} pixels allowed; send a smaller image",
            param="image",
        )


def _damaged(error: Exception) -> InvalidRequest:
    logger.info("an image could not be decoded (%s)", type(error).__name__)
    return InvalidRequest("image: the file is truncated or damaged and cannot be decoded", param="image")
