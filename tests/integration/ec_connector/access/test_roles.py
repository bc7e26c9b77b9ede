"""Each role under its own user, on a real server: it may do all that it does, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest

from support.data.items import make_plan
from support.processes.store_server import ADMIN, StoreServer, acl_file, store_server
from support.store_roles import USES, recorded_commands, small_parts
from triptych.ec_connector.access.uses import ROLES, grants_of
from triptych.ec_connector.store import keys
from triptych.ec_connector.store.control import StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore

__all__ = ["small_parts"]

LOGIN = f'AUTH admin "{ADMIN}"\r\n'.encode()
EMBEDDING = keys.embedding(make_plan("whole").mm_hash)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    folder = tmp_path_factory.mktemp("acl")
    with store_server(folder, "--aclfile", str(acl_file(folder / "users.acl"))) as server:
        yield server


async def as_admin(server: StoreServer, *words: str) -> object:
    admin = await EmbeddingStore.connect(server.admin_url)
    try:
        return await admin.control.execute(*words)
    finally:
        await admin.close()


def allows(grant: tuple[str, str], asked: tuple[str, str]) -> bool:
    return grant[0] == asked[0] and fnmatchcase(asked[1], grant[1])


@pytest.mark.usefixtures("small_parts")
async def test_every_role_runs_all_that_it_is_allowed_and_nothing_beside(server: StoreServer) -> None:
    await as_admin(server, "FLUSHALL")
    for role, use in USES.items():
        with recorded_commands(server.path, LOGIN) as record:
            store = await EmbeddingStore.connect(server.role_url(role, db=1))
            await use(store)
            await store.close()
        asked = {(name, key) for name, key in record.asked if name not in ("auth", "monitor")}
        granted = grants_of(role)
        beside = {one for one in asked if not any(allows(grant, one) for grant in granted)}
        unused = {grant for grant in granted if not any(allows(grant, one) for one in asked)}
        assert not beside, role
        assert not unused, role
    assert await as_admin(server, "ACL", "LOG") == []


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


@pytest.mark.parametrize("role", ROLES)
async def test_no_role_may_do_what_another_does_nor_what_an_operator_does(
    server: StoreServer, role: str
) -> None:
    store = await EmbeddingStore.connect(server.role_url(role))
    try:
        for words in (*ALL, *REFUSED[role]):
            with pytest.raises(StoreUnavailable, match="(?i)no permissions"):
                await store.control.execute(*words)
    finally:
        await store.close()


async def test_without_a_login_nothing_is_answered(server: StoreServer) -> None:
    with pytest.raises(StoreUnavailable):
        await EmbeddingStore.connect(server.url)
