"""Each role can do what it needs in the store, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.stores.redis_cluster import redis_cluster
from support.stores.server import ADMIN, StoreServer
from support.stores.users import guarded_server, role_password, role_url
from support.waiting import until
from triptych.apps.access import (
    IN_CLUSTERS,
    OPTIONAL_ROLES,
    ROLES,
    grants_of,
    password_hash,
    rules,
    user_name,
)
from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingRules
from triptych.base.types import ItemPlan, WorkerInfo
from triptych.integrations.vllm.copy_loader import CopyLoader
from triptych.integrations.vllm.host_copies import HostCopies
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.park_table import LoadOutcome, LoadReport
from triptych.integrations.vllm.rows import RowSaver
from triptych.registry.leases import Lease, Leases, OwnedBy
from triptych.registry.minute_counts import MinuteCounts
from triptych.registry.registry import Registry
from triptych.registry.scaling import ScalingBoard
from triptych.store import codec, keys
from triptych.store.bulk import Loaded, Missing, SaveResult
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.kv_budget import COUNT_KV, KVBudget
from triptych.store.shares import Memory, StoreShares
from triptych.store.sockets import command
from triptych.store.topology.cluster import slot_of

#: Parts of so many bytes make an item of some KiB a split one.
PART_BYTES = 6000


async def _as_worker(store: EmbeddingStore, pool: str) -> None:
    registry = Registry(store)
    info = WorkerInfo("10.0.0.1:1", pool, "incarnation", "model-key", "model")
    await registry.register(info)
    await registry.withdraw(info)
    # One that lives, and one that ended without withdrawing, which is the proxy's to delete.
    await registry.register(WorkerInfo("10.0.0.2:1", pool, "alive", "model-key", "model"))
    await registry.register(WorkerInfo("10.0.0.3:1", pool, "dead", "model-key", "model"), term=0.0)


@contextlib.asynccontextmanager
async def _connected(url: str) -> AsyncIterator[EmbeddingStore]:
    store = await EmbeddingStore.connect(url)
    try:
        yield store
    finally:
        await store.close()


async def use_as_encoder(url: str) -> None:
    """What an encoder worker does."""
    async with _connected(url) as store:
        await _encoder_uses(store)


async def _encoder_uses(store: EmbeddingStore) -> None:
    await _as_worker(store, "encoder")
    await Registry(store).workers()
    for name, rows in (("whole", 45), ("split", 90)):
        plan = make_plan(name, rows=rows)
        body = make_body(plan)
        assert await store.save(plan, body, ttl=60) is SaveResult.STORED
        assert await store.save(plan, body, ttl=60) is SaveResult.ALREADY
        assert await store.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
    whole = make_plan("whole", rows=45)
    raw = codec.encode_head(whole, make_body(whole), write_id="0" * 16, ttl=60)
    await store.save(whole, make_body(whole), ttl=60, damaged_digest=codec.damage_digest(raw))
    await _tenants_use(store)
    leases = Leases(store)
    place = {"address": "10.0.0.1:1", "incarnation": "incarnation"}
    lease = await leases.acquire(whole.mm_hash, term=5, **place)
    assert isinstance(lease, Lease)
    assert isinstance(await leases.acquire(whole.mm_hash, term=5, **place), OwnedBy)
    assert await leases.renew(lease, 5)
    assert await leases.release(lease)
    await leases.acquire(whole.mm_hash, term=0, **place)


async def _tenants_use(store: EmbeddingStore) -> None:
    """Saves for tenants, one of which has too much, and a scan of what they have."""
    shares = store.shares = StoreShares(store.topology, store.control, young=0.0)
    tag = make_plan("tenants").mm_hash
    shard = await store.topology.shard_of(keys.embedding(tag))
    plans = [make_plan(f"{tenant} {n}", rows=90) for tenant in ("a", "b") for n in range(8)]
    plans = [plan for plan in plans if await store.topology.shard_of(keys.embedding(plan.mm_hash)) == shard]
    for number, plan in enumerate(plans):
        await store.save(plan, make_body(plan), ttl=60, tenant=str(number % 2) * 16)
    await shares.note()
    shares._memory[shard] = Memory(used=1 << 20, limit=1024, at=time.monotonic())
    await shares.take("0" * 16, plans[-1].mm_hash, plans[-1].nbytes, 60)
    assert shares.deleted
    for plan in plans:
        await store.control.execute("UNLINK", keys.embedding(plan.mm_hash))
    await shares.scan(shard)


async def use_as_pd(url: str) -> None:
    """What a PD worker does."""
    async with _connected(url) as store:
        await _pd_uses(store)
    await _shares_kv(url, "blocks")


async def _pd_uses(store: EmbeddingStore) -> None:
    await _as_worker(store, "pd")
    for name, rows in (("whole", 45), ("split", 90)):
        plan = make_plan(name, rows=rows)
        assert isinstance(await store.load(plan, fresh_buffer), Loaded)
    assert isinstance(await store.load(make_plan("absent"), fresh_buffer), Missing)
    # The value is larger than the plan says: its digest is read alone.
    small = make_plan("whole", rows=1, width=1)
    found = await store.load(small, fresh_buffer)
    assert isinstance(found, Missing)
    assert found.damaged_digest
    # In front of vLLM.
    whole = make_plan("whole", rows=45)
    assert await store.look_up([(whole.mm_hash, NAMESPACE)]) == [whole]


async def _shares_kv(url: str, name: str) -> None:
    """Saves and loads of KV blocks, for which the store has little room."""
    store = await EmbeddingStore.connect(url, kind=keys.KV)
    try:
        await _shared_kv(store, name)
    finally:
        await store.close()


async def _shared_kv(store: EmbeddingStore, name: str) -> None:
    plans = [make_plan(f"{name} {n}", rows=90) for n in range(16)]
    shards = [await store.topology.shard_of(keys.embedding(plan.mm_hash, keys.KV)) for plan in plans]
    plans = [plan for plan, shard in zip(plans, shards, strict=True) if shard == shards[0]]
    budget = KVBudget(store.topology, store.control, 0.0)
    limit = await budget._limit(shards[0], keys.embedding(plans[0].mm_hash, keys.KV))
    budget._share = 2.5 * plans[0].nbytes / limit
    for plan in plans:
        assert await budget.take("a" * 16, plan.mm_hash, plan.nbytes, 60)
        assert await store.save(plan, make_body(plan), ttl=60) is SaveResult.STORED
        assert await store.save(plan, make_body(plan), ttl=60) is SaveResult.ALREADY
    assert budget.deleted
    last = plans[-1]
    assert await store.look_up([(last.mm_hash, NAMESPACE)]) == [last]
    await budget.touch("a" * 16, [(last.mm_hash, last.nbytes)])
    assert isinstance(await store.load(last, fresh_buffer), Loaded)
    found = await store.load(dataclasses.replace(last, rows=1, width=1, length=1), fresh_buffer)
    assert isinstance(found, Missing)
    await store.drop_damaged(last.mm_hash, found.damaged_digest)
    # A tenant whose index has ended with its values.
    usage = keys.kv_usage(shards[0], "b" * 16)
    await store.control.script(COUNT_KV, usage, "b" * 16, "x:1000000", 100, 0)
    assert await budget.take("a" * 16, last.mm_hash, last.nbytes, 60)


async def use_as_proxy(url: str) -> None:
    """What a proxy does."""
    async with _connected(url) as store:
        await _proxy_uses(store)


async def _proxy_uses(store: EmbeddingStore) -> None:
    registry, board = Registry(store), ScalingBoard(store)
    seen = await registry.poll("proxy-1")
    assert (await registry.poll("proxy-1", mark=seen.mark)).workers is None
    await registry.poll("proxy-2", term=0)
    plans = [make_plan("whole", rows=45), make_plan("split", rows=90)]
    assert await store.look_up([(plan.mm_hash, NAMESPACE) for plan in plans]) == plans
    await store.epoch()
    assert (await store.memory()).policy == "volatile-lru"
    await registry.collect_dead(older_than=-1)
    await Leases(store).collect_dead(older_than=-1)
    await board.publish("proxy-2", "encoder", PoolDemand(), 0.0)
    await board.publish("proxy-1", "encoder", PoolDemand(), 5.0)
    await board.decision("encoder")
    assert (await board.agree("encoder", ScalingRules(0, 2, 1.0), None, 5.0, newest=True)).supported
    assert await board.announce("encoder", ScalingDecision(1, "test", True), 5.0)
    assert await board.decision("encoder")
    await board.withdraw("proxy-1", "encoder")
    assert await MinuteCounts(store).add("requests", "alice", 1, 2) == 0


def _body(plan: ItemPlan) -> memoryview:
    return memoryview(make_body(plan))


async def use_as_vllm(url: str) -> None:
    """What the connector that vLLM loads does: it saves, loads, and deletes what is damaged."""
    options = ConnectorOptions(store=url, namespaces=(NAMESPACE,))
    saver, loader = RowSaver(options), CopyLoader(options, HostCopies(1 << 20, None), row_width=32)
    try:
        for name, rows in (("of vLLM", 45), ("of vLLM, split", 90)):
            plan = make_plan(name, rows=rows)
            while await _loaded(loader, plan) is LoadOutcome.ABSENT:
                saver.save(plan, partial(_body, plan))
        async with _connected(url) as store:
            plan = make_plan("of vLLM", rows=45)
            value = codec.encode_head(plan, make_body(plan), write_id="0" * 16, ttl=60)
            await store.control.execute("SET", keys.embedding(plan.mm_hash), value + bytes(plan.nbytes))
        # The digest of a value that is larger than its header says is read alone.
        assert await _loaded(loader, plan) is LoadOutcome.ABSENT
    finally:
        await asyncio.to_thread(loader.close)
        await asyncio.to_thread(saver.close)
    # The tier of its KV cache.
    await _shares_kv(url, "chunks")


async def _loaded(loader: CopyLoader, plan: ItemPlan) -> LoadOutcome:
    loader.start(plan.mm_hash)
    reports: list[LoadReport] = []

    def reported() -> bool:
        reports.extend(loader.reports())
        return bool(reports)

    await until(reported, "the load's report")
    return reports[0].outcome


#: By role, with the address of its user. In this order: PD workers and proxies find what encoders have saved.
USES: dict[str, Callable[[str], Awaitable[None]]] = {
    "encoder": use_as_encoder,
    "pd": use_as_pd,
    "proxy": use_as_proxy,
    "vllm": use_as_vllm,
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of some KiB are split."""
    monkeypatch.setattr(codec, "PART_BYTES", PART_BYTES)


