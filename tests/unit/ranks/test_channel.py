"""Messages between ranks arrive whole, with their descriptors, and every wait ends."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator

import pytest

from triptych.base.ranks.channel import MAX_FRAME_BYTES, Channel, RankLost


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """Rank 0's end, and the socket of rank 1's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours, "rank 1"), theirs


def test_a_message_larger_than_the_sockets_buffer_arrives_with_its_descriptor(pair):
    channel, theirs = pair
    large = {"bytes": b"x" * (8 << 20)}
    with tempfile.TemporaryFile() as file:
        file.write(b"passed on")
        file.flush()
        sender = threading.Thread(target=channel.send, args=(large, [file.fileno()]), kwargs={"seconds": 30})
        sender.start()
        message, (descriptor,) = Channel(theirs, "rank 0").receive(seconds=30)
        sender.join()
    assert message == large
    assert os.pread(descriptor, 100, 0) == b"passed on"
    os.close(descriptor)


def test_two_messages_sent_at_once_keep_their_own_descriptors(pair):
    channel, theirs = pair
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
        for file in (first, second):
            channel.send({"at": file.fileno()}, [file.fileno()], seconds=5)
        peer = Channel(theirs, "rank 0")
        for file in (first, second):
            message, (descriptor,) = peer.receive(seconds=5)
            assert message == {"at": file.fileno()}
            assert os.fstat(descriptor).st_ino == os.fstat(file.fileno()).st_ino
            os.close(descriptor)


def test_a_peer_that_says_nothing_is_lost_when_the_time_is_over_and_stays_lost(pair):
    channel, theirs = pair
    with pytest.raises(RankLost, match="rank 1 has not answered in time"):
        channel.receive(seconds=0.05)
    for again in (lambda: channel.receive(seconds=5), lambda: channel.send({}, seconds=5)):
        with pytest.raises(RankLost):
            again()


def test_a_peer_that_closes_is_lost_at_once(pair):
    channel, theirs = pair
    theirs.close()
    with pytest.raises(RankLost, match="is gone"):
        channel.receive(seconds=60)


def test_a_peer_that_does_not_read_is_lost_when_the_time_is_over(pair):
    channel, theirs = pair
    with pytest.raises(RankLost, match="has not read"):
        channel.send({"bytes": b"x" * (8 << 20)}, seconds=0.05)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        struct.pack(">I", 1) + b"\xc1",
        struct.pack(">I", 1) + b"\x01",
        struct.pack(">I", 0),
    ],
    ids=["too long", "no msgpack", "no map", "empty"],
)
def test_what_is_no_message_ends_the_connection(pair, frame):
    channel, theirs = pair
    theirs.sendall(frame)
    with pytest.raises(RankLost, match="rank 1 sends"):
        channel.receive(seconds=5)


def test_a_message_above_the_limit_is_not_sent(pair, monkeypatch):
    channel, _ = pair
    monkeypatch.setattr("triptych.base.ranks.channel.MAX_FRAME_BYTES", 100)
    with pytest.raises(ValueError, match="a frame holds 100"):
        channel.send({"bytes": bytes(100)}, seconds=5)


def test_a_thread_that_waits_is_heard_every_second(pair):
    channel, theirs = pair
    heard: list[bool] = []
    with pytest.raises(RankLost):
        channel.receive(seconds=1.2, while_waiting=lambda: heard.append(True))
    assert heard
