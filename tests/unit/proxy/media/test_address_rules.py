"""Addresses: only public unicast ones, in every spelling and disguise."""

from __future__ import annotations

import ipaddress

import pytest

from triptych.base.errors import ConfigError
from triptych.proxy.media.connection import AddressRules, is_public, parse_rules

_PUBLIC = """
1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.1 169.253.255.255
169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0 192.0.3.0 192.167.255.255 192.169.0.0
198.17.255.255 198.20.0.0 198.51.99.255 198.51.101.0 203.0.112.255 203.0.114.0 223.255.255.255
2001:4860:4860::8888 2606:4700::1111 2001:200:: 2003::1 2a00:1450:4001:81b::200e 2620:4f:7fff::1 3ffe::1
"""
_NOT_PUBLIC = """
0.0.0.0 0.0.0.1 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.100.100.200 100.127.255.255 127.0.0.0
127.0.0.1 127.1.2.3 127.255.255.255 169.254.0.0 169.254.169.254 169.254.170.2 169.254.255.255 172.16.0.0
172.17.0.1 172.31.255.255 192.0.0.0 192.0.0.9 192.0.0.10 192.0.0.192 192.0.0.255 192.0.2.1 192.31.196.1
192.52.193.1 192.88.99.1 192.88.99.2 192.168.0.0 192.168.255.255 192.175.48.1 198.18.0.0 198.19.255.255
198.51.100.1 203.0.113.255 224.0.0.0 224.0.0.1 239.255.255.255 240.0.0.0 255.255.255.254 255.255.255.255
:: ::1 ::2 ::127.0.0.1 ::7f00:1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:7f00:1 ::ffff:10.0.0.1 ::ffff:8.8.8.8
::ffff:169.254.169.254 ::ffff:0:127.0.0.1 64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe 64:ff9b::8.8.8.8
64:ff9b:1::127.0.0.1 100::1 100:0:0:1::1 2001::1 2001:0:7f00:1:: 2001:1::1 2001:2::1 2001:10::1 2001:20::1
2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe::1 2002:808:808::1 2620:4f:8000::1 3fff::1 4000::1 5f00::1
fc00::1 fd00::1 fd00:ec2::254 fdff:ffff::1 fe00::1 fe80::1 fe80::a9fe:a9fe fec0::1 febf::1 ff00::1 ff02::1
ff0e::1 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 2a00::5efe:7f00:1 2a00::200:5efe:a9fe:a9fe
fe80::1%eth0 2606:4700::1111%1
"""
PUBLIC, NOT_PUBLIC = _PUBLIC.split(), _NOT_PUBLIC.split()


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_is_allowed(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))
    assert AddressRules().allows("a.example", ipaddress.ip_address(text))


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_an_address_that_is_not_public_or_carries_another_is_refused(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert not AddressRules().allows("a.example", ipaddress.ip_address(text))


def test_nothing_is_public_that_python_calls_private_or_multicast() -> None:
    for text in PUBLIC:
        address = ipaddress.ip_address(text)
        assert not (address.is_private or address.is_multicast or address.is_loopback or address.is_reserved)


def test_a_network_is_allowed_as_it_is_written_and_not_in_disguise() -> None:
    rules = parse_rules("", "127.0.0.0/8, fd12::/16")
    allowed = [t for t in NOT_PUBLIC if rules.allows("h", ipaddress.ip_address(t))]
    assert allowed == ["127.0.0.0", "127.0.0.1", "127.1.2.3", "127.255.255.255"]
    assert rules.allows("h", ipaddress.ip_address("fd12:3::1"))
    assert not rules.allows("h", ipaddress.ip_address("fd13::1"))


def test_a_trusted_host_may_have_any_address_and_only_that_host() -> None:
    rules = parse_rules("Minio.Internal, [::1]", "")
    private = ipaddress.ip_address("10.0.0.1")
    assert rules.allows("minio.internal", private)
    assert rules.allows("MINIO.internal.", private)
    assert rules.allows("::1", ipaddress.ip_address("::1"))
    for other in ("x.minio.internal", "internal", "minio.internal.example", ""):
        assert not rules.allows(other, private)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "everything", "10.0.0.0/33", "10.0.0", "*"])
def test_what_is_no_network_is_a_config_error_that_names_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--allow-media-networks"):
        parse_rules("", text)
