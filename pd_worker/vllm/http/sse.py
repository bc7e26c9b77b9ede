"""A parser of server-sent events, for as much of the form as vLLM writes."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.pd_worker.vllm.http.errors import EngineGarbage

#: The longest event: one with log-probabilities of some thousand tokens is far below.
MAX_EVENT_BYTES = 8 << 20
_DATA = b"data:"


class EventParser:
    """The data of each event in a stream of bytes, however they are cut."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of all events that end in `piece`; EngineGarbage for what is no event."""
        self._rest += piece
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        if len(rest) > self._limit:
            raise EngineGarbage(f"an event is longer than {self._limit} bytes")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(_DATA):
                yield bytes(line[len(_DATA) :].strip())
            elif line and not line.startswith(b":"):
                raise EngineGarbage(f"no event: {bytes(line[:80])!r}")
