"""A managed server whose name moves to another host, as at a failover of a cloud's Redis."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.stores.server import StoreServer
from support.stores.traffic import Traffic
from triptych.store import bulk
from triptych.store.bulk import Loaded, SaveResult
from triptych.store.embedding_store import EmbeddingStore

NAME = "store.example"


class Names:
    """What the name resolves to."""

    def __init__(self) -> None:
        self.host = "127.0.0.1"

    def getaddrinfo(self, host: object, *args: Any, **kwargs: Any) -> Any:
        return _RESOLVE(self.host if host == NAME else host, *args, **kwargs)


_RESOLVE = socket.getaddrinfo


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[StoreServer]]:
    """Two servers at one port of two addresses."""
    first = StoreServer(tmp_path / "a")
    second = StoreServer(tmp_path / "b", host="127.0.0.2", port=first.port)
    try:
        for server in (first, second):
            server.start()
        yield [first, second]
    finally:
        first.kill()
        second.kill()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "made a replica"])
async def test_clients_go_to_the_new_host(two, names, monkeypatch, fault):
    """A server that is made a replica keeps its connections, and answers reads on them."""
    monkeypatch.setattr(bulk, "MAX_AGE", 0.3)
    first, second = two
    second.call("REPLICAOF", "127.0.0.1", first.port)
    url = f"redis://{NAME}:{first.port}/0"
    writer, reader = [await EmbeddingStore.connect(url) for _ in range(2)]
    try:
        async with Traffic(writer, reader) as traffic:
            second.call("REPLICAOF", "NO", "ONE")
            names.host = "127.0.0.2"
            if fault == "killed":
                await asyncio.to_thread(first.kill)
            else:
                first.call("REPLICAOF", "127.0.0.2", second.port)
            await traffic.more(120)
            assert not traffic.wrong
        await asyncio.sleep(0.3)
        if fault == "made a replica":
            first.call("REPLICAOF", "127.0.0.1", 1)
        plan = make_plan("written after it")
        assert await writer.save(plan, make_body(plan), ttl=60) is SaveResult.STORED
        assert second.call("EXISTS", f"ec:{{{plan.mm_hash}}}") == 1
        assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
        assert isinstance(await reader.load(plan, fresh_buffer), Loaded)
    finally:
        await writer.close()
        await reader.close()
