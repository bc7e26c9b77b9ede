"""Image bytes: equal to transformers' load_image, and hostile ones refused in words of our own."""

from __future__ import annotations

import base64
import io
import random

import pytest
from PIL import Image
from transformers.image_utils import load_image

from triptych.encoder_worker.media import decode_image
from triptych.errors import InvalidRequest, TooLarge

LIMIT = 1_000_000


def picture(size: tuple[int, int] = (9, 5), mode: str = "RGB") -> Image.Image:
    noise = random.Random(size[0]).randbytes(size[0] * size[1] * 4)
    return Image.frombytes("RGBA", size, noise).convert(mode)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def rotated_jpeg() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(), "JPEG", exif=exif)


def animated_gif() -> bytes:
    return encoded(picture(), "GIF", save_all=True, append_images=[picture((9, 5), "L")])


GOOD = {
    "png": encoded(picture(), "PNG"),
    "png with alpha": encoded(picture(mode="RGBA"), "PNG"),
    "png with a palette": encoded(picture(mode="P"), "PNG"),
    "grey png": encoded(picture(mode="L"), "PNG"),
    "black and white png": encoded(picture(mode="1"), "PNG"),
    "jpeg": encoded(picture(), "JPEG"),
    "cmyk jpeg": encoded(picture(mode="CMYK"), "JPEG"),
    "jpeg turned by exif": rotated_jpeg(),
    "webp": encoded(picture(), "WEBP"),
    "gif with two frames": animated_gif(),
    "bmp": encoded(picture(), "BMP"),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", GOOD)
def test_a_picture_is_what_transformers_load_image_makes_of_it(name: str) -> None:
    ours = decode_image(GOOD[name], max_pixels=LIMIT)
    theirs = load_image(base64.b64encode(GOOD[name]).decode())
    assert (ours.mode, ours.size) == (theirs.mode, theirs.size)
    assert ours.tobytes() == theirs.tobytes()


def test_exif_turns_the_picture() -> None:
    assert decode_image(GOOD["jpeg turned by exif"], max_pixels=LIMIT).size == (5, 9)


BAD = {
    "nothing": b"",
    "text": b"hello",
    "tiff": encoded(picture(), "TIFF"),
    "ico": encoded(picture((16, 16)), "ICO"),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "png header only": GOOD["png"][:40],
    "truncated png": encoded(picture((64, 64)), "PNG")[:-600],
    "truncated jpeg": encoded(picture((64, 64)), "JPEG")[:-600],
    "truncated webp": encoded(picture((64, 64)), "WEBP")[:-400],
    "damaged png": GOOD["png"].replace(b"IDAT", b"IDAX"),
    "pickle": b"\x80\x04\x95\x00\x00\x00\x00",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_whole_picture_is_refused_without_the_decoders_words(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_image(BAD[name], max_pixels=LIMIT)
    assert caught.value.param == "image"
    assert "0x" not in caught.value.message


def test_the_pixel_limit_is_checked_before_decoding() -> None:
    huge = encoded(Image.new("1", (65500, 1)), "PNG")
    header = huge[:16] + (65500).to_bytes(4, "big") + (65500).to_bytes(4, "big") + huge[24:29]
    crc = __import__("zlib").crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(TooLarge, match="65500x65500"):
        decode_image(header + crc + huge[33:], max_pixels=LIMIT)


def test_a_picture_of_exactly_the_limit_is_taken() -> None:
    data = encoded(picture((10, 10)), "PNG")
    assert decode_image(data, max_pixels=100).size == (10, 10)
    with pytest.raises(TooLarge):
        decode_image(data, max_pixels=99)


def test_swapped_sides_are_another_picture() -> None:
    wide, high = (decode_image(encoded(picture(s), "PNG"), max_pixels=LIMIT) for s in [(30, 7), (7, 30)])
    assert (wide.size, high.size) == ((30, 7), (7, 30))
