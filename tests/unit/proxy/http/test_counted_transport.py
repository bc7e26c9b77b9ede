"""What a connection's transport passes on, and what it counts."""

import asyncio

import pytest

from triptych.proxy.http.counted_transport import CountedTransport

HEAD, BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"{}"


class FakeTransport:
    """What has been done to it, in order."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closing = True
        self.done.append("closed")


@pytest.fixture
def fake() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def transport(fake: FakeTransport) -> CountedTransport:
    return CountedTransport(fake)


async def test_a_replys_head_leaves_in_one_piece_with_what_comes_after_it(transport, fake):
    transport.write(HEAD)
    transport.write(BODY)
    assert fake.done == [HEAD + BODY]
    await asyncio.sleep(0)
    assert fake.done == [HEAD + BODY]


async def test_a_head_without_a_body_leaves_in_the_loops_next_turn(transport, fake):
    transport.write(HEAD)
    assert fake.done == []
    await asyncio.sleep(0)
    assert fake.done == [HEAD]
    transport.write(BODY)
    assert fake.done == [HEAD, BODY]


async def test_a_head_that_waits_is_unsent_and_not_taken(transport):
    transport.write(HEAD)
    assert (transport.unsent, transport.taken) == (len(HEAD), 0)
    transport.write(BODY)
    assert (transport.unsent, transport.taken) == (0, len(HEAD + BODY))


async def test_a_refusal_leaves_before_its_connection_is_closed(transport, fake):
    transport.write(HEAD + BODY)
    transport.close()
    assert fake.done == [HEAD + BODY, "closed"]


async def test_nothing_is_written_to_a_client_that_has_gone_while_the_head_waited(transport, fake):
    transport.write(HEAD)
    fake.closing = True
    await asyncio.sleep(0)
    transport.write(BODY)
    assert fake.done == []
