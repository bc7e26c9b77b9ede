"""Number of pixels that decoding an AVIF file computes, by its AV1 headers.

libavif scales decoded frames to the size in the file's header: a file of a kilobyte may decode a frame of
16384 x 16384 pixels and show as a thumbnail. So the frame sizes of all AV1 items are added up beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator

_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6
#: Limit of items, extents and units, above what any picture needs.
_MANY = 4096
_SINGLE = frozenset({b"ftyp", b"meta", b"iinf", b"iloc", b"idat"})


class _Bits:
    """Reads big-endian numbers bit by bit. ValueError at the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self, bits: int) -> int:
        end = self._at + bits
        if end > 8 * len(self._data):
            raise ValueError("the header ends too early")
        first, last = self._at // 8, (end + 7) // 8
        value = int.from_bytes(self._data[first:last], "big") >> (8 * last - end)
        self._at = end
        return value & ((1 << bits) - 1)

    def skip(self, nbytes: int) -> None:
        self._at += 8 * nbytes


def coded_pixels(data: bytes) -> int:
    """Pixels of all frames of all AV1 items. ValueError for other files, such as animations."""
    boxes = dict(_boxes(data, 0, len(data)))
    kind, meta = boxes.get(b"ftyp", b""), boxes.get(b"meta", b"")
    if kind[:4] != b"avif" or not meta:
        raise ValueError("not a still AVIF image")
    parts = dict(_boxes(meta, 4, len(meta)))
    coded = _av1_items(parts.get(b"iinf", b""))
    items = _items(parts.get(b"iloc", b""), data, parts.get(b"idat", b""))
    return sum(_frame_pixels(content) for item, content in items if item in coded)


def _boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """(type, body) of the boxes; ValueError where a type that must be single occurs twice."""
    seen: set[bytes] = set()
    while at + 8 <= end:
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        head = 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        size = size or end - at
        if size < head or at + size > end or (kind in seen and kind in _SINGLE):
            raise ValueError("damaged boxes")
        seen.add(kind)
        if kind not in (b"mdat", b"free"):
            yield kind, data[at + head : at + size]
        at += size


def _av1_items(iinf: bytes) -> set[int]:
    """Ids of the items that hold AV1 frames."""
    coded: set[int] = set()
    at = 6 if iinf[:1] == b"\x00" else 8
    while at + 8 <= len(iinf):
        size = int.from_bytes(iinf[at : at + 4], "big")
        entry = iinf[at : at + size]
        if size < 20 or iinf[at + 4 : at + 8] != b"infe":
            raise ValueError("damaged item table")
        width = 4 if entry[8] == 3 else 2
        if entry[14 + width : 18 + width] == b"av01":
            coded.add(int.from_bytes(entry[12 : 12 + width], "big"))
        at += size
    return coded


def _items(iloc: bytes, data: bytes, idat: bytes) -> Iterator[tuple[int, bytes]]:
    """(item id, its bytes)."""
    bits = _Bits(iloc)
    version = bits.read(8)
    bits.skip(3)
    sizes = [8 * bits.read(4) for _ in range(4)]
    offset_bits, length_bits, base_bits, index_bits = sizes
    id_bits = 32 if version == 2 else 16
    count, left = bits.read(id_bits), 2 * len(data)
    if count > _MANY or version > 2:
        raise ValueError("too many items")
    for _ in range(count):
        item = bits.read(id_bits)
        inside = (bits.read(16) & 15) if version else 0
        bits.skip(2)
        base, extents = bits.read(base_bits), bits.read(16)
        if extents > _MANY or inside > 1:
            raise ValueError("too many extents")
        pieces = []
        for _ in range(extents):
            if version and index_bits:
                bits.read(index_bits)
            start = base + bits.read(offset_bits)
            length = bits.read(length_bits)
            pieces.append((idat if inside else data)[start : start + length if length else None])
            left -= len(pieces[-1])
            if left < 0:
                raise ValueError("items share their bytes")
        yield item, b"".join(pieces)


def _frame_pixels(content: bytes) -> int:
    """Pixels of all frames of a sequence of AV1 units."""
    pixels = total = 0
    for number, (kind, body) in enumerate(_units(content)):
        if number >= _MANY:
            raise ValueError("too many units")
        if kind == _SEQUENCE_HEADER:
            pixels = _sequence_pixels(_Bits(body))
        elif kind in (_FRAME_HEADER, _FRAME):
            total += pixels
    return total


def _units(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        head = content[at]
        at += 2 if head & 4 else 1
        size = len(content) - at
        if head & 2:
            size = shift = 0
            while True:
                if at >= len(content) or shift > 28:
                    raise ValueError("damaged unit")
                byte = content[at]
                size |= (byte & 127) << shift
                at, shift = at + 1, shift + 7
                if byte < 128:
                    break
        yield head >> 3 & 15, content[at : at + size]
        at += size


def _sequence_pixels(bits: _Bits) -> int:
    """Most pixels of one frame under this sequence header."""
    bits.read(4)  # profile, still picture
    reduced = bits.read(1)
    if reduced:
        bits.read(5)  # level
    else:
        if bits.read(1):  # timing information, of films only
            raise ValueError("timing information in an image")
        delays = bits.read(1)
        for _ in range(bits.read(5) + 1):
            bits.read(12)  # operating point
            if bits.read(5) > 7:
                bits.read(1)  # tier
            if delays and bits.read(1):
                bits.read(4)
    width_bits, height_bits = bits.read(4) + 1, bits.read(4) + 1
    if reduced:
        return (bits.read(width_bits) + 1) * (bits.read(height_bits) + 1)
    return 1 << width_bits + height_bits  # a frame may say its own size
