"""Whose connection it is: the socket's address, or what a trusted proxy tells; never a client's own word."""

from __future__ import annotations

import ipaddress
import struct

import pytest

from triptych.base.errors import ConfigError
from triptych.proxy.http.peers import BadHeader, TrustedProxies, parse_header, peer_holder


@pytest.mark.parametrize(
    ("address", "holder"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix:", ""),
    ],
)
def test_an_address_is_a_holder_and_of_ipv6_its_network_is(address: str, holder: str) -> None:
    assert peer_holder(address) == holder


def test_a_trusted_proxy_itself_holds_for_many() -> None:
    trusted = TrustedProxies("10.0.0.0/8, fd00::/8")
    assert [trusted.holder(name) for name in ("10.1.2.3", "fd00::1", "::ffff:10.1.2.3")] == ["", "", ""]
    assert trusted.holder("192.0.2.7") == "192.0.2.7"
    assert TrustedProxies().holder("10.1.2.3") == "10.1.2.3"


@pytest.mark.parametrize(
    ("header", "holder"),
    [
        (b"192.0.2.7", "192.0.2.7"),
        (b"192.0.2.7:4711", "192.0.2.7"),
        (b"[2001:db8::1]:4711", "2001:db8::/64"),
        (b"192.0.2.7, 10.0.0.2", "192.0.2.7"),
        (b"198.51.100.1, 192.0.2.7", "192.0.2.7"),
        (b"198.51.100.1, 192.0.2.7, 10.0.0.2, 10.0.0.3", "192.0.2.7"),
        (b"198.51.100.1, nonsense", ""),
        (b"10.0.0.2", ""),
        (b"", ""),
        (b"1.1.1.1," * 5000 + b"192.0.2.7", "192.0.2.7"),
    ],
)
def test_the_last_address_that_is_no_proxys_is_the_clients(header: bytes, holder: str) -> None:
    assert TrustedProxies("10.0.0.0/8").forwarded(header) == holder


def test_what_is_no_network_is_refused_by_the_flags_name() -> None:
    with pytest.raises(ConfigError, match="--trusted-proxies 'gateway' is"):
        TrustedProxies("10.0.0.0/8,gateway")
    with pytest.raises(ConfigError, match="--proxy-protocol"):
        TrustedProxies(proxy_protocol=True)


SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"


def version_2(source: str, *, command: int = 0x21, extra: bytes = b"") -> bytes:
    address = ipaddress.ip_address(source)
    family = 0x11 if address.version == 4 else 0x21
    body = address.packed * 2 + struct.pack("!HH", 4711, 8000) + extra
    return SIGNATURE + struct.pack("!BBH", command, family, len(body)) + body


HEADERS = {
    b"PROXY TCP4 192.0.2.7 192.0.2.1 4711 8000\r\n": "192.0.2.7",
    b"PROXY TCP6 2001:db8::1 2001:db8::2 4711 8000\r\n": "2001:db8::1",
    b"PROXY UNKNOWN\r\n": "",
    version_2("192.0.2.7"): "192.0.2.7",
    version_2("2001:db8::1", extra=b"\x04\x00\x05hello"): "2001:db8::1",
    version_2("192.0.2.7", command=0x20): "",
    SIGNATURE + struct.pack("!BBH", 0x21, 0x31, 216) + bytes(216): "",
}


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_header_is_read_to_its_end_in_whatever_pieces_it_comes(header: bytes) -> None:
    for size in range(len(header)):
        assert parse_header(header[:size]) is None
    assert parse_header(header + b"GET / HTTP/1.1\r\n") == (HEADERS[header], len(header))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"PROXY TCP4 192.0.2.7\r\n",
        b"PROXY TCP4 nowhere 192.0.2.1 4711 8000\r\n",
        b"PROXY " + b"x" * 200,
        SIGNATURE + struct.pack("!BBH", 0x31, 0x11, 12) + bytes(12),
        SIGNATURE + struct.pack("!BBH", 0x21, 0x11, 4) + bytes(4),
        SIGNATURE + struct.pack("!BBH", 0x21, 0x11, 60000),
        b"\x16\x03\x01\x02\x00",
    ],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(BadHeader):
        parse_header(data)
