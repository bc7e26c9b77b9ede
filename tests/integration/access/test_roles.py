"""Each role can do what it needs in the store, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from support.data.items import make_plan
from support.stores.redis_cluster import redis_cluster
from support.stores.roles import USES, recorded_commands, small_parts
from support.stores.server import StoreServer
from support.stores.users import guarded_server, role_password, role_url
from triptych.apps.access import (
    IN_CLUSTERS,
    OPTIONAL_ROLES,
    ROLES,
    grants_of,
    password_hash,
    rules,
    user_name,
)
from triptych.store import keys
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.topology.cluster import slot_of

__all__ = ["small_parts"]

EMBEDDING = keys.embedding(make_plan("whole").mm_hash)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with guarded_server(tmp_path_factory.mktemp("acl")) as server:
        yield server


def allows(grant: tuple[str, str], asked: tuple[str, str]) -> bool:
    return grant[0] == asked[0] and fnmatchcase(asked[1], grant[1])


@pytest.mark.usefixtures("small_parts")
async def test_every_role_runs_all_that_it_is_allowed_and_nothing_beside(server: StoreServer) -> None:
    server.call("FLUSHALL")
    for role, use in USES.items():
        with recorded_commands(server) as record:
            await use(role_url(server.url, role, db=1))
        asked = {(name, key) for name, key in record.asked if name not in ("auth", "monitor")}
        granted = grants_of(role)
        # What a Redis Cluster alone is asked: tests/integration/access/test_roles.py.
        expected = granted - {grant for use in IN_CLUSTERS for grant in use.grants()}
        beside = {one for one in asked if not any(allows(grant, one) for grant in granted)}
        unused = {grant for grant in expected if not any(allows(grant, one) for one in asked)}
        assert not beside, role
        assert not unused, role
    assert server.call("ACL", "LOG") == []


REFUSED = {
    "pd": [
        ("SET", EMBEDDING, "forged"),
        ("UNLINK", EMBEDDING),
        ("EVAL", "return redis.call('UNLINK', KEYS[1])", "1", EMBEDDING),
        ("EVAL", "return redis.call('SET', ARGV[1], 'forged')", "0", EMBEDDING),
        ("HGETALL", keys.LEASES),
        ("HSET", keys.DECISIONS, "encoder", "x"),
    ],
    "proxy": [
        ("SET", EMBEDDING, "forged"),
        ("GET", EMBEDDING),
        ("EVAL", "return redis.call('SET', KEYS[1], 'forged')", "1", EMBEDDING),
        ("HSET", keys.WORKERS, "pd 10.0.0.1:1", "forged"),
        ("EVAL", "return redis.call('HSET', KEYS[1], 'pd x', 'forged')", "1", keys.WORKERS),
    ],
    "encoder": [
        ("GET", EMBEDDING),
        ("HSET", keys.DECISIONS, "encoder", "x"),
        ("SET", keys.EPOCH, "forged"),
        ("SET", "other", "x"),
    ],
    "vllm": [
        ("HGETALL", keys.LEASES),
        ("HSET", keys.WORKERS, "pd 10.0.0.1:1", "forged"),
        ("EVAL", "return redis.call('HSET', KEYS[1], 'pd x', 'forged')", "1", keys.WORKERS),
        ("SET", keys.EPOCH, "forged"),
        ("SET", "other", "x"),
        ("UNLINK", keys.EPOCH),
    ],
}
ALL = [
    *(("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"), ("CONFIG", "SET", "maxmemory", "1")),
    *(("CONFIG", "GET", "*"), ("ACL", "SETUSER", "x"), ("ACL", "LIST")),
    *(("MONITOR",), ("SHUTDOWN",), ("CLIENT", "LIST"), ("SCRIPT", "FLUSH"), ("SUBSCRIBE", "x")),
    *(
        ("REPLICAOF", "no", "one"),
        ("SWAPDB", "0", "1"),
        ("DUMP", EMBEDDING),
        ("MIGRATE", "h", "1", "k", "0", "1"),
    ),
]


@pytest.mark.parametrize("role", [*ROLES, *OPTIONAL_ROLES])
async def test_no_role_may_do_what_another_does_nor_what_an_operator_does(server, role):
    store = await EmbeddingStore.connect(role_url(server.url, role))
    try:
        for words in (*ALL, *REFUSED[role]):
            with pytest.raises(StoreUnavailable, match="(?i)no permissions"):
                await store.control.execute(*words)
    finally:
        await store.close()


async def test_without_a_login_nothing_is_answered(server: StoreServer) -> None:
    with pytest.raises(StoreUnavailable):
        await EmbeddingStore.connect(server.url)


@pytest.mark.usefixtures("small_parts")
async def test_every_role_may_follow_its_items_to_another_node(tmp_path: Path) -> None:
    slot = slot_of(keys.embedding(make_plan("whole").mm_hash))
    with redis_cluster(tmp_path) as servers:
        each = -(-16384 // 3)
        source, target = servers.primaries[slot // each], servers.primaries[slot // each - 1]
        for node in servers.nodes:
            for role in USES:
                password = f"#{password_hash(role_password(role))}"
                node.call("ACL", "SETUSER", user_name(role), "on", password, *rules(grants_of(role)))
        servers.begin_move(slot, source, target)
        for role, use in USES.items():
            await use(role_url(servers.url, role).removesuffix("/0"))
        assert target.call("DBSIZE")
        refused = [entry for node in servers.nodes for entry in node.call("ACL", "LOG")]
        assert not refused
        for command in ("cluster|slots", "asking"):
            assert any(f"cmdstat_{command}" in node.call("INFO", "commandstats") for node in servers.nodes)
