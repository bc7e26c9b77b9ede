"""Peers: the clients' addresses as quotas know them, also behind a proxy that the operator trusts."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from triptych.base.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Elements of X-Forwarded-For that are read, from the right.
_MAX_HOPS = 32


class TrustedProxies:
    """The gateways whose word about a client's address counts; those of `--trusted-proxies`.

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
        """The holder that X-Forwarded-For tells: the last address that is none of the trusted proxies'.

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
            f"{flag}: {text!r} is not a network: write it like 10.1.0.0/16 or fd12::/16"
        ) from None


def plain_address(address: str) -> str:
    """The address in one spelling: an IPv4 address that is mapped into IPv6 is one of IPv4."""
    parsed = _parse(address)
    return "" if parsed is None else str(parsed)


def peer_holder(address: str) -> str:
    """The holder of quotas for an address: of IPv6 its network of 64 bits; empty for what is no address."""
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
