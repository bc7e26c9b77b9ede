"""Peers: the clients' addresses as quotas know them, also behind a proxy that the operator trusts."""

from __future__ import annotations

import ipaddress
import struct
from functools import lru_cache

from triptych.base.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Elements of X-Forwarded-For that are read, from the right.
_MAX_HOPS = 32


class TrustedProxies:
    """The gateways whose X-Forwarded-For about a client's address counts; those of `--trusted-proxies`.

    `proxy_protocol`: their connections begin with a header of the PROXY protocol. Otherwise they are HTTP
    gateways, which add to X-Forwarded-For.
    """

    def __init__(self, networks: str = "", *, proxy_protocol: bool = False) -> None:
        self._networks: tuple[Network, ...] = parse_networks(networks, "--trusted-proxies")
        if proxy_protocol and not self._networks:
            raise ConfigError("--proxy-protocol: name the gateways that send its header in --trusted-proxies")
        self.proxy_protocol = proxy_protocol
        self.trusts = lru_cache(4096)(self._trusts)

    def holder(self, address: str) -> str:
        """What holds a quota for a connection from there; a gateway's are those of many: it has no bound."""
        return "" if self.trusts(address) else peer_holder(address)

    def forwarded(self, header: bytes) -> str:
        """The holder that X-Forwarded-For tells: the last address that is not a trusted proxy's.

        What stands left of it is the client's own word. Empty where there is no such address.
        """
        for element in reversed(header.decode("latin-1").rsplit(",", _MAX_HOPS)[-_MAX_HOPS:]):
            address = _without_port(element.strip())
            if not self.trusts(address):
                return peer_holder(address)
        return ""

    def _trusts(self, address: str) -> bool:
        if not self._networks or (parsed := _parse(address)) is None:
            return False
        return any(parsed.version == network.version and parsed in network for network in self._networks)


def parse_networks(text: str, flag: str) -> tuple[Network, ...]:
    """The networks of a comma-separated flag. ConfigError for an invalid one."""
    return tuple(_network(word.strip(), flag) for word in text.split(",") if word.strip())


def _network(text: str, flag: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError(
            f"{flag} {text!r} is not a network: write it like 10.1.0.0/16 or fd12::/16"
        ) from None


def plain_address(address: str) -> str:
    """The address in one spelling: an IPv4 address that is mapped into IPv6 is one of IPv4."""
    parsed = _parse(address)
    return "" if parsed is None else str(parsed)


def peer_holder(address: str) -> str:
    """The holder of quotas for an address: of IPv6 its network of 64 bits; empty for an invalid one."""
    parsed = _parse(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return "" if parsed is None else str(parsed)


def _parse(address: str) -> Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _without_port(element: str) -> str:
    if element.startswith("["):
        return element[1:].partition("]")[0]
    return element.partition(":")[0] if element.count(":") == 1 else element


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
