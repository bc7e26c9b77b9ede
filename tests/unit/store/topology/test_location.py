"""What --store may name, and the slot maps of a Redis Cluster."""

from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError
from triptych.registry import leases, registry, scaling
from triptych.store import keys
from triptych.store.address import StoreAddress
from triptych.store.tls import StoreTls
from triptych.store.topology.cluster import SLOTS, SlotMap, key_of, slot_of
from triptych.store.topology.location import (
    Kind,
    StoreLocation,
    has_password,
    is_on_this_machine,
    parse_store,
    redacted,
    with_password,
    with_tls_files,
)


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("unix:///run/s.sock", StoreLocation(Kind.SERVER, (StoreAddress(path="/run/s.sock"),))),
        ("redis://h:7000/3", StoreLocation(Kind.SERVER, (StoreAddress(host="h", port=7000, db=3),))),
        (
            "redis+cluster://u:p%40@a,b:7000,[::1]:7001",
            StoreLocation(
                Kind.CLUSTER,
                (
                    StoreAddress(host="a", port=6379, username="u", password="p@"),
                    StoreAddress(host="b", port=7000, username="u", password="p@"),
                    StoreAddress(host="::1", port=7001, username="u", password="p@"),
                ),
            ),
        ),
        (
            "redis+sentinel://a,b:1/embeddings/2",
            StoreLocation(
                Kind.SENTINEL,
                (StoreAddress(host="a", port=26379, db=2), StoreAddress(host="b", port=1, db=2)),
                "embeddings",
            ),
        ),
        (
            "rediss+cluster://a:1?ssl_ca_certs=/ca",
            StoreLocation(Kind.CLUSTER, (StoreAddress(host="a", port=1, tls=StoreTls("/ca")),)),
        ),
    ],
)
def test_a_url_names_a_server_a_cluster_or_sentinels(text: str, location: StoreLocation) -> None:
    assert parse_store(text) == location


