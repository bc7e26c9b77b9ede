"""The first line of a reply to a bulk read: a value, none, a refusal, or nothing that a store says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from triptych.store.bulk import BulkNotServing, BulkRedirected, BulkRefused
from triptych.store.bulk_reader import BulkReader


class Connection:
    """A transport whose server answers every command with `line`."""

    def __init__(self, reader: BulkReader, line: bytes) -> None:
        self._reader, self._line = reader, line

    def is_closing(self) -> bool:
        return False

    def write(self, frame: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self) -> None:
        self._reader.get_buffer(-1)[: len(self._line)] = self._line
        self._reader.buffer_updated(len(self._line))

    def abort(self) -> None: ...


def reader_of(line: bytes) -> BulkReader:
    reader = BulkReader()
    connection: Any = Connection(reader, line)
    reader.connection_made(connection)
    return reader


async def test_a_key_without_a_value_is_none() -> None:
    assert await reader_of(b"$-1\r\n").get("k", bytearray) is None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"-MOVED 5 h:7000\r\n", BulkRedirected),
        (b"-LOADING the dataset\r\n", BulkNotServing),
        (b"-NOAUTH\r\n", BulkRefused),
        (b":5\r\n", BulkRefused),
        (b"+OK\r\n", BulkRefused),
    ],
)
async def test_what_is_no_value_is_the_error_that_its_line_says(line: bytes, kind: type[Exception]) -> None:
    with pytest.raises(BulkRefused) as refused:
        await reader_of(line).get("k", bytearray)
    assert type(refused.value) is kind
