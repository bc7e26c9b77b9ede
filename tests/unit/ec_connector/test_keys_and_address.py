from __future__ import annotations

import pytest

from triptych.ec_connector import keys
from triptych.ec_connector.address import StoreAddress, command, parse_store_url
from triptych.errors import ConfigError, InvalidRequest

HASH = "ab" * 32


def test_all_keys_of_an_item_carry_its_tag() -> None:
    assert keys.embedding(HASH) == f"ec:{{{HASH}}}"
    assert keys.part(HASH, "0011223344556677", 2) == f"ec:{{{HASH}}}:0011223344556677:2"
    assert keys.lease(HASH) == f"lease:{{{HASH}}}"


@pytest.mark.parametrize("name", ["", "../escaped", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "{x}" + "a" * 61])
def test_names_that_are_no_hash_never_become_keys(name: str) -> None:
    for make in (keys.embedding, keys.lease):
        with pytest.raises(InvalidRequest):
            make(name)


@pytest.mark.parametrize(
    "url,address",
    [
        ("unix:///run/s.sock", StoreAddress(path="/run/s.sock")),
        ("unix://u:p@/run/s.sock?db=2", StoreAddress(path="/run/s.sock", db=2, username="u", password="p")),
        ("redis://h", StoreAddress(host="h")),
        ("redis://h:7000/3", StoreAddress(host="h", port=7000, db=3)),
        ("redis://:p%40@h", StoreAddress(host="h", password="p@")),
        ("redis://[::1]:7000/0", StoreAddress(host="::1", port=7000)),
    ],
)
def test_store_urls_are_taken_apart(url: str, address: StoreAddress) -> None:
    assert parse_store_url(url) == address


@pytest.mark.parametrize("url", ["", "localhost:6379", "rediss://h", "unix://", "redis://h:x", "redis://h/a"])
def test_other_urls_are_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://host:port/0"):
        parse_store_url(url)


def test_no_message_repeats_a_password() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_store_url("rediss://user:secret@h/0")
    assert "secret" not in str(caught.value)
    assert "secret" not in parse_store_url("redis://user:secret@h").label


def test_a_fresh_connection_logs_in_and_selects() -> None:
    assert StoreAddress(host="h").greeting() == []
    full = StoreAddress(host="h", db=2, username="u", password="p")
    assert full.greeting() == [("AUTH", "u", "p"), ("SELECT", "2")]


def test_commands_are_framed_by_lengths() -> None:
    assert command("GET", "a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
