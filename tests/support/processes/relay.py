"""A relay in front of a server, which can be slow, cut its connections or close them in one direction."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from support.waiting import stop_accepting

_PIECE = 1 << 16
_PATIENCE = 10.0
#: A unix socket's path, or a loopback port.
Place = Path | int


class Relay:
    """Relays `listen` to `target` from a thread of its own; its methods may be called from any other.

    `delay`: seconds that every piece of an answer waits. `silent`: nothing passes in either direction, and no
    connection ends, as with a network that drops packets. `lose_answer_to`: the next connection on which
    these bytes are sent is cut when the server answers them. `tls`: clients speak it, the target does not.
    """

    def __init__(self, listen: Place, target: Place, tls: ssl.SSLContext | None = None) -> None:
        self.delay = 0.0
        self.silent = False
        self.lose_answer_to = b""
        #: Answers that were lost so.
        self.lost_answers = 0
        #: Bytes of answers that came through.
        self.answered = 0
        self._listen = listen
        self._target = target
        self._tls = tls
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        return len(self._links)

    def __enter__(self) -> Relay:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()

    def cut(self) -> int:
        """Ends all connections at once, as a broken network does; their number."""
        return self._on_all(lambda link: link.cut())

    def half_close(self) -> int:
        """Clients read an end, while what they still send is passed on; the number of connections."""
        return self._on_all(lambda link: link.half_close())

    def _on_all(self, act: Callable[[_Link], None]) -> int:
        async def acting() -> int:
            links = list(self._links)
            for link in links:
                act(link)
            return len(links)

        return int(self._do(acting()))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE)

    async def _start(self) -> None:
        if isinstance(self._listen, Path):
            self._server = await asyncio.start_unix_server(self._serve, self._listen)
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._listen, ssl=self._tls)

    async def _stop(self) -> None:
        assert self._server is not None
        await stop_accepting(self._server.sockets)
        self._server.close()
        links = [link.task for link in self._links]
        for link in list(self._links):
            link.cut()
        await asyncio.gather(*links, return_exceptions=True)
        # Connections that are still being accepted, as in a handshake: nobody else has work on this loop.
        accepting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        # What they have closed is closed with the next turns.
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self._target, Path):
                ends = await asyncio.open_unix_connection(self._target)
            else:
                ends = await asyncio.open_connection("127.0.0.1", self._target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        link = _Link(self, task, (reader, writer), ends)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One connection: the client's side and the server's."""

    def __init__(self, relay: Relay, task: asyncio.Task[Any], client: Ends, server: Ends) -> None:
        self.task = task
        self._relay = relay
        self._client = client
        self._server = server
        self._answers: asyncio.Task[None] | None = None
        self._loses_answer = False
        self._tail = b""

    async def run(self) -> None:
        answers = self._answers = asyncio.create_task(
            self._copy(self._server[0], self._client[1], self._on_answer)
        )
        questions = asyncio.create_task(self._copy(self._client[0], self._server[1], self._on_question))
        try:
            await asyncio.wait((answers, questions))
        finally:
            for task in (answers, questions):
                task.cancel()
            await asyncio.gather(answers, questions, return_exceptions=True)
            self.cut()

    def cut(self) -> None:
        for _, writer in (self._client, self._server):
            writer.transport.abort()

    def half_close(self) -> None:
        if self._answers is not None:
            self._answers.cancel()
        with contextlib.suppress(OSError, RuntimeError):
            self._client[1].write_eof()

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passes: Callable[[bytes], Coroutine[Any, Any, bool]],
    ) -> None:
        with contextlib.suppress(OSError):
            async for piece in _pieces(reader):
                if not await passes(piece):
                    return
                while self._relay.silent:
                    await asyncio.sleep(0.05)
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _on_question(self, piece: bytes) -> bool:
        words = self._relay.lose_answer_to
        if words and words in self._tail + piece:
            self._loses_answer, self._relay.lose_answer_to = True, b""
        self._tail = piece[-64:]
        return True

    async def _on_answer(self, piece: bytes) -> bool:
        if self._loses_answer:
            self._relay.lost_answers += 1
            self.cut()
            return False
        if self._relay.delay:
            await asyncio.sleep(self._relay.delay)
        self._relay.answered += len(piece)
        return True


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(_PIECE):
        yield piece
