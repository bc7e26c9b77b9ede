"""Checks of image headers before decoding, since decoders allocate and loop by what headers claim.

Files with unreadable headers pass these checks: the decoder refuses them.
"""

from __future__ import annotations

import re

from triptych.base.errors import InvalidRequest

#: Each scan of a progressive JPEG costs a pass over all pixels but only a few bytes of file.
MAX_JPEG_SCANS = 64
#: Pillow joins segments of one kind one by one, which is quadratic.
MAX_JPEG_SEGMENTS = 512
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def check_jpeg(data: bytes) -> None:
    """InvalidRequest(param "image") for a JPEG that would cost its decoder far more than its pixels.

    Counts segments and scans up to the end of the first picture.
    """
    if not data.startswith(b"\xff\xd8"):
        return
    at, segments, scans = 2, 0, 0
    while match := _MARKER.search(data, at):
        marker, at = data[match.start() + 1], match.end()
        if marker == 0xD9:
            return
        segments += 1
        scans += marker == 0xDA
        if scans > MAX_JPEG_SCANS or segments > MAX_JPEG_SEGMENTS:
            raise _refused(f"more than {MAX_JPEG_SCANS} scans or {MAX_JPEG_SEGMENTS} segments")
        if marker not in (0x01, 0xD8):
            at += int.from_bytes(data[at : at + 2], "big")


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
