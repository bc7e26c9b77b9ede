"""One key's silent name servers, slow servers and large media leave the other keys their turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import pytest

from support.processes.media_fetches import fetching
from support.processes.web import PNG, WebServer, reply
from triptych.base.errors import InvalidRequest, Overloaded, Unavailable
from triptych.proxy.media import connection
from triptych.proxy.quotas.quota import HOLDER


@contextlib.contextmanager
def of_key(name: str) -> Iterator[None]:
    token = HOLDER.set(name)
    yield
    HOLDER.reset(token)


class Resolver:
    """Does not answer for names that begin with "silent" until it is let go."""

    def __init__(self) -> None:
        self.blocked = threading.Semaphore(0)
        self.gate = threading.Event()

    def __call__(self, host: str, port: int) -> Sequence[tuple[Any, ...]]:
        if host.startswith("silent"):
            self.blocked.release()
            assert self.gate.wait(60)
        if host.startswith("busy"):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if host.startswith("none"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


async def test_silent_name_servers_of_one_key_leave_look_ups_to_the_others(
    monkeypatch: pytest.MonkeyPatch, web: WebServer
) -> None:
    web.give("/picture.png", reply())
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 1.0)
    names = Resolver()
    async with fetching(names=names) as it:
        places = it.quotas["look-ups"]
        with of_key("a"):
            silent = [asyncio.create_task(it.get(f"http://silent{at}.test/")) for at in range(100)]
        try:
            with of_key("b"):
                assert await it.get(f"http://good.test:{web.port}/picture.png") == PNG
            ends: list[Any] = await asyncio.gather(*silent, return_exceptions=True)
            assert {type(end) for end in ends} <= {Unavailable, Overloaded}
            assert all(end.retry_after for end in ends)
            # The threads are still in the resolver: their places are not given away.
            assert places.held("a") == places.used > 0
        finally:
            names.gate.set()
        while places.used:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("name", "kind"), [("busy.test", Unavailable), ("none.test", InvalidRequest)])
async def test_only_an_answer_that_there_is_no_such_name_blames_the_url(name: str, kind: type) -> None:
    async with fetching(names=Resolver()) as it:
        with pytest.raises(kind, match="field: "):
            await it.get(f"http://{name}/")


async def test_slow_servers_of_one_key_leave_fetches_to_the_others(web: WebServer) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    slow_url, good = web.give("/slow", silent), web.give("/picture.png", reply())
    async with fetching(at_once=4, timeout=20.0) as it:
        with of_key("a"):
            slow = [asyncio.create_task(it.get(slow_url)) for _ in range(20)]
        while it.quotas["fetches"].held("a") < 2:
            await asyncio.sleep(0.01)
        with of_key("b"):
            assert await it.get(good) == PNG
        await cancelled(slow)


async def cancelled(tasks: Sequence[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_media_and_threads_of_one_key_leave_room_for_the_others() -> None:
    async with fetching(memory=512 << 20) as it:
        gate, begun = threading.Event(), threading.Semaphore(0)

        def work() -> int:
            begun.release()
            assert gate.wait(60)
            return 1

        with of_key("a"):
            busy: list[Awaitable[int]] = [asyncio.create_task(it.spool.in_thread(work)) for _ in range(10)]
            it.spool.reserve("a", memory=256 << 20)
            with pytest.raises(Overloaded, match="--media-memory"):
                it.spool.reserve("a", memory=1)
        await asyncio.to_thread(begun.acquire)
        try:
            with of_key("b"):
                assert await it.spool.in_thread(lambda: 2) == 2
                (await it.spool.keep(b"x" * 1000)).release()
        finally:
            gate.set()
        assert await asyncio.gather(*busy) == [1] * 10
        it.spool.reserve("a", memory=-(256 << 20))
