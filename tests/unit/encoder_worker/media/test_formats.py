"""Image bytes: equal to transformers' load_image, and hostile ones refused in words of our own."""

from __future__ import annotations

import base64
import io
import random
import resource
import struct
import zlib

import pytest
from PIL import Image
from transformers.image_utils import load_image

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.base.hashing import mm_hash
from triptych.encoder_worker.media.formats import decode_image

LIMIT = 1_000_000


def picture(size: tuple[int, int] = (9, 5), mode: str = "RGB") -> Image.Image:
    noise = random.Random(size[0]).randbytes(size[0] * size[1] * 4)
    return Image.frombytes("RGBA", size, noise).convert(mode)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def turned(format: str, orientation: int, **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(), format, exif=exif, **options)


def animated(format: str, **options: object) -> bytes:
    others = [picture((9, 5), "L").convert("RGB"), picture((9, 5)).rotate(180)]
    return encoded(picture(), format, save_all=True, append_images=others, **options)


def png(
    bits: int, colour: int, channels: int, *chunks: tuple[bytes, bytes], size: tuple[int, int] = (9, 5)
) -> bytes:
    """A PNG of noise in a form that Pillow reads and does not write."""
    width, height = size
    row = (width * channels * bits + 7) // 8
    noise = random.Random(bits * 10 + colour)
    lines = b"".join(b"\0" + noise.randbytes(row) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    framed = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
PALETTE = (b"PLTE", bytes(range(48)))

GOOD = {
    "png": encoded(picture(), "PNG"),
    "png with alpha": encoded(picture(mode="RGBA"), "PNG"),
    "png with a palette": encoded(picture(mode="P"), "PNG"),
    "png with a palette of 4 bits": png(4, 3, 1, PALETTE),
    "png with a palette and alpha": png(4, 3, 1, PALETTE, (b"tRNS", bytes(range(0, 160, 10)))),
    "png with one transparent colour": png(8, 2, 3, (b"tRNS", b"\0\1\0\2\0\3")),
    "png with one transparent grey": png(8, 0, 1, (b"tRNS", b"\0\7")),
    "grey png": encoded(picture(mode="L"), "PNG"),
    "grey png with alpha": encoded(picture(mode="LA"), "PNG"),
    "grey png of 2 bits": png(2, 0, 1),
    "grey png of 16 bits": png(16, 0, 1),
    "grey png of 16 bits with alpha": png(16, 4, 2),
    "png of 16 bits": png(16, 2, 3),
    "png of 16 bits with alpha": png(16, 6, 4),
    "png with gamma": png(8, 2, 3, (b"gAMA", struct.pack(">I", 100_000))),
    "png with a colour profile": encoded(picture(), "PNG", icc_profile=b"no profile at all"),
    "black and white png": encoded(picture(mode="1"), "PNG"),
    "animated png": animated("PNG"),
    "animated png with another default image": animated("PNG", default_image=True),
    "jpeg": encoded(picture(), "JPEG"),
    "grey jpeg": encoded(picture(mode="L"), "JPEG"),
    "progressive jpeg": encoded(picture((64, 48)), "JPEG", progressive=True),
    "jpeg without subsampling": encoded(picture((64, 48)), "JPEG", subsampling=0, quality=100),
    "cmyk jpeg": encoded(picture(mode="CMYK"), "JPEG"),
    "jpeg with a colour profile": encoded(picture(), "JPEG", icc_profile=bytes(100_000)),
    "jpeg with two pictures": encoded(picture(), "MPO", save_all=True, append_images=[picture((9, 5), "L")]),
    "jpeg turned by xmp": encoded(picture(), "JPEG", xmp=XMP),
    **{f"jpeg turned by exif {way}": turned("JPEG", way) for way in range(10)},
    "png turned by exif": turned("PNG", 5),
    "webp turned by exif": turned("WEBP", 8),
    "webp": encoded(picture(), "WEBP"),
    "lossless webp": encoded(picture(), "WEBP", lossless=True),
    "lossless webp with alpha": encoded(picture(mode="RGBA"), "WEBP", lossless=True, exact=True),
    "webp with alpha": encoded(picture(mode="RGBA"), "WEBP"),
    "animated webp": animated("WEBP"),
    "gif": encoded(picture(), "GIF"),
    "grey gif": encoded(picture(mode="L"), "GIF"),
    "gif with a transparent colour": encoded(picture(mode="P"), "GIF", transparency=3),
    "animated gif": animated("GIF"),
    "bmp": encoded(picture(), "BMP"),
    "bmp with alpha": encoded(picture(mode="RGBA"), "BMP"),
    "bmp with a palette": encoded(picture(mode="P"), "BMP"),
    "black and white bmp": encoded(picture(mode="1"), "BMP"),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", GOOD)
def test_a_picture_is_what_transformers_load_image_makes_of_it(name: str) -> None:
    ours = decode_image(GOOD[name], max_pixels=LIMIT)
    theirs = load_image(base64.b64encode(GOOD[name]).decode())
    assert (ours.mode, ours.size) == (theirs.mode, theirs.size)
    assert ours.tobytes() == theirs.tobytes()


def test_another_format_is_refused_with_the_names_of_those_that_are_served() -> None:
    with pytest.raises(InvalidRequest, match="not a PNG, JPEG, WebP, GIF or BMP file; send one of these"):
        decode_image(encoded(picture(), "AVIF"), max_pixels=LIMIT)


def test_exif_turns_the_picture() -> None:
    assert decode_image(GOOD["jpeg turned by exif 6"], max_pixels=LIMIT).size == (5, 9)


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


BAD = {
    "avif": encoded(picture(), "AVIF"),
    "nothing": b"",
    "text": b"hello",
    "tiff": encoded(picture(), "TIFF"),
    "ico": encoded(picture((16, 16)), "ICO"),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "jpeg 2000": encoded(picture(), "JPEG2000"),
    "ppm": encoded(picture(), "PPM"),
    "tga": encoded(picture(), "TGA"),
    "pdf": encoded(picture(), "PDF"),
    "psd": b"8BPS\0\1" + bytes(40),
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "png header only": GOOD["png"][:40],
    "truncated png": encoded(picture((64, 64)), "PNG")[:-600],
    "truncated jpeg": encoded(picture((64, 64)), "JPEG")[:-600],
    "truncated webp": encoded(picture((64, 64)), "WEBP")[:-400],
    "truncated gif": encoded(picture((64, 64)), "GIF")[:-600],
    "truncated bmp": encoded(picture((64, 64)), "BMP")[:-600],
    "webp header only": encoded(picture(), "WEBP")[:30],
    "damaged png": GOOD["png"].replace(b"IDAT", b"IDAX"),
    "pickle": b"\x80\x04\x95\x00\x00\x00\x00",
    "xml with an entity": b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
    "gif without frames": b"GIF89a\x08\0\x08\0\x80\0\0\0\0\0\xff\xff\xff;",
    "png of no height": png(8, 2, 3, size=(9, 0)),
    "bmp that lies": patched(encoded(picture(), "BMP"), 18, struct.pack("<ii", -1, -(1 << 31))),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_whole_picture_is_refused_without_the_decoders_words(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_image(BAD[name], max_pixels=LIMIT)
    assert caught.value.param == "image"
    assert "0x" not in caught.value.message


def test_the_pixel_limit_is_checked_before_decoding() -> None:
    with pytest.raises(TooLarge, match="65500x65500"):
        decode_image(bomb_png(), max_pixels=LIMIT)


def bomb_png() -> bytes:
    huge = encoded(Image.new("1", (65500, 1)), "PNG")
    header = huge[:16] + (65500).to_bytes(4, "big") * 2 + huge[24:29]
    return header + zlib.crc32(header[12:29]).to_bytes(4, "big") + huge[33:]


def webp_bomb(kind: str) -> bytes:
    """A WebP whose header promises a canvas of gigabytes."""
    if kind == "VP8X":
        return patched(animated("WEBP"), 24, b"\xff\x3f\x00" * 2)
    if kind == "VP8L":
        data = encoded(picture(), "WEBP", lossless=True)
        return patched(data, 21, (0x3FFF | 0x3FFF << 14).to_bytes(4, "little"))
    return patched(encoded(picture(), "WEBP"), 26, b"\xff\x3f" * 2)


def gif_bomb(where: str) -> bytes:
    data = encoded(picture(mode="L"), "GIF")
    if where == "screen":
        return patched(data, 6, b"\xff" * 4)
    frame = data.rindex(b",\0\0\0\0\x09\0\x05\0")
    return patched(data, frame + 5, b"\xff" * 4)


BOMBS = {
    "webp canvas": webp_bomb("VP8X"),
    "webp canvas, header alone": webp_bomb("VP8X")[:30],
    "lossless webp": webp_bomb("VP8L"),
    "lossy webp": webp_bomb("VP8 "),
    "gif screen": gif_bomb("screen"),
    "gif frame larger than its screen": gif_bomb("frame"),
    "bmp": patched(encoded(picture(), "BMP"), 18, (65500).to_bytes(4, "little") * 2),
    "jpeg": encoded(picture(), "JPEG").replace(b"\x00\x05\x00\x09\x03", b"\xff\xdc\xff\xdc\x03"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_promises_gigabytes_is_refused_before_they_are_allocated(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLarge):
        decode_image(BOMBS[name], max_pixels=LIMIT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_jpeg_of_countless_segments_or_scans_is_refused() -> None:
    jpeg = encoded(picture((64, 64)), "JPEG", progressive=True)
    segments = jpeg[:2] + b"\xff\xe1\x00\x09Exif\0\0x" * 600 + jpeg[2:]
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    for data in (segments, jpeg[:-2] + scan * 70 + jpeg[-2:]):
        with pytest.raises(InvalidRequest, match="64 scans or 512 segments"):
            decode_image(data, max_pixels=LIMIT)


def test_what_follows_a_jpegs_end_is_not_counted() -> None:
    """A phone's motion picture is a JPEG with a film behind it."""
    jpeg = encoded(picture(), "JPEG")
    film = jpeg + b"\xff\xda\x00\x02" * 1000
    assert decode_image(film, max_pixels=LIMIT).tobytes() == decode_image(jpeg, max_pixels=LIMIT).tobytes()


def exif_bomb(entries: int, each: int) -> bytes:
    """A block whose entries all point at the same bytes."""
    head = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries)
    tags = b"".join(struct.pack("<HHII", 0x9000 + n, 1, each, 8) for n in range(entries))
    return head + tags + bytes(4) + bytes(each)


@pytest.mark.filterwarnings("ignore:Tag data larger:UserWarning")
@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_an_exif_block_that_unfolds_is_no_use(format: str) -> None:
    data = encoded(picture(), format, exif=exif_bomb(2000, 2 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode_image(data, max_pixels=LIMIT).size == (9, 5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_only_the_first_of_many_frames_is_decoded() -> None:
    frames = [picture((9, 5)).rotate(way) for way in range(0, 360, 2)]
    for format in ("GIF", "WEBP", "PNG"):
        data = encoded(picture(), format, save_all=True, append_images=frames)
        assert decode_image(data, max_pixels=9 * 5).size == (9, 5)


def test_a_compressed_text_or_profile_that_unfolds_takes_no_memory() -> None:
    bomb = zlib.compress(bytes(80 << 20))
    for chunk in ((b"zTXt", b"k\0\0" + bomb), (b"iCCP", b"k\0\0" + bomb)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            decode_image(png(8, 2, 3, chunk), max_pixels=LIMIT)
        except InvalidRequest as error:
            assert "truncated or damaged" in error.message
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000


def test_a_picture_of_exactly_the_limit_is_taken() -> None:
    data = encoded(picture((10, 10)), "PNG")
    assert decode_image(data, max_pixels=100).size == (10, 10)
    with pytest.raises(TooLarge):
        decode_image(data, max_pixels=99)


def test_pictures_of_equal_pixels_and_swapped_sides_have_keys_of_their_own() -> None:
    files = [encoded(Image.new("RGB", size, "teal"), "PNG") for size in [(30, 7), (7, 30)]]
    wide, high = (decode_image(file, max_pixels=LIMIT) for file in files)
    assert (wide.size, high.size) == ((30, 7), (7, 30))
    assert wide.tobytes() == high.tobytes()
    first, second = (mm_hash(file, namespace="a" * 64, modality="image") for file in files)
    assert first != second


@pytest.mark.parametrize("mode", ["L", "P", "RGBA"])
def test_equal_pixel_bytes_in_another_mode_have_another_key(mode: str) -> None:
    sizes = {"L": (12, 4), "P": (12, 4), "RGBA": (3, 4)}
    other = Image.frombytes(mode, sizes[mode], bytes(48))
    if mode == "P":
        other.putpalette([200, 30, 30] * 256)
    rgb = Image.frombytes("RGB", (4, 4), bytes(48))
    assert other.tobytes() == rgb.tobytes()
    keys = {mm_hash(encoded(image, "PNG"), namespace="a" * 64, modality="image") for image in (other, rgb)}
    assert len(keys) == 2
