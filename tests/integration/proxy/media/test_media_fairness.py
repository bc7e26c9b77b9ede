"""One key's silent name servers, slow servers and large media leave the other keys their turns."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from support.processes.media_fetches import fetching
from triptych.base.errors import InvalidRequest, Unavailable


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


@pytest.mark.parametrize(("name", "kind"), [("busy.test", Unavailable), ("none.test", InvalidRequest)])
async def test_only_an_answer_that_there_is_no_such_name_blames_the_url(name: str, kind: type) -> None:
    async with fetching(names=Resolver()) as it:
        with pytest.raises(kind, match="field: "):
            await it.get(f"http://{name}/")
