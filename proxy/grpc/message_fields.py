"""How many fields a protobuf message holds, counted before it is parsed.

Parsed, small ones take 50 times their bytes.
"""

from __future__ import annotations

from typing import Any

from triptych.base.errors import TooLarge

#: Fields of one protobuf message, those of the messages in it included; numbers of a packed list are one.
MAX_FIELDS = 1 << 16
_BYTES = 2


def check_fields(raw: bytes, descriptor: Any) -> None:
    """TooLarge for a message of this type with too many fields; broken ones are left to the parser."""
    pending = [(0, len(raw), descriptor)]
    count = 0
    try:
        while pending:
            at, end, kind = pending.pop()
            while at < end:
                count += 1
                if count > MAX_FIELDS:
                    raise TooLarge(f"the call's message holds more than {MAX_FIELDS} fields: send less")
                key, at = _varint(raw, at)
                begin, at = _skip(raw, at, key & 7)
                field = kind.fields_by_number.get(key >> 3)
                if key & 7 == _BYTES and field is not None and field.message_type is not None:
                    pending.append((begin, min(at, end), field.message_type))
    except (IndexError, ValueError):
        return


def _skip(raw: bytes, at: int, wire_type: int) -> tuple[int, int]:
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


def _varint(raw: bytes, at: int) -> tuple[int, int]:
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