@pytest.mark.parametrize(
    "text", ["redis://a redis://b", "redis://a,redis://b", " redis://a ,  redis://b ", "redis://a\nredis://b"]
)
def test_several_addresses_are_refused_and_a_redis_cluster_is_named_as_the_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="names 2 addresses.*Redis Cluster.*redis[+]cluster://"):
        parse_store(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "redis://host:port/0"),
        ("redis+cluster://h/1", "only number 0"),
        ("redis+cluster://", "redis[+]cluster://host:port"),
        ("redis+cluster://a,,b", "redis[+]cluster://host:port"),
        ("redis+cluster://a:x,b", "not a store address"),
        ("redis+other://a", "unsupported scheme"),
        ("redis+sentinel://a", "and not their primary"),
        ("redis+sentinel://a/", "and not their primary"),
        ("redis+sentinel://a/n/x", "not a number"),
        ("redis://u:hush12@a redis+cluster://b", "names 2 addresses"),
        ("redis://a,b", "several hosts"),
        ("redis+cluster://u:12/hush@a", "percent-encoded"),
        ("redis+cluster://u:12?hush@a", "percent-encoded"),
        ("redis+cluster://u:12#hush@a", "percent-encoded"),
        ("redis+sentinel://u:12/hush@a/n", "percent-encoded"),
    ],
)
def test_another_value_is_refused_with_the_remedy_and_without_its_password(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_store(text)
    assert "12" not in str(caught.value) and "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis+cluster://u:hush@a,b:7000", "redis+cluster://u:***@a:6379,b:7000"),
        ("redis+sentinel://:hush@a/n/3", "redis+sentinel://:***@a:26379/n/3"),
        ("redis+cluster://a:1", "redis+cluster://a:1"),
    ],
)
def test_a_value_is_shown_without_its_passwords(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert "hush" not in repr(parse_store(text))
    assert "hush" not in parse_store(text).label
    assert has_password(text) == ("hush" in text)


def test_a_password_and_files_of_tls_go_into_the_url_for_all_of_its_hosts() -> None:
    text = with_tls_files("rediss+sentinel://bob@a,b:1/my/2", StoreTls())
    text = with_password(text, "x/y")
    assert text == "rediss+sentinel://bob:x%2Fy@a:26379,b:1/my/2"
    assert {server.password for server in parse_store(text).servers} == {"x/y"}
    with pytest.raises(ConfigError, match="leave one of them out"):
        with_password("redis://:old@b", "x")
    with pytest.raises(ConfigError, match="rediss://"):
        with_tls_files("redis+cluster://a", StoreTls("/ca"))


def test_a_label_parses_to_the_same_location() -> None:
    for text in ("redis+cluster://a:1,[::1]:2/0", "redis+sentinel://a:1,b:2/n/3", "redis://h:1/2"):
        location = parse_store(text)
        assert location.label == text
        assert parse_store(location.label) == location


def test_a_unix_socket_is_on_this_machine() -> None:
    assert is_on_this_machine("unix:///run/s.sock")
    assert not is_on_this_machine("redis://a")


HASH = "ab" * 32
ROWS = [[0, 5460, [b"10.0.0.1", 6379, b"id"], [b"10.0.0.9", 6379, b"id"]], [5461, 16383, [b"", 7000, b"id"]]]


def test_a_map_names_the_primary_of_each_slot() -> None:
    made = SlotMap.parse(ROWS, "asked")
    assert made.owner(0) == made.owner(5460) == ("10.0.0.1", 6379)
    assert made.owner(5461) == ("asked", 7000), "a server that does not know its own host"
    assert made.parts() == {("10.0.0.1", 6379): 5461 / SLOTS, ("asked", 7000): 10923 / SLOTS}


def test_a_moved_slot_has_another_owner() -> None:
    made = SlotMap.parse(ROWS, "asked")
    made.move(7, ("new", 1))
    assert made.owner(7) == ("new", 1)
    assert made.owner(8) == ("10.0.0.1", 6379)
    made.move(SLOTS, ("new", 1))


def test_keys_about_a_shard_lie_on_it_and_follow_its_slots() -> None:
    made = SlotMap.parse(ROWS, "asked")

    def place(slot: int) -> object:
        return made.owner(slot_of(keys.usage(str(made.shard(slot)), "t", "embedding")[1]))

    for slot in (0, 5460, 5461, SLOTS - 1):
        assert place(slot) == made.owner(slot)
    for moved in range(3000):
        made.move(moved, ("new", 1))
    assert place(0) == ("new", 1)
    assert place(5460) == made.owner(5460)


def test_slots_without_a_server_have_no_owner() -> None:
    assert SlotMap.parse(ROWS[:1], "asked").owner(6000) is None
    assert SlotMap([]).owner(0) is None


@pytest.mark.parametrize("rows", [[[0, 20000, [b"h", 1]]], [[b"0", 1, [b"h", 1]]], [[0, 1, b"h"]]])
def test_another_reply_is_refused(rows: list[list[object]]) -> None:
    with pytest.raises(ValueError):
        SlotMap.parse(rows, "asked")


def test_all_keys_of_an_item_are_in_one_slot() -> None:
    assert slot_of(keys.embedding(HASH)) == slot_of(keys.part(HASH, "0011", 3)) == slot_of(f"{{{HASH}}}")
    assert slot_of("foo") == 12182, "as the servers compute it"


@pytest.mark.parametrize(
    "names",
    [
        leases.KEYS,
        [*registry.WORKER_KEYS, keys.PROXIES, keys.EPOCH],
        scaling.DECISION_KEYS,
        keys.demands("encoder"),
    ],
)
def test_the_keys_of_each_script_are_in_one_slot(names: list[str]) -> None:
    assert len({slot_of(name) for name in names}) == 1


def test_the_key_of_a_command_is_found() -> None:
    assert key_of(("EVAL", "text", 2, "a", "b", "argument")) == "a"
    assert key_of(("EVAL", "text", 0, "argument")) is None
    assert key_of(("GETRANGE", "a", 0, 1)) == "a"
    assert key_of(("PING",)) is None
    assert key_of(("INFO", "memory")) is None
