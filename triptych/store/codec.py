"""A stored value: a fixed prefix, a msgpack header, padding to 64 bytes, then the tensor's raw bytes.

    offset  0  magic            4 bytes
            4  layout version   u16
            6  header length    u16   bytes of msgpack
            8  ttl              u32   seconds; a look-up renews by it
           12  parts            u32   0: the body follows; else it lies in that many keys of its own
           16  write id         8 bytes
           24  header checksum  xxh3-64 of bytes 0:24 and the msgpack; a look-up reads no body
           32  checksum         xxh3-128 of bytes 0:32, the msgpack, the padding and the body
           48  msgpack header, padding up to the next multiple of 64, body

The padding is zeros, or begins with a mark and the trace context of the span that computed the item, which
readers before it pass over as they do any padding. So that it fits, the header is written with longer forms
of its field names then, which say the same in msgpack.

Prefix, header and padding fit into the 4 KiB that a look-up reads. Nothing here raises on foreign bytes: an
invalid value is returned as a `Damage` with its reason.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeGuard

import msgpack
import xxhash

from triptych.base.errors import InvalidRequest
from triptych.base.types import DTYPE_BYTES, SCALE_BYTES, ItemPlan, JsonObject, scales_fit

MAGIC = b"3EC\x93"
LAYOUT_VERSION = 1
#: What a look-up reads of a value; prefix, header and padding fit in it.
HEAD_BYTES = 4096
#: Bodies above this are split into parts of at most this size.
PART_BYTES = 64 << 20
ALIGNMENT = 64
MAX_NDIM = 4

#: Before a producer's trace context in the padding.
_PRODUCER_MARK = b"tc1"
#: Bytes of that context: trace id, span id, flags.
PRODUCER_BYTES = 25

#: Bytes of the checksum itself, which covers everything else.
CHECKSUM_SPAN = (32, 48)

_PREFIX = struct.Struct("<4sHHII8s8s16s")
_SIGNED = 24
_FIELDS = frozenset(
    (
        "mm_hash",
        "namespace",
        "modality",
        "dtype",
        "shape",
        "nbytes",
        "rows",
        "width",
        "length",
        "runs",
        "grid",
    )
)
#: Only in the plans that have them, so that values of all others stay as they were.
_LAYOUT, _SCALES = "layout", "scales"
_MAX_COUNT = 1 << 40

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Head:
    """The decoded head of a value. `raw` are its bytes, up to the body."""

    plan: ItemPlan
    write_id: str
    ttl: int
    parts: int
    checksum: bytes
    raw: bytes

    @property
    def body_offset(self) -> int:
        return len(self.raw)

    @property
    def producer(self) -> bytes:
        """The trace context of the span that computed the item, as it was saved; empty where there is none.

        Covered by the checksum of the whole value, not by the header's.
        """
        return _producer_in(self.raw)


@dataclass(frozen=True, slots=True)
class Damage:
    """The reason why bytes are not a usable value, for logs."""

    reason: str


class PendingHead:
    """A head without its checksum: `update` is called with the whole body, in pieces, before `finish`.

    The write id is random unless it is given. `producer` is a trace context of PRODUCER_BYTES, left out where
    the header is too long for it. InvalidRequest when the plan cannot be stored.
    """

    def __init__(self, plan: ItemPlan, *, ttl: float, producer: bytes = b"", write_id: str = "") -> None:
        header, padding = _header_and_padding(_pack_header(plan), producer)
        self.nbytes = _PREFIX.size + len(header) + len(padding)
        if self.nbytes > HEAD_BYTES:
            raise InvalidRequest(
                f"{plan.modality}: the item's metadata takes {self.nbytes} bytes and must fit {HEAD_BYTES}: "
                "its embeddings lie in too many runs of the prompt; send a shorter file or, of a video, "
                "fewer frames",
                param=plan.modality,
            )
        signed = _PREFIX.pack(
            MAGIC,
            LAYOUT_VERSION,
            len(header),
            max(1, int(ttl)),
            part_count(plan.nbytes),
            bytes.fromhex(write_id) or os.urandom(8),
            b"",
            b"",
        )[:_SIGNED]
        self._signed = signed + xxhash.xxh3_64_digest(signed + header)
        self._rest = header + padding
        self._state = xxhash.xxh3_128(self._signed)
        self._state.update(self._rest)
        self._left = plan.nbytes

    def update(self, piece: Buffer) -> None:
        """The next bytes of the body."""
        self._state.update(piece)
        self._left -= len(piece)

    def finish(self) -> bytes:
        """Prefix, header and padding, which go before the body; InvalidRequest for another size."""
        if self._left:
            raise InvalidRequest(
                f"the body has not the plan's bytes: {self._left} are missing", param="nbytes"
            )
        return self._signed + bytes(self._state.digest()) + self._rest


def check_plan(plan: ItemPlan) -> None:
    """InvalidRequest for a plan that no stored value can have."""
    PendingHead(plan, ttl=1)


def encode_head(
    plan: ItemPlan, body: Buffer, *, ttl: float, producer: bytes = b"", write_id: str = ""
) -> bytes:
    """The head that goes before `body`, as `PendingHead` makes it; InvalidRequest as it."""
    head = PendingHead(plan, ttl=ttl, producer=producer, write_id=write_id)
    head.update(body)
    return head.finish()


def write_id_of(head: bytes) -> str:
    """The write id in a head from `encode_head`."""
    write_id: bytes = _PREFIX.unpack_from(head)[5]
    return write_id.hex()


def _header_and_padding(header: bytes, producer: bytes) -> tuple[bytes, bytes]:
    """The header, in the form that leaves room for the producer, and the padding, with the producer in it."""
    if producer and len(producer) == PRODUCER_BYTES:
        note = _PRODUCER_MARK + producer
        for form in _forms(header):
            padding = _padding_after(form)
            if padding >= len(note) and _PREFIX.size + len(form) + padding <= HEAD_BYTES:
                return form, note.ljust(padding, b"\0")
    return header, bytes(_padding_after(header))


def _padding_after(header: bytes) -> int:
    return -(_PREFIX.size + len(header)) % ALIGNMENT


def _forms(header: bytes) -> Iterator[bytes]:
    """The header, and equal ones that are longer: a name's length takes 1, 2 or 4 further bytes.

    With them, one of four has a padding of 42 bytes or more.
    """
    yield header
    fields: JsonObject = msgpack.unpackb(header)
    for lead, width in ((0xD9, 1), (0xDA, 2), (0xDB, 4)):
        names = {name: bytes([lead]) + len(name).to_bytes(width, "big") + name.encode() for name in fields}
        yield bytes([0x80 | len(fields)]) + b"".join(
            names[name] + msgpack.packb(value, use_bin_type=True) for name, value in fields.items()
        )


def _producer_in(raw: bytes) -> bytes:
    """The producer in the padding of a decoded head."""
    start = _PREFIX.size + int.from_bytes(raw[6:8], "little")
    note = raw[start : start + len(_PRODUCER_MARK) + PRODUCER_BYTES]
    whole = len(note) == len(_PRODUCER_MARK) + PRODUCER_BYTES and note.startswith(_PRODUCER_MARK)
    return note[len(_PRODUCER_MARK) :] if whole else b""


def part_count(nbytes: int) -> int:
    """Number of parts of a body of `nbytes`; 0 when it is stored in one value with its header."""
    return 0 if nbytes <= PART_BYTES else -(-nbytes // PART_BYTES)


def decode_head(raw: Buffer, *, mm_hash: str, namespace: str) -> Head | Damage:
    """The head of a value that was stored under `mm_hash`, from its first 4 KiB or more."""
    raw = bytes(raw[:HEAD_BYTES])
    if len(raw) < _PREFIX.size:
        return Damage(f"{len(raw)} bytes are too few for a value")
    magic, version, length, ttl, parts, write_id, header_sum, checksum = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        return Damage("not a value of this store")
    if version != LAYOUT_VERSION:
        return Damage(f"layout version {version}, not {LAYOUT_VERSION}")
    header = raw[_PREFIX.size : _PREFIX.size + length]
    if len(header) != length:
        return Damage("the header is cut off")
    if xxhash.xxh3_64_digest(raw[:_SIGNED] + header) != header_sum:
        return Damage("the header's checksum is wrong")
    plan = _plan_of(header)
    if isinstance(plan, Damage):
        return plan
    if plan.mm_hash != mm_hash or plan.namespace != namespace:
        return Damage("a value of another item or namespace")
    if parts != part_count(plan.nbytes):
        return Damage(f"{parts} parts do not hold {plan.nbytes} bytes")
    end = _PREFIX.size + length
    end += -end % ALIGNMENT
    return Head(plan, write_id.hex(), ttl, parts, checksum, raw[:end])


def verify(head: Head, bodies: Iterable[Buffer]) -> Damage | None:
    """None when `bodies`, joined, are the body that `head` was written for."""
    pieces = (head.raw[: CHECKSUM_SPAN[0]], head.raw[CHECKSUM_SPAN[1] :], *bodies)
    if sum(len(piece) for piece in pieces[2:]) != head.plan.nbytes:
        return Damage("the body is cut off or too long")
    if _digest(pieces) != head.checksum:
        return Damage("the checksum is wrong")
    return None


def damage_digest(raw: Buffer) -> str:
    """SHA-1 in hex of a value's first 4 KiB: names the damaged value that a save may replace."""
    return hashlib.sha1(raw[:HEAD_BYTES], usedforsecurity=False).hexdigest()


