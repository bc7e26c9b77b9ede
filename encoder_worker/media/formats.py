"""Decoding of images to RGB: known formats only, size checked before anything is decoded."""

from __future__ import annotations

import io
import logging

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media.image_headers import check_jpeg, webp_canvas

logger = logging.getLogger(__name__)

#: Formats that may be decoded: untrusted bytes reach no other decoder.
#: Animated files give their first frame. No AVIF: its decoder has no limit on the frames that it scales.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
#: Encoded bytes of one item.
MAX_MEDIA_BYTES = 64 << 20

# --max-image-pixels is checked from the header before decoding; Pillow's own limit would overrule a higher
# one.
Image.MAX_IMAGE_PIXELS = None


def decode_image(data: bytes, *, max_pixels: int) -> Image.Image:
    """The RGB picture in `data`, equal to what transformers' `load_image` makes of the same file.

    TooLarge above `max_pixels` (width times height, from the header); InvalidRequest(param "image") for
    unknown formats and for truncated or damaged data. The messages never repeat the decoder's, which may
    contain memory addresses of this process.
    """
    check_jpeg(data)
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
        try:
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
