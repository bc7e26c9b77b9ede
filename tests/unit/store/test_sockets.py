"""Connections to a store: what a step of TLS waits for."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from triptych.store import sockets


@pytest.mark.parametrize(("wants", "reading"), [(ssl.SSLWantReadError, True), (ssl.SSLWantWriteError, False)])
async def test_a_step_of_tls_is_tried_again_once_the_socket_is_ready_for_it(wants, reading, monkeypatch):
    asked, ends = list[bool](), iter([wants(), wants(), "sent"])

    async def ready(sock: object, *, reading: bool) -> None:
        asked.append(reading)

    def step() -> str:
        if isinstance(end := next(ends), Exception):
            raise end
        return end

    monkeypatch.setattr(sockets, "_ready", ready)
    wire: Any = object.__new__(sockets.TlsWire)
    wire._sock = None
    assert await wire._done(step) == "sent"
    assert asked == [reading, reading]