def _digest(pieces: Iterable[Buffer]) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return bytes(state.digest())


def _pack_header(plan: ItemPlan) -> bytes:
    fields: JsonObject = {
        "mm_hash": plan.mm_hash,
        "namespace": plan.namespace,
        "modality": plan.modality,
        "dtype": plan.dtype,
        "shape": (plan.rows, plan.width),
        "nbytes": plan.nbytes,
        "rows": plan.rows,
        "width": plan.width,
        "length": plan.length,
        "runs": None if plan.runs is None else [number for run in plan.runs for number in run],
        "grid": plan.grid_thw,
    }
    if plan.layout:
        fields[_LAYOUT] = plan.layout
    if plan.scales:
        fields[_SCALES] = plan.scales
    damage = _check(fields)
    if damage is not None:
        raise InvalidRequest(f"the item's plan cannot be stored: {damage.reason}", param="plan")
    return bytes(msgpack.packb(fields, use_bin_type=True))


def _plan_of(header: bytes) -> ItemPlan | Damage:
    try:
        fields = msgpack.unpackb(
            header,
            strict_map_key=True,
            max_str_len=512,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=2048,
            max_map_len=len(_FIELDS) + 2,
        )
    except (ValueError, msgpack.UnpackException):
        return Damage("the header is no msgpack of ours")
    if not isinstance(fields, dict) or fields.keys() - {_LAYOUT, _SCALES} != _FIELDS:
        return Damage("the header's fields are not those of this layout")
    damage = _check(fields)
    if damage is not None:
        return damage
    flat = fields["runs"]
    return ItemPlan(
        mm_hash=fields["mm_hash"],
        namespace=fields["namespace"],
        modality=fields["modality"],
        rows=fields["rows"],
        width=fields["width"],
        dtype=fields["dtype"],
        length=fields["length"],
        runs=None if flat is None else tuple(zip(flat[::2], flat[1::2], strict=True)),
        grid_thw=tuple(fields["grid"]),
        layout=tuple(fields.get(_LAYOUT, ())),
        scales=fields.get(_SCALES, 0),
    )


