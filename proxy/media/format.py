"""What a file's first bytes say it is: only formats that encoder workers decode are kept."""

from __future__ import annotations

#: Bytes that `image_format` looks at.
MAGIC_BYTES = 32
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))


def image_format(head: bytes) -> str | None:
    """ "png", "jpeg", "webp", "gif", "bmp" or "avif"; None for everything else."""
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[:2] == b"BM" and len(head) >= 14:
        return "bmp"
    if head[4:8] == b"ftyp" and any(brand in head[8:MAGIC_BYTES] for brand in (b"avif", b"avis")):
        return "avif"
    return None
