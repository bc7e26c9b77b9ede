"""The real store behind TLS: what is saved is loaded, and what must not connect does not, with the remedy."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.matrix import matrix
from support.processes.authority import Authority
from support.processes.cluster import free_port
from support.processes.relay import Relay
from support.waiting import until
from triptych.registry.leases import Lease, Leases
from triptych.store import codec
from triptych.store.address import with_tls_files
from triptych.store.bulk import Loaded, SaveResult
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.tls import StoreTls
from triptych.store.topology.location import parse_store


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@contextlib.contextmanager
def tls_in_front(store_url: str, context: ssl.SSLContext | None) -> Iterator[tuple[Relay, str]]:
    """The relay, and the address without the files."""
    port = free_port()
    with Relay(port, Path(store_url.removeprefix("unix://")), context) as relay:
        yield relay, f"rediss://127.0.0.1:{port}/0"


async def one_round_trip(url: str, name: str, *, rows: int = 2000) -> None:
    store = await EmbeddingStore.connect(url)
    plan = make_plan(name, rows=rows, width=1024)
    body = make_body(plan)
    try:
        await store.control.execute("UNLINK", f"ec:{{{plan.mm_hash}}}")
        assert await store.save(plan, body, ttl=60) is SaveResult.STORED
        assert await store.save(plan, body, ttl=60) is SaveResult.ALREADY
        assert await store.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
        loaded = await store.load(plan, fresh_buffer)
        assert isinstance(loaded, Loaded)
        assert bytes(loaded.body) == body
        leases = Leases(store)
        lease = await leases.acquire(plan.mm_hash, address="a:1", incarnation="i", term=5)
        assert isinstance(lease, Lease)
        assert await leases.release(lease)
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("loop_factory", "version"),
    [(asyncio.new_event_loop, ssl.TLSVersion.TLSv1_2), (uvloop.new_event_loop, ssl.TLSVersion.TLSv1_3)],
)
def test_saves_loads_and_leases_work_over_tls_with_client_certificates(
    store_url: str, authority: Authority, loop_factory: object, version: ssl.TLSVersion
) -> None:
    with (
        tls_in_front(store_url, authority.server(version=version)) as (_, address),
        asyncio.Runner(loop_factory=loop_factory) as runner,  # type: ignore[arg-type]
    ):
        runner.run(one_round_trip(with_tls_files(address, authority.client()), f"tls {version}"))


async def test_values_in_parts_and_many_at_once_arrive_whole_over_tls(store_url, authority, monkeypatch):
    monkeypatch.setattr(codec, "PART_BYTES", 300_001)
    with tls_in_front(store_url, authority.server()) as (_, address):
        url = with_tls_files(address, authority.client())
        await asyncio.gather(*(one_round_trip(url, f"tls parts {index}", rows=300) for index in range(6)))


REFUSED = {
    "its CA is another": "not signed by a CA .* --store-ca-file",
    "its certificate has expired": "has expired, or this machine's clock is wrong",
    "its certificate is for another host": "for another host: .*--store",
    # The relay ends such connections without a word, as a server's reset often does.
    "it wants a client certificate": "ask for a client certificate, --store-cert-file",
    "our certificate is of another CA": "does it accept the certificate of --store-cert-file",
    "our certificate has expired": "does it accept the certificate of --store-cert-file",
}


def refusing(
    authority: Authority, folder: Path, why: str, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> tuple[ssl.SSLContext, StoreTls]:
    """A server and a client's files that do not go together."""
    host = "elsewhere.example" if why == "its certificate is for another host" else "127.0.0.1"
    server = authority.server(host, expired=why == "its certificate has expired", version=version)
    files = authority.client(expired=why == "our certificate has expired")
    other = Authority(folder / "other").client()
    if why == "its CA is another":
        files = other
    if why == "our certificate is of another CA":
        files = StoreTls(files.ca_file, other.cert_file, other.key_file)
    if why == "it wants a client certificate":
        files = StoreTls(files.ca_file)
    return server, files


