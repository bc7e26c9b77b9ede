from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.ec_connector.base import ECTransferConfig
from triptych.store import keys
from triptych.store.address import StoreAddress, parse_store_url, redacted
from triptych.store.sockets import command
from triptych.store.tls import StoreTls

HASH = "ab" * 32


def test_all_keys_of_an_item_carry_its_tag() -> None:
    assert keys.embedding(HASH) == f"ec:{{{HASH}}}"
    assert keys.part(HASH, "0011223344556677", 2) == f"ec:{{{HASH}}}:0011223344556677:2"


def test_keys_that_one_script_touches_carry_one_tag() -> None:
    registry = (keys.WORKERS, keys.WORKER_DEADLINES, keys.VERSION, keys.PROXIES, keys.EPOCH)
    assert {name.partition(":")[0] for name in registry} == {"{registry}"}
    leases = (keys.LEASES, keys.LEASE_DEADLINES)
    assert {name.partition(":")[0] for name in leases} == {"{leases}"}
    usage = keys.usage("7", "a" * 16, "embedding")
    assert {name.partition("}")[0] for name in usage} == {"{usage:7"}


@pytest.mark.parametrize("name", ["", "../escaped", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "{x}" + "a" * 61])
def test_names_that_are_no_hash_never_become_keys(name: str) -> None:
    with pytest.raises(InvalidRequest):
        keys.embedding(name)


@pytest.mark.parametrize(
    "url,address",
    [
        ("unix:///run/s.sock", StoreAddress(path="/run/s.sock")),
        ("unix://u:p@/run/s.sock?db=2", StoreAddress(path="/run/s.sock", db=2, username="u", password="p")),
        ("redis://h", StoreAddress(host="h")),
        ("redis://h:7000/3", StoreAddress(host="h", port=7000, db=3)),
        ("redis://:p%40@h", StoreAddress(host="h", password="p@")),
        ("redis://[::1]:7000/0", StoreAddress(host="::1", port=7000)),
        ("rediss://h:7000/3", StoreAddress(host="h", port=7000, db=3, tls=StoreTls())),
        ("rediss://h?ssl_ca_certs=/a%20b/ca.pem", StoreAddress(host="h", tls=StoreTls("/a b/ca.pem"))),
    ],
)
def test_store_urls_are_taken_apart(url: str, address: StoreAddress) -> None:
    assert parse_store_url(url) == address


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://h", "unix://", "redis://h:x", "redis://h/a"])
def test_other_urls_are_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://host:port/0"):
        parse_store_url(url)


def test_no_message_repeats_a_password() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_store_url("http://user:secret@h/0")
    assert "secret" not in str(caught.value)
    assert "secret" not in parse_store_url("redis://user:secret@h").label


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hu/sh@h/0",
        "redis://user:12/hush@h/0",
        "redis://user:12?hush@h",
        "redis://user:12#hush@h",
        "redis://us/er:hush@h",
        "unix://user:12/hush@/run/s.sock",
        "unix://user:hush/@/run/s.sock",
        "hush@h",
        "http://user:hush@h",
        "redis://user:hush@h/hush",
        "rediss://h?hush=12",
        "rediss://h?ssl_ca_certs=x&hush=12",
    ],
)
def test_a_malformed_address_is_refused_and_no_part_of_it_is_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_store_url(url)
    assert "hu" not in str(caught.value) and "12" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("unix:///run/s.sock?db=1", "unix:///run/s.sock?db=1"),
        ("redis://h:7000/3", "redis://h:7000/3"),
        ("redis://u:hush@[::1]:7000/3", "redis://u:***@[::1]:7000/3"),
        ("rediss://u:hush@h?ssl_ca_certs=/ca", "rediss://u:***@h?ssl_ca_certs=/ca"),
        ("unix://:hush@/run/s.sock", "unix://:***@/run/s.sock"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redacted(url) == shown
    assert "hush" not in repr(parse_store_url(url))
    assert "hush" not in repr(ECTransferConfig(store_url=url))


def test_what_a_server_repeats_of_a_login_is_cut_off() -> None:
    address = StoreAddress(host="h", password="hush")
    said = "unknown command 'AUTH', with args beginning with: 'hus"
    assert address.without_password(ValueError(said)) == "unknown command 'AUTH'"
    assert address.without_password("wrong: hush!") == "wrong: ***!"


def test_a_fresh_connection_logs_in_and_selects() -> None:
    assert StoreAddress(host="h").greeting() == [("SELECT", "0")]
    assert StoreAddress(host="h", password="p").greeting() == [("AUTH", "p")]
    full = StoreAddress(host="h", db=2, username="u", password="p")
    assert full.greeting() == [("AUTH", "u", "p"), ("SELECT", "2")]


def test_commands_are_framed_by_lengths() -> None:
    assert command("GET", "a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"


def test_a_label_names_scheme_host_and_port() -> None:
    assert parse_store_url("rediss://u:p@[::1]:7000/3?ssl_ca_certs=/ca").label == "rediss://[::1]:7000/3"
