"""The PROXY protocol, versions 1 and 2: a header with the client's address before a connection's bytes."""

from __future__ import annotations

import ipaddress
import struct

_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_V1_BYTES = 107
_V2_HEAD = 16
#: Addresses and the extensions behind them, which are not read.
MAX_HEADER = 2048
_ADDRESS_BYTES = {1: 4, 2: 16}


class BadHeader(ValueError):
    """A connection that should begin with such a header does not."""


def parse_header(data: bytes) -> tuple[str, int] | None:
    """The client's address and the header's bytes; None where more are needed. BadHeader otherwise.

    The address is empty where the gateway speaks for itself, as in its health checks.
    """
    if data.startswith(_SIGNATURE[: len(data)]):
        return _version_2(data)
    if data.startswith(b"PROXY "[: len(data)]):
        return _version_1(data)
    raise BadHeader("no PROXY header")


def _version_1(data: bytes) -> tuple[str, int] | None:
    line, end, _ = data[:_V1_BYTES].partition(b"\r\n")
    if not end:
        if len(data) >= _V1_BYTES:
            raise BadHeader("a PROXY header without its end")
        return None
    fields = line.decode("latin-1").split(" ")
    if fields[1] == "UNKNOWN":
        return "", len(line) + 2
    if len(fields) != 6 or fields[1] not in ("TCP4", "TCP6"):
        raise BadHeader("a PROXY header of another form")
    return _valid(fields[2]), len(line) + 2


def _version_2(data: bytes) -> tuple[str, int] | None:
    if len(data) < _V2_HEAD:
        return None
    command, family, length = struct.unpack("!BBH", data[12:_V2_HEAD])
    size = _V2_HEAD + length
    if command not in (0x20, 0x21) or size > MAX_HEADER:
        raise BadHeader("a PROXY header of another form")
    if len(data) < size:
        return None
    nbytes = _ADDRESS_BYTES.get(family >> 4, 0)
    if command == 0x20 or not nbytes:
        return "", size
    if length < 2 * nbytes + 4:
        raise BadHeader("a PROXY header without its addresses")
    return str(ipaddress.ip_address(data[_V2_HEAD : _V2_HEAD + nbytes])), size


def _valid(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise BadHeader("a PROXY header without an address") from None
