"""A web server that answers as a script says, down to the bytes, and counts what it was asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import trustme

from support.waiting import stop_accepting

#: Starts as a PNG file does; nobody decodes it.
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes = PNG, status: int = 200, **headers: str) -> bytes:
    """A whole reply; `content_type="…"` and so on replace what it would say."""
    named = {"Content-Type": "image/png", "Content-Length": str(len(body)), "Connection": "close"}
    named |= {name.replace("_", "-").title(): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value)
    return f"HTTP/1.1 {status} Something\r\n{lines}\r\n".encode() + body


def redirect(target: str, status: int = 302) -> bytes:
    return reply(b"", status, location=target)


#: Signs the certificate of the host "pictures.example"; new in every run.
AUTHORITY = trustme.CA()


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert("pictures.example").configure_cert(context)
    return context


def client_tls() -> ssl.SSLContext:
    """Trusts `server_tls` as well."""
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


class WebServer:
    """`pages[path]` are answers in order, the last one repeated; a Script writes its answer itself."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.pages: dict[str, list[bytes | Script]] = {}
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self.open = 0
        self.maximum = 0
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> WebServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_accepting(self._server.sockets)
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}{path}"

    def give(self, path: str, *answers: bytes | Script) -> str:
        """The URL of a page that answers so."""
        self.pages[path] = list(answers)
        return self.url(path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        self.maximum = max(self.maximum, self.open)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            self.heads.append(head)
            answers = self.pages.get(path, [reply(b"", 404)])
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()
