"""URLs of pictures: one reading of each, or none; of their addresses only public unicast ones."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Callable

import pytest

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.proxy.media.connection import AddressRules, is_public, parse_rules
from triptych.proxy.media.source import FileUrl, ImagePart

GOOD = {
    "http://example.com/a.png": ("example.com", 80),
    "HTTPS://Example.COM/a.png": ("example.com", 443),
    "https://example.com:8443/a%20b.png?x=1&y=%2F": ("example.com", 8443),
    "http://93.184.216.34/": ("93.184.216.34", 80),
    "http://[2606:4700::1111]:8080/x": ("2606:4700::1111", 8080),
    "http://127.0.0.1/": ("127.0.0.1", 80),
    "https://example.com./x": ("example.com.", 443),
    "https://example.com": ("example.com", 443),
    "https://bücher.example/ä.png": ("xn--bcher-kva.example", 443),
    "https://a_b.example/@user/x:y": ("a_b.example", 443),
    "https://example.com/?u=http://a@b/": ("example.com", 443),
    "https://1.2.3.4.example/": ("1.2.3.4.example", 443),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_plain_url_is_read(text: str) -> None:
    source = ImagePart.of_url(text, "field").source
    assert (source.url.raw_host, source.url.port) == GOOD[text]
    assert source.text == text


@pytest.mark.parametrize("host", ["１２７.0.0.1", "127。0。0。1", "①②⑦.0.0.1"])
def test_a_numeric_host_in_other_letters_is_refused_or_becomes_the_plain_address(host: str) -> None:
    try:
        source = ImagePart.of_url(f"http://{host}/", "field").source
    except InvalidRequest:
        return
    assert source.url.raw_host == "127.0.0.1"


_BAD = """
http://ok@127.0.0.1/ http://ok:pw@example.com/ http://@example.com/ http://example.com:80@127.0.0.1/
http://2130706433/ http://0x7f000001/ http://0x7f.0.0.1/ http://0177.0.0.1/ http://017700000001/ http://127.1/
http://127.0.1/ http://127.0.0.1./ http://127.000.000.001/ http://00.0.0.0/ http://0/ http://1/ http://0x/
http://256.1.1.1/ http://1.2.3.4.5/ http://example.1/ http://a.0x1/ http://127.0.0.0x1/
http://[::1%25eth0]/ http://[fe80::1%eth0]/ http://[::1/ http://::1/ http://[127.0.0.1]/ http://[v1.x]/
http:///x http://?x http://#x http:example.com http:/example.com http://.example.com/ http://a..example/
http://exa%6dple.com/ http://127.0.0.1%2eexample.com/ http://example.com:99999/ http://example.com:x/
http://example.com:-1/ http://example.com:0/ http://example.com\\@127.0.0.1/ http://127.0.0.1\\.example/
http://exa*mple.com/ http://a,b/ http://example.com:80:80/ https:// http:
ftp://example.com/a.png gopher://example.com/ javascript:alert(1) blob:x about:blank //example.com/a.png
example.com/a.png jar:http://x!/ dict://x:1/ ldap://x ws://x/ file:passwd file: file://host/etc/passwd
file://127.0.0.1/etc/passwd file:///a%00b unix:///x
"""
BAD = [
    *_BAD.split(),
    "http://example.com/a b",
    "http://example.com/\r\nHost: evil",
    "http://example.com\r\n@127.0.0.1/",
    "http://exam\tple.com/",
    "http://example.com/\x00",
    " http://example.com/",
    "http://example.com/ ",
    "http://example.com/\x7f",
    "http://example.com/\ud800",
    "http://[::ffff:1.2.3.4]\u200b:99999%2e_",
    "file:\ud800",
    "https://example.com/" + "x" * 9000,
    "http://" + "a" * 300 + ".example/",
    "file:///" + "x" * 9000,
    "",
    "x",
]


@pytest.mark.parametrize("text", BAD)
def test_what_parsers_could_read_in_two_ways_is_refused_and_the_field_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ImagePart.of_url(text, "messages[0].content[1].image_url.url")
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:///data/a.png", "/data/a.png"),
        ("file:/data/a.png", "/data/a.png"),
        ("file://localhost/data/a%20b.png", "/data/a b.png"),
        ("FILE:///data/../etc/passwd", "/data/../etc/passwd"),
    ],
)
def test_file_urls_give_their_path(text: str, path: str) -> None:
    assert ImagePart.of_url(text, "field").source == FileUrl(path)


def test_data_urls_give_their_content() -> None:
    assert ImagePart.of_url("data:image/webp;base64,AAAA", "field").source == "AAAA"
    assert ImagePart.of_url("DATA:image/png;charset=x;base64,AAAA", "field").source == "AAAA"


@pytest.mark.parametrize("kind", ["image/svg+xml", "image/tiff", "image/heic", "image/avif", "text/html", ""])
def test_a_data_url_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        ImagePart.of_url(f"data:{kind};base64,AAAA", "field")


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


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200, 256))


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
def test_base64_without_a_prefix_is_called_so(encode: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidRequest, match=r"this is base64, put data:image/png;base64, before it"):
        ImagePart.of_url(encode(PNG).decode(), "field")


@pytest.mark.parametrize(
    "path", ["/home/me/cat.png", "~/cat.png", "./cat.png", "../a/b", "C:\\cats\\1.jpg", "cat.png"]
)
def test_a_path_of_the_clients_machine_is_called_so(path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"not a path: send the file itself as data:image/png;base64,"):
        ImagePart.of_url(path, "field")
