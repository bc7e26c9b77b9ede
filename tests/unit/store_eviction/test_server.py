"""The model of a server's eviction."""

from __future__ import annotations

from benchmarks.store_eviction.server import EvictingServer


def filled(policy: str, ttls: dict[int, float]) -> EvictingServer:
    """A full server whose key n was set at second n."""
    server = EvictingServer(len(ttls), policy)
    for key, ttl in ttls.items():
        server.save(key, 1, float(key), ttl)
    return server


def kept(server: EvictingServer, now: float) -> list[int]:
    return [key for key in range(200) if server.look_up(key, now, 1e9)]


def test_least_recently_used_keys_are_evicted_first_by_and_large() -> None:
    server = filled("volatile-lru", dict.fromkeys(range(100), 1e6))
    for key in range(100, 150):
        server.save(key, 1, float(key), 1e6)
    survivors = kept(server, 150.0)
    assert len(survivors) == 101, "one more than fits: room is made before a key is set, not for it"
    assert sum(survivors) / len(survivors) > 90, "the older half is mostly gone"


def test_keys_that_expire_first_are_evicted_first_whenever_they_were_used() -> None:
    server = filled("volatile-ttl", {key: 1e6 - 1e3 * key for key in range(100)})
    for key in range(100, 150):
        server.save(key, 1, float(key), 1e7)
    survivors = kept(server, 150.0)
    old = [key for key in survivors if key < 100]
    assert sum(old) / len(old) < 40, "the youngest had the shortest TTL"


def test_a_look_up_begins_the_ttl_anew_and_an_expired_key_is_gone() -> None:
    server = EvictingServer(10, "volatile-ttl")
    server.save(1, 4, 0.0, 10.0)
    assert server.look_up(1, 9.0, 10.0)
    assert server.look_up(1, 18.0, 10.0)
    assert not server.look_up(1, 28.5, 10.0)
    assert server.used == 0
