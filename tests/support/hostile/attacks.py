"""A cluster under attack: raw bytes in, and the proof afterwards that nothing stuck."""

from __future__ import annotations

import base64
import errno
import functools
import json
import os
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from support.chaos.rest import assert_at_rest
from support.data.pictures import picture
from support.engine.encoder_bench import png
from support.processes.cluster import PATIENCE, Cluster, wait_for

MODEL = "attacked"
PROCESSES = ("proxy", "encoder-0", "pd-0", "store")
#: Files that a process may have open beyond what it had at rest: kept connections come and go.
SLACK = 24


def picture_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def question(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


GOOD = question(picture_url(png(picture(3, 64, 48))))


@dataclass
class Target:
    """The cluster; `expected` is its answer before any attack."""

    cluster: Cluster
    pids: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    expected: str = ""

    @property
    def port(self) -> int:
        return int(self.cluster.url.rsplit(":", 1)[1])

    def remember(self) -> None:
        """What an untouched cluster answers and has open."""
        self.pids = {name: self.cluster.pid(name) for name in PROCESSES}
        for _ in range(2):
            self.expected = self.ask()
        assert_at_rest(self.cluster)
        self.files = {name: self.open_files(name) for name in PROCESSES}

    def open_files(self, name: str) -> int:
        return len(os.listdir(f"/proc/{self.pids[name]}/fd"))

    def ask(self) -> str:
        status, reply = self.chat({"messages": GOOD, "max_tokens": 6, "temperature": 0, "seed": 1})
        assert status == 200, reply
        return str(reply["choices"][0]["message"]["content"])

    def chat(self, body: dict[str, Any] | bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        return self.post("/v1/chat/completions", body, **headers)

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST; `model` is filled in."""
        raw = body if isinstance(body, bytes) else json.dumps({"model": MODEL} | body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.cluster.url + path, data=raw, headers={"Content-Type": "application/json"} | named
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def raw(self, data: bytes, *, finish: bool = True) -> bytes:
        """Everything that comes back for these bytes on a connection of their own, up to its end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            received = b""
            try:
                connection.sendall(data)
                if finish:
                    connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(65536):
                    received += piece
            except OSError as error:
                # The server may be gone already when this end says that it has sent all.
                if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                    raise
                return received
            return received

    def unharmed(self) -> None:
        """The next request is answered as before the attack; nothing is held, nothing has died or grown."""
        assert self.ask() == self.expected
        assert {name: self.cluster.pid(name) for name in PROCESSES} == self.pids
        assert_at_rest(self.cluster)
        for name in PROCESSES:
            few = functools.partial(self._few_files, name)
            wait_for(f"{name} to close its files", few)

    def _few_files(self, name: str) -> bool:
        return self.open_files(name) <= self.files[name] + SLACK


def statuses(raw: bytes) -> list[int]:
    """The status of every HTTP reply in `raw`."""
    lines = raw.replace(b"HTTP/1.1", b"\r\nHTTP/1.1").split(b"\r\n")
    return [int(line.split()[1]) for line in lines if line.startswith(b"HTTP/1.1 ")]
