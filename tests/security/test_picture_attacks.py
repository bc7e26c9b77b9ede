"""Groups 5 and 6: pictures that are bombs, or no pictures, or pretend to be others."""

from __future__ import annotations

import io
import re
import struct
import zlib

import pytest
from PIL import Image

from support.data.pictures import picture
from support.engine.encoder_bench import png
from support.hostile.attacks import Target, picture_url, question

FIELD = "messages[0].content[0].image_url.url"


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunk(kind: bytes, data: bytes) -> bytes:
    """A good PNG with one more chunk behind its header."""
    good = png(picture(1, 32, 32))
    return good[:33] + chunk(kind, data) + good[33:]


def deflated_png() -> bytes:
    """A true bomb: 4000 x 4000 announced, 60 MB of zeros behind it."""
    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(60 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


#: One of each kind: `unit/encoder_worker/media/test_formats.py` has all of them.
REFUSED = {
    "a PNG that inflates": deflated_png,
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "a truncated JPEG": lambda: encoded(picture(1, 64, 64), "JPEG")[:-300],
}


def ask(target: Target, data: bytes, kind: str = "image/png") -> tuple[int, dict]:
    return target.chat({"messages": question(picture_url(data, kind)), "max_tokens": 1})


def test_no_bomb_and_no_other_format_is_decoded(target: Target) -> None:
    for name, make in REFUSED.items():
        status, reply = ask(target, make())
        assert status in (400, 413), (name, status, reply)
        assert reply["error"]["param"] == FIELD, (name, reply)
        assert not re.search(r"0x[0-9a-f]{6}|passwd|Traceback|\.py", reply["error"]["message"]), (name, reply)


def test_a_picture_with_much_around_it_costs_little(target: Target) -> None:
    unfolding = with_chunk(b"iCCP", b"x\x00\x00" + zlib.compress(bytes(50 << 20), 9))
    assert ask(target, unfolding)[0] in (200, 400, 413)


def test_the_media_type_that_is_announced_decides_nothing(target: Target) -> None:
    status, _ = ask(target, png(picture(2, 32, 32)), "image/jpeg")
    assert status == 200
    for kind in ("image/svg+xml", "text/html", "application/pdf", "image/tiff", "video/mp4"):
        status, reply = ask(target, png(picture(2, 32, 32)), kind)
        assert (status, reply["error"]["param"]) == (400, FIELD)


@pytest.mark.parametrize("size", [(64, 64), (96, 32)])
def test_a_uuid_that_another_picture_had_gives_the_answer_of_ones_own(target, size):
    def answer(seed: int, size: tuple[int, int], **extra: object) -> str:
        part = question(picture_url(png(picture(seed, *size))))
        part[0]["content"][0] |= extra
        status, reply = target.chat({"messages": part, "max_tokens": 8, "temperature": 0, "seed": 1})
        assert status == 200, reply
        return str(reply["choices"][0]["message"]["content"])

    alone = answer(21, size)
    answer(22, (64, 64), uuid="shared")
    assert answer(21, size, uuid="shared") == alone