_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class CommandRecord:
    """The commands of a server's MONITOR, those of scripts too, as pairs of name and key."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, str]] = set()

    def add(self, line: bytes) -> None:
        """One line of MONITOR."""
        words = [word.decode(errors="replace") for word in _WORD.findall(line)]
        if not words:
            return
        name = words[0].lower()
        if name == "eval":
            self.asked |= {(name, key) for key in words[3 : 3 + int(words[2])]}
        else:
            # ZADD, GET, HSET and their like have one key, the first word.
            touches = len(words) > 1 and words[1].startswith((keys.EMBEDDING, keys.KV, "{"))
            self.asked.add((name, words[1] if touches else ""))


@contextlib.contextmanager
def recorded_commands(server: StoreServer) -> Iterator[CommandRecord]:
    """Records all commands of the server within the `with`; complete after it."""
    record = CommandRecord()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        lines = sock.makefile("rb")
        sock.sendall(command("AUTH", *ADMIN) + command("MONITOR"))
        for _ in ("AUTH", "MONITOR"):
            assert lines.readline() == b"+OK\r\n"

        def read() -> None:
            for line in lines:
                if b'"triptych-end-of-record"' in line:
                    return
                record.add(line)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield record
        finally:
            server.call("ECHO", "triptych-end-of-record")
            reader.join(10)


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
        ("ZADD", keys.usage("0", "a", "embedding")[1], "1", "forged"),
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
        ("SET", keys.embedding(make_plan("whole").mm_hash, keys.KV), "forged"),
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
