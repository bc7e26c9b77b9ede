"""Fields of a protobuf message, counted before anything is made of them."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.base.request import MAX_PARTS
from triptych.proxy.parsing.lifted import LEAST

#: Fields of one message, those of the messages in it included; numbers of a packed list are one. The largest
#: that is served has four for each of its messages, parts, documents or inputs, and a hundred of its own.
MAX_FIELDS = 4 * MAX_PARTS + 128
#: Fields of a message that is parsed on the event loop.
FEW_FIELDS = 256
_BYTES = 2
_NO_MESSAGE = "the call's message is not one of this method's types"
M = TypeVar("M", bound=Message)


def message_of(raw: bytes, kind: type[M], most: int = MAX_FIELDS) -> M:
    """The message of this type. TooLarge for one with more fields, InvalidRequest for what is none."""
    if not has_at_most(most, raw, kind.DESCRIPTOR):
        raise TooLarge(f"the call's message holds more than {most} fields: send less")
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise InvalidRequest(_NO_MESSAGE) from None


def has_at_most(most: int, raw: bytes, descriptor: Any) -> bool:
    """Whether the message has no more fields: the walk ends at the first one that is too much.

    InvalidRequest for what is no message: protobuf's parser would keep all before the place that is broken.
    """
    pending = [(0, len(raw), descriptor)]
    count = 0
    try:
        while pending:
            at, end, kind = pending.pop()
            while at < end:
                count += 1
                if count > most:
                    return False
                key, at = _varint(raw, at)
                begin, at = _skip(raw, at, key & 7)
                field = kind.fields_by_number.get(key >> 3)
                if key & 7 == _BYTES and field is not None and field.message_type is not None:
                    pending.append((begin, min(at, end), field.message_type))
    except (IndexError, ValueError):
        raise InvalidRequest(_NO_MESSAGE) from None
    return True


def lift_files(raw: bytes, descriptor: Any) -> tuple[bytes, dict[str, memoryview]]:
    """The message, which is known to be sound, with a word in the place of each long file, and these by the
    words: protobuf copies a file twice, each time with the interpreter's lock."""
    files: dict[str, memoryview] = {}
    lifted = _without_files(memoryview(raw), 0, len(raw), descriptor, secrets.token_hex(16), files)
    return b"".join(lifted) if files else raw, files


def _without_files(
    raw: memoryview, at: int, end: int, kind: Any, name: str, files: dict[str, memoryview]
) -> list[bytes | memoryview]:
    """The pieces of a message between two places; the files go into `files`.

    No inner function: one that calls itself is a cycle, which would keep the message.
    """
    made: list[bytes | memoryview] = []
    kept = at
    while at < end:
        key, begin = _varint(raw, at)
        first = begin
        begin, at = _skip(raw, begin, key & 7)
        field = kind.fields_by_number.get(key >> 3)
        if key & 7 != _BYTES or field is None or at - begin < LEAST:
            continue
        if field.message_type is not None:
            inner = _without_files(raw, begin, at, field.message_type, name, files)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            word = f"{name}{len(files)}"
            files[word] = raw[begin:at]
            inner = [word.encode()]
        else:
            continue
        made += [raw[kept:first], _varint_bytes(sum(map(len, inner))), *inner]
        kept = at
    return [*made, raw[kept:end]]


def _varint_bytes(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def _skip(raw: bytes | memoryview, at: int, wire_type: int) -> tuple[int, int]:
    """Where a field's content begins and ends."""
    match wire_type:
        case 0:
            return at, _varint(raw, at)[1]
        case 1:
            return at, at + 8
        case 5:
            return at, at + 4
        case 2:
            size, begin = _varint(raw, at)
            return begin, begin + size
    raise ValueError("groups are not used")


def _varint(raw: bytes | memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not a number")
