"""Rules for the addresses that media may be fetched from: public ones, and those that flags allow."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from triptych.proxy.http.peers import Address, Network, parse_networks

#: Own tables, since `ipaddress.is_global` differs between Python's patch releases.
_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; clouds put metadata services here
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local; clouds' metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # IETF protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # automatic multicast tunnelling
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
#: The only block allocated for global unicast; mapped, compatible, NAT64 (64:ff9b::), unique local,
#: link-local and multicast addresses are outside.
_GLOBAL_6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # IETF protocol assignments: Teredo, benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: carries any IPv4 address
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
#: Interface ids of ISATAP, which carry any IPv4 address; the universal bit may be set.
_ISATAP = 0x00005EFE
_UNIVERSAL = 0x02000000


def is_public(address: Address) -> bool:
    """Whether the address is global unicast and does not embed another address."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    if address.scope_id is not None or address not in _GLOBAL_6:
        return False
    interface = (int(address) >> 32) & 0xFFFFFFFF
    if interface & ~_UNIVERSAL == _ISATAP:
        return False
    return not any(address in network for network in _NOT_PUBLIC_6)


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Allowed addresses: any of `hosts` (lower case, no final dot), those in `networks`, and public ones."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    def trusts_host(self, host: str) -> bool:
        return canonical_host(host) in self.hosts

    def allows(self, host: str, address: Address) -> bool:
        """Whether a connection for `host` may go to `address`."""
        if self.trusts_host(host) or is_public(address):
            return True
        return any(address.version == network.version and address in network for network in self.networks)


def canonical_host(host: str) -> str:
    """The host in the form that is compared: lower case, without brackets and final dot."""
    return host.strip("[]").lower().removesuffix(".")


def parse_rules(hosts: str, networks: str) -> AddressRules:
    """The rules of the operator's comma-separated flags. ConfigError for an invalid network."""
    return AddressRules(
        frozenset(canonical_host(host) for host in _words(hosts)),
        parse_networks(networks, "--allow-media-networks"),
    )


def _words(text: str) -> Iterable[str]:
    return filter(None, (word.strip() for word in text.split(",")))
