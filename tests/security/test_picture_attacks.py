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


def large_png() -> bytes:
    raw = bytearray(png(picture(1, 8, 8)))
    raw[16:24] = (65500).to_bytes(4, "big") * 2
    raw[29:33] = struct.pack(">I", zlib.crc32(bytes(raw[12:29])))
    return bytes(raw)


def deflated_png() -> bytes:
    """A true bomb: 4000 x 4000 announced, 60 MB of zeros behind it."""
    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(60 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def gif_of(frames: int) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + b"\x00\x00\x00\xff\xff\xff"
    frame = (
        b"\x2c" + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + b"\x02\x16\x8c\x2d\x99\x87\x2a\x1c\xdc\x33\xa0\x02"
    )
    frame += b"\x75\xec\x95\xfa\xa8\xde\x60\x8c\x04\x91\x4c\x01\x00"
    return head + frame * frames + b"\x3b"


REFUSED = {
    "a PNG of 65500 x 65500": large_png,
    "a PNG that inflates": deflated_png,
    "TIFF": lambda: encoded(picture(1, 16, 16), "TIFF"),
    "ICO": lambda: encoded(picture(1, 16, 16), "ICO"),
    "PPM": lambda: encoded(picture(1, 16, 16), "PPM"),
    "PSD": lambda: b"8BPS\x00\x01" + bytes(6) + b"\x00\x03" + bytes(200),
    "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "XML entities": lambda: (
        b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>'
    ),
    "PDF": lambda: b"%PDF-1.7\n" + bytes(400),
    "a pickle": lambda: (
        b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    ),
    "a truncated JPEG": lambda: encoded(picture(1, 64, 64), "JPEG")[:-300],
    "a JPEG of markers": lambda: b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000,
    "a truncated WebP": lambda: encoded(picture(1, 64, 64), "WEBP")[:60],
    "a BMP with a lying header": lambda: (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 0, 0, 0, 54, 40, -1, -(1 << 31), 1, 24, 0, 0, 0, 0, 0, 0)
    ),
    "a GIF without frames": lambda: gif_of(0),
    "a PNG of no height": lambda: (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 0, 8, 2, 0, 0, 0))
        + chunk(b"IEND", b"")
    ),
}
#: Answered or refused; what matters is that they cost little and harm nobody.
HARMLESS = {
    "a GIF of 10^5 frames": lambda: gif_of(100_000),
    "an animated WebP": lambda: encoded(
        picture(1, 32, 32), "WEBP", save_all=True, append_images=[picture(n, 32, 32) for n in range(2, 30)]
    ),
    "a colour profile that inflates": lambda: with_chunk(
        b"iCCP", b"x\x00\x00" + zlib.compress(bytes(50 << 20), 9)
    ),
    "text that inflates": lambda: with_chunk(b"zTXt", b"x\x00\x00" + zlib.compress(bytes(50 << 20), 9)),
    "EXIF without end": lambda: with_chunk(
        b"eXIf", b"MM\x00*\x00\x00\x00\x08\xff\xff" + b"\x01\x12\x00\x03\xff\xff\xff\xff" * 9000
    ),
    "a thousand small chunks": lambda: (
        with_chunk(b"tEXt", b"a\x00b")[:-12] + chunk(b"tEXt", b"a\x00b") * 1000
    ),
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
    for name, make in HARMLESS.items():
        status, reply = ask(target, make())
        assert status in (200, 400, 413), (name, status, reply)


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
