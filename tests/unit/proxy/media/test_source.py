"""URLs of pictures: one reading of each, or none at all."""

from __future__ import annotations

import pytest

from triptych.base.errors import InvalidRequest
from triptych.proxy.media.source import FileUrl, WebUrl, parse_image_url

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
    source = parse_image_url(text, "field")
    assert isinstance(source, WebUrl)
    assert (source.url.raw_host, source.url.port) == GOOD[text]
    assert source.text == text


@pytest.mark.parametrize("host", ["１２７.0.0.1", "127。0。0。1", "①②⑦.0.0.1"])
def test_a_numeric_host_in_other_letters_is_refused_or_becomes_the_plain_address(host: str) -> None:
    try:
        source = parse_image_url(f"http://{host}/", "field")
    except InvalidRequest:
        return
    assert isinstance(source, WebUrl)
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
        parse_image_url(text, "messages[0].content[1].image_url.url")
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
    assert parse_image_url(text, "field") == FileUrl(path)


def test_data_urls_give_their_content() -> None:
    assert parse_image_url("data:image/webp;base64,AAAA", "field") == "AAAA"
    assert parse_image_url("DATA:image/png;charset=x;base64,AAAA", "field") == "AAAA"


@pytest.mark.parametrize("kind", ["image/svg+xml", "image/tiff", "image/heic", "image/avif", "text/html", ""])
def test_a_data_url_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_image_url(f"data:{kind};base64,AAAA", "field")
