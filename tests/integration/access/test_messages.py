"""What is said of a store that is down, full, or refuses its client: each time with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data.items import fresh_buffer, make_body, make_plan
from support.processes.cluster import free_port
from support.stores.server import StoreServer
from support.stores.users import admin_url, guarded_server, role_url
from triptych.store.control import StoreFull, StoreRefused, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.topology.location import parse_store

PLAN = make_plan("item", rows=2000, width=128)
PASSWORD = "what nobody sees"


async def said(url: str, transfer: str = "") -> str:
    """The error of a connection, or of a transfer without one before it."""
    with pytest.raises(StoreUnavailable) as caught:
        if not transfer:
            await EmbeddingStore.connect(url, timeout=20)
            raise AssertionError("it connected")
        store = EmbeddingStore(parse_store(url), timeout=20)
        try:
            if transfer == "save":
                await store.save(PLAN, make_body(PLAN), ttl=60)
            else:
                await store.load(PLAN, fresh_buffer)
        finally:
            await store.close()
    assert PASSWORD not in str(caught.value)
    return str(caught.value)


async def test_whatever_refuses_a_client_is_said_with_its_remedy(tmp_path: Path) -> None:
    with guarded_server(tmp_path) as server:
        wrong = server.url.replace("://", f"://triptych-pd:{PASSWORD.replace(' ', '%20')}@")
        for transfer in ("", "load", "save"):
            assert "give --store-password-file" in await said(server.url, transfer)
            assert "the user or the password is wrong" in await said(wrong, transfer)
            assert "leave the number out" in await said(admin_url(server.url).replace("/0", "/99"), transfer)
        assert "its user may not do that" in await said(role_url(server.url, "pd"), "save")


async def test_a_user_that_may_not_read_is_an_error_and_never_a_miss_that_is_encoded_again(tmp_path):
    with guarded_server(tmp_path) as server:
        store = await EmbeddingStore.connect(role_url(server.url, "proxy"))
        with pytest.raises(StoreRefused, match="triptych store acl"):
            await store.load(PLAN, fresh_buffer)
        await store.close()


async def test_a_store_that_is_down_full_or_has_no_password_is_said_with_the_remedy(tmp_path: Path) -> None:
    server = StoreServer(tmp_path / "server")
    server.start()
    try:
        assert "leave the password out" in await said(server.url.replace("://", "://:hush@"))
        store = await EmbeddingStore.connect(server.url)
        server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        server.call("CONFIG", "SET", "maxmemory", "1000000")
        with pytest.raises(StoreFull, match="raise its maxmemory"):
            await store.save(PLAN, make_body(PLAN), ttl=60)
        await store.close()
    finally:
        server.kill()
    for transfer in ("", "load", "save"):
        assert "start the store" in await said(server.url, transfer)
    assert "correct the socket's path" in await said(f"unix://{tmp_path}/no.sock")
    assert "start the store" in await said(f"redis://127.0.0.1:{free_port()}")
