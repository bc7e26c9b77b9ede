"""What a check measures: latency, bandwidth, the certificate's end, and whether a password is needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
import uuid

from triptych.store import keys
from triptych.store.address import StoreAddress
from triptych.store.bulk import BulkRefused
from triptych.store.control import StoreRefused, StoreUnavailable
from triptych.store.remedies import is_denied
from triptych.store.topology.server import Server
from triptych.store.topology.topology import Topology

_PINGS = 30
_ROUNDS = 3
#: Milliseconds after which a value of the measurement is gone at the latest.
_TTL = 60_000


async def latency(server: Server) -> list[float]:
    """Seconds of small commands, one after the other; the first one, which connects, does not count."""
    await server.control.execute("PING")
    times = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        await server.control.execute("PING")
        times.append(time.perf_counter() - begin)
    return times


async def bandwidth(topology: Topology, nbytes: int) -> tuple[float | None, float | None]:
    """Bytes per second written and read, the best of some; None for what the user may not do.

    One value is written, under a key that no item has, and deleted; it is gone after a minute anyway.
    """
    key = f"{keys.EMBEDDING}{{check-{uuid.uuid4().hex}}}"
    value, memory = os.urandom(nbytes), memoryview(bytearray(nbytes))
    rates: dict[str, float] = {}

    async def write() -> None:
        await topology.write(
            key, nbytes, lambda writer: writer.set(key, [value], milliseconds=_TTL, only_new=False)
        )

    async def read() -> None:
        await topology.read(key, nbytes, lambda reader: reader.get(key, lambda size: memory[:size]))

    try:
        for name, transfer in (("written", write), ("read", read)):
            for _ in range(_ROUNDS):
                begin = time.perf_counter()
                try:
                    await transfer()
                except BulkRefused as error:
                    if not is_denied(error):
                        raise
                    break
                rate = nbytes / (time.perf_counter() - begin)
                rates[name] = max(rates.get(name, 0.0), rate)
            # A value that could not be written is not read either.
            if name not in rates:
                break
    finally:
        if "written" in rates:
            with contextlib.suppress(StoreRefused):
                await topology.control.execute("UNLINK", key)
    return rates.get("written"), rates.get("read")


async def days_left(address: StoreAddress) -> float:
    """Days until the server's certificate ends. OSError when it does not let us in."""
    assert address.tls is not None
    context = address.tls.context()

    def ask() -> float:
        with (
            socket.create_connection((address.host, address.port), timeout=5) as sock,
            context.wrap_socket(sock, server_hostname=address.host) as wrapped,
        ):
            found = wrapped.getpeercert() or {}
            return (ssl.cert_time_to_seconds(str(found["notAfter"])) - time.time()) / 86400

    return await asyncio.to_thread(ask)


async def is_open(address: StoreAddress) -> bool:
    """Whether the server answers without a password."""
    plain = StoreAddress(path=address.path, host=address.host, port=address.port, tls=address.tls)
    server = Server(plain, 5.0)
    try:
        await server.control.execute("PING")
    except StoreUnavailable:
        return False
    finally:
        await server.close()
    return True