@pytest.mark.parametrize("version", matrix([ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2]))
@pytest.mark.parametrize("why", REFUSED)
async def test_a_connection_that_tls_refuses_says_what_helps(store_url, tmp_path, authority, why, version):
    server, files = refusing(authority, tmp_path, why, version)
    with (
        tls_in_front(store_url, server) as (_, address),
        pytest.raises(StoreUnavailable, match=REFUSED[why]) as caught,
    ):
        await EmbeddingStore.connect(with_tls_files(address, files), timeout=30)
    assert "rediss://127.0.0.1:" in str(caught.value)


@pytest.mark.parametrize("transfer", ["load", "save"])
@pytest.mark.parametrize("why", matrix(list(REFUSED), quick=2))
async def test_bulk_transfers_verify_no_less_than_small_commands(
    store_url: str, tmp_path: Path, authority: Authority, why: str, transfer: str
) -> None:
    server, files = refusing(authority, tmp_path, why)
    with tls_in_front(store_url, server) as (_, address):
        store = EmbeddingStore(parse_store(with_tls_files(address, files)), timeout=30)
        plan = make_plan("bulk tls")
        with pytest.raises(StoreUnavailable, match=REFUSED[why] if why.startswith("its") else "rediss://"):
            if transfer == "load":
                await store.load(plan, fresh_buffer)
            else:
                await store.save(plan, make_body(plan), ttl=60)
        await store.close()


async def test_a_store_without_tls_at_that_port_is_named_as_such(store_url: str) -> None:
    with tls_in_front(store_url, None) as (_, address), pytest.raises(StoreUnavailable, match="TLS port"):
        await EmbeddingStore.connect(address, timeout=0.5)


async def test_a_store_with_tls_at_that_port_is_named_as_such(store_url: str, authority: Authority) -> None:
    with (
        tls_in_front(store_url, authority.server()) as (_, address),
        pytest.raises(StoreUnavailable, match="write rediss://"),
    ):
        await EmbeddingStore.connect(address.replace("rediss", "redis"), timeout=2)


async def test_a_renewed_certificate_is_shown_by_the_next_connections(store_url, authority, monkeypatch):
    monkeypatch.setattr("triptych.base.rpc.tls.certificates.LOOK_SECONDS", 0.0)
    files = authority.client(expired=True)
    server = authority.server()
    with tls_in_front(store_url, server) as (relay, address):
        url = with_tls_files(address, files)
        with pytest.raises(StoreUnavailable):
            await EmbeddingStore.connect(url)
        authority.client()
        store = await EmbeddingStore.connect(url)
        relay.cut()
        assert await store.ping(), "the same client reconnects"
        authority.client(expired=True)
        relay.cut()
        assert not await store.ping(), "a pooled connection that is opened again reads the files again"
        authority.client()
        plan = make_plan("renewed")
        assert await store.save(plan, make_body(plan), ttl=60)
        await store.close()


async def test_a_tls_connection_that_breaks_under_way_never_cuts_a_value_short(store_url, authority):
    with tls_in_front(store_url, authority.server()) as (relay, address):
        store = await EmbeddingStore.connect(with_tls_files(address, authority.client()), timeout=30)
        plan = make_plan("tls cut", rows=4000, width=128)
        body = make_body(plan)
        await store.save(plan, body, ttl=60)
        relay.delay = 0.02
        relay.answered = 0
        loading = asyncio.create_task(store.load(plan, fresh_buffer))
        await until(lambda: relay.answered > len(body) // 8, "a part of the value")
        assert not loading.done()
        await asyncio.to_thread(relay.cut)
        relay.delay = 0.0
        with contextlib.suppress(StoreUnavailable):
            loaded = await loading
            assert isinstance(loaded, Loaded)
            assert bytes(loaded.body) == body
        loaded = await store.load(plan, fresh_buffer)
        assert isinstance(loaded, Loaded)
        assert bytes(loaded.body) == body
        await store.close()
