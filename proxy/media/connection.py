"""HTTP GET over connections to allowed addresses only: the host is resolved once, checked and pinned."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from triptych import __version__
from triptych.proxy.http.peers import Address, Network, parse_networks
from triptych.proxy.quotas.current_call import current_call
from triptych.proxy.quotas.quota import Quota, QuotaThreads

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


CONNECT_SECONDS = 5.0
#: Timeout between two reads.
READ_SECONDS = 10.0
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": f"triptych/{__version__}"}

#: Takes (host, port) and returns what `socket.getaddrinfo` does.
LookUpHost = Callable[[str, int], Sequence[tuple[Any, ...]]]


class AddressRefused(Exception):
    """The host has no address, or one that the rules do not allow. The message is for the operator alone."""


class NameUnanswered(Exception):
    """No name server has said in time whether the host has an address."""


def look_up_host(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class MediaConnections:
    """A factory of connections under `rules`. `look_up` resolves names, in threads."""

    def __init__(
        self,
        rules: AddressRules,
        look_ups: Quota,
        *,
        look_up: LookUpHost = look_up_host,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self._rules = rules
        self._look_up = look_up
        self._tls = tls
        self._threads = QuotaThreads(look_ups, "dns")

    def close(self) -> None:
        self._threads.close()

    async def addresses(self, url: URL) -> tuple[Address, ...]:
        """The addresses of the URL's host. AddressRefused when one is not allowed; NameUnanswered."""
        host, port = url.raw_host or "", url.port or 0
        if port not in (80, 443) and port < 1024 and not self._rules.trusts_host(host):
            raise AddressRefused(f"port {port} is below 1024: --allow-media-hosts")
        resolved = await self._resolve(host, port)
        refused = [str(address) for address in resolved if not self._rules.allows(host, address)]
        if refused or not resolved:
            raise AddressRefused(
                f"{', '.join(refused[:4]) or 'no address'} is not public: "
                "--allow-media-hosts, --allow-media-networks"
            )
        return resolved

    async def _resolve(self, host: str, port: int) -> tuple[Address, ...]:
        try:
            return (ipaddress.ip_address(host),)
        except ValueError:
            pass
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                look_up = partial(self._look_up, host, port)
                entries = await self._threads.run(current_call().holder, look_up)
        except (OSError, UnicodeError) as error:  # OSError: also gaierror and TimeoutError
            again = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            if again or isinstance(error, TimeoutError):
                raise NameUnanswered from None
            raise AddressRefused(f"its name does not resolve: {error}") from None
        return tuple(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in entries))

    @asynccontextmanager
    async def get(self, url: URL) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, with its body unread. No redirects, cookies, proxies or credentials.

        Raises AddressRefused, NameUnanswered, QuotaExceeded, aiohttp.ClientError, TimeoutError.
        """
        addresses = await self.addresses(url)
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(addresses),
            use_dns_cache=False,
            force_close=True,
            socket_factory=_only(addresses),
            ssl=self._tls,
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
            ) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            yield response


class _Pinned(AbstractResolver):
    """A resolver that always returns the checked addresses."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


def _only(addresses: Sequence[Address]) -> Callable[[Any], socket.socket]:
    """A socket factory that refuses any address that was not checked."""

    def make(info: Any) -> socket.socket:
        family, kind, proto, _, target = info
        if ipaddress.ip_address(target[0]) not in addresses:
            raise OSError("the address was not checked")
        return socket.socket(family, kind, proto)

    return make
