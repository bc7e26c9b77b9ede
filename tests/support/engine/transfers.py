"""Waiting for a worker role's reports, and a server that takes connections and never answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from triptych.ec_connector.base import ECConnectorOutput, ECConnectorWorker


def wait_for(worker: ECConnectorWorker, done: Callable[[ECConnectorOutput], object]) -> ECConnectorOutput:
    """All reports until `done` says that they are enough; AssertionError after 20 s."""
    total, deadline = ECConnectorOutput(), time.monotonic() + 20
    while not done(total):
        assert time.monotonic() < deadline, f"only {total} came"
        part = worker.get_finished()
        for item in fields(ECConnectorOutput):
            value = getattr(part, item.name)
            if isinstance(value, list):
                getattr(total, item.name).extend(value)
            else:
                getattr(total, item.name).update(value)
        time.sleep(0.002)
    return total


@contextmanager
def mute_server(folder: Path) -> Iterator[str]:
    """The URL of a socket that accepts and reads nothing: a store that hangs."""
    path = folder / "mute.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield f"unix://{path}"


@contextmanager
def counting_relay(target: str, folder: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """A URL that passes on to the socket at `target`, and how many bursts clients have sent so far.

    A burst is what arrives before the next reply: a round trip.
    """
    path, bursts, stop = folder / "relay.sock", [0], threading.Event()
    threads: list[threading.Thread] = []

    def serve(client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(target.removeprefix("unix://"))
            for end in (client, server):
                end.settimeout(0.02)
            answered = True
            while not stop.is_set():
                for source, sink, is_request in ((client, server, True), (server, client, False)):
                    try:
                        data = source.recv(1 << 20)
                    except TimeoutError:
                        continue
                    if not data:
                        return
                    bursts[0] += is_request and answered
                    answered = not is_request
                    sink.sendall(data)

    def accept(listener: socket.socket) -> None:
        listener.settimeout(0.02)
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            threads.append(threading.Thread(target=serve, args=(client,)))
            threads[-1].start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        threads.append(threading.Thread(target=accept, args=(listener,)))
        threads[0].start()
        try:
            yield f"unix://{path}", lambda: bursts[0]
        finally:
            stop.set()
            for thread in list(threads):
                thread.join()
