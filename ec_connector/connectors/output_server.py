"""The server of finished embeddings, in RESP as the bulk reader of the store speaks it.

`FD name` over a unix socket passes the sealed shared memory. `GET name` sends the bytes; over the data port
after `AUTH token` where the cluster has one, and over mutual TLS where its services have certificates.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Coroutine
from dataclasses import replace

from triptych.base.config.tls import TlsFiles
from triptych.base.rpc.internal_token import TOKEN_HEADER, InternalToken
from triptych.base.rpc.ports import refused_port
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial, read_material
from triptych.ec_connector.base import DirectTransfer
from triptych.ec_connector.connectors.direct_path import ServedOutputs
from triptych.store.bulk import SLOWEST
from triptych.store.sockets import PlainWire, TlsWire, Wire, same_user

logger = logging.getLogger(__name__)

#: Seconds for handshake and login, and between two commands.
LOGIN_SECONDS, IDLE_SECONDS = 5.0, 90.0
#: Seconds that a reader of shared memory may take.
READ_SECONDS = 30.0
MAX_CONNECTIONS = 256
#: Bytes of a command; the token is the longest argument.
_MAX_COMMAND = 8192


class OutputServer:
    """Serves the outputs in `outputs`, bound when it is made. ConfigError for a data port that is taken."""

    def __init__(self, direct: DirectTransfer) -> None:
        self._token = InternalToken(direct.token) if direct.token else None
        self._certificates = None if direct.tls is None else Certificates(direct.tls, read=_mutual)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # An abstract name: nothing is left of it after a crash, and no other host has it.
        name = f"triptych-ec-{secrets.token_hex(16)}"
        self._unix.bind(f"\0{name}")
        self._listeners = [self._unix]
        address = ""
        if direct.host:
            data = _bound(direct.host, direct.port)
            self._listeners.append(data)
            address = f"{direct.advertise or direct.host}:{data.getsockname()[1]}"
        for listener in self._listeners:
            listener.listen(64)
            listener.setblocking(False)
        self.outputs = ServedOutputs(direct.memory, socket=name, address=address)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Accepts connections from now on."""
        for listener in self._listeners:
            self._start(self._accept(listener))

    async def close(self) -> None:
        """Ends all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self.outputs.close()

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, for example
                logger.warning("a connection to the served embeddings was not accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            if len(self._tasks) > MAX_CONNECTIONS or (listener is self._unix and not same_user(sock)):
                sock.close()
                continue
            self._start(self._serve(sock, shared=listener is self._unix))

    async def _serve(self, sock: socket.socket, *, shared: bool) -> None:
        wire: Wire = PlainWire(sock)
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                if not shared and self._certificates is not None:
                    wire = await TlsWire.accept(sock, self._certificates.current().context)
            connection = _Connection(wire)
            await self._answer(connection, sock, shared=shared)
        except (OSError, ssl.SSLError, TimeoutError, ValueError) as error:
            logger.debug("a reader of embeddings has left: %s", error)
        except Exception:
            logger.exception("a reader of embeddings could not be served")
        finally:
            wire.close()

    async def _answer(self, connection: _Connection, sock: socket.socket, *, shared: bool) -> None:
        """Answers commands until the reader disconnects. ValueError for an unknown command."""
        known = shared or self._token is None
        while True:
            async with asyncio.timeout(IDLE_SECONDS if known else LOGIN_SECONDS):
                arguments = await connection.command()
            match arguments:
                case [b"AUTH", token]:
                    known = known or (
                        self._token is not None and self._token.admits([(TOKEN_HEADER, b"Bearer " + token)])
                    )
                    if not known:
                        # Another guess is another connection: each has its place for a while only.
                        await connection.say(b"-WRONGPASS not the cluster's internal token")
                        return
                    await connection.say(b"+OK")
                case [b"SELECT", _] if known:
                    await connection.say(b"+OK")
                case [b"GET", name] if known:
                    await self._send(connection, name)
                case [b"FD", name] if shared:
                    await self._pass(connection, sock, name)
                case _:
                    await connection.say(b"-ERR not allowed")
                    return

    async def _send(self, connection: _Connection, name: bytes) -> None:
        with self.outputs.reading(name.decode("ascii", "replace")) as output:
            if output is None:
                await connection.say(b"$-1")
                return
            async with asyncio.timeout(LOGIN_SECONDS + output.nbytes / SLOWEST):
                with output.view as view:
                    pieces = [memoryview(b"$%d\r\n" % output.nbytes), view, memoryview(b"\r\n")]
                    try:
                        await connection.wire.send(pieces)
                    finally:
                        pieces.clear()

    async def _pass(self, connection: _Connection, sock: socket.socket, name: bytes) -> None:
        """Passes the memory, and keeps it until the reader closes the connection or ends."""
        with self.outputs.reading(name.decode("ascii", "replace")) as output:
            if output is None:
                await connection.say(b"$-1")
                return
            socket.send_fds(sock, [b"+%d\r\n" % output.nbytes], [output.segment.fd])
            async with asyncio.timeout(READ_SECONDS):
                await connection.wire.receive(1)


class _Connection:
    """The commands on a wire, one at a time, and short replies."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._raw = b""

    async def command(self) -> list[bytes]:
        """The next command's arguments. OSError at the end of the stream, ValueError for anything else."""
        while (parsed := read_command(self._raw)) is None:
            if len(self._raw) > _MAX_COMMAND:
                raise ValueError("a command is too long")
            received = await self.wire.receive(_MAX_COMMAND)
            if not received:
                raise ConnectionResetError("end of stream")
            self._raw += received
        arguments, self._raw = parsed
        return arguments

    async def say(self, line: bytes) -> None:
        await self.wire.send([memoryview(line + b"\r\n")])


def read_command(raw: bytes) -> tuple[list[bytes], bytes] | None:
    """The first command in `raw`, and what follows; None where it is not complete. ValueError for another."""
    if not raw:
        return None
    line, end, rest = raw.partition(b"\r\n")
    if line[:1] != b"*" or (end and line[1:] not in (b"2", b"3")):
        raise ValueError("no command")
    if not end:
        return None
    arguments: list[bytes] = []
    for _ in range(int(line[1:])):
        length, end, rest = rest.partition(b"\r\n")
        if not end:
            return None
        if length[:1] != b"$" or not length[1:].isdigit() or int(length[1:]) > _MAX_COMMAND:
            raise ValueError("no command")
        size = int(length[1:])
        if len(rest) < size + 2:
            return None
        arguments.append(rest[:size])
        rest = rest[size + 2 :]
    return arguments, rest


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: the last bytes of an item do not wait for an acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise refused_port(host, port, "--ec-transfer-port", error.strerror or str(error)) from error
    return sock


def _mutual(files: TlsFiles) -> TlsMaterial:
    """The material of a server that takes clients of its own CA only."""
    material = read_material(files)
    context = material.context
    context.load_verify_locations(cadata=material.ca.decode("ascii"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return replace(material, context=context)