def _check(fields: JsonObject) -> Damage | None:
    """What is wrong with a header's fields, whose types are not known yet; None if they are valid."""
    if not all(isinstance(fields[name], str) for name in ("mm_hash", "namespace", "modality", "dtype")):
        return Damage("a name is no text")
    if fields["dtype"] not in DTYPE_BYTES:
        return Damage("an unknown dtype")
    scales = fields.get(_SCALES, 0)
    if not all(map(_is_count, (scales, *(fields[name] for name in ("nbytes", "rows", "width", "length"))))):
        return Damage("a size is no count")
    if not all(_are_counts(counts) for counts in (fields["shape"], fields["grid"], fields.get(_LAYOUT, ()))):
        return Damage("a shape, grid or layout is no list of counts")
    shape: Sequence[int] = fields["shape"]
    if len(shape) > MAX_NDIM:
        return Damage(f"{len(shape)} dimensions, at most {MAX_NDIM}")
    if not scales_fit(fields["dtype"], fields["width"], scales):
        return Damage("scales that do not fit the dtype and the width")
    of_scales = fields["rows"] * scales * SCALE_BYTES
    if prod(shape) * DTYPE_BYTES[fields["dtype"]] + of_scales != fields["nbytes"]:
        return Damage("nbytes is not the product of the shape")
    if tuple(shape) != (fields["rows"], fields["width"]):
        return Damage("the shape is not rows x width")
    return _check_runs(fields["runs"], rows=fields["rows"], length=fields["length"])


def _check_runs(flat: object, *, rows: int, length: int) -> Damage | None:
    if flat is None:
        # A cross-attention item has rows but no span.
        return None if length in (0, rows) else Damage(f"{length} placeholders for {rows} rows")
    if not _are_counts(flat) or len(flat) % 2:
        return Damage("runs are no pairs of counts")
    end = 0
    for start, count in zip(flat[::2], flat[1::2], strict=True):
        if start < end or count == 0:
            return Damage("runs overlap or are empty")
        end = start + count
    if end > length or sum(flat[1::2]) != rows:
        return Damage("runs do not fit the span and its rows")
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _are_counts(values: object) -> TypeGuard[Sequence[int]]:
    return isinstance(values, (list, tuple)) and all(_is_count(value) for value in values)
