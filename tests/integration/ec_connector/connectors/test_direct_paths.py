"""Embeddings from encoder to PD worker without the store: the paths, and what can go wrong on each."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.data.items import make_plan
from support.engine.direct_pair import LIMIT, NOWHERE, Pair, entry, opened
from support.engine.transfers import mute_server, wait_for
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.connectors import direct_path, output_server
from triptych.ec_connector.connectors.redis import StoreSaves
from triptych.store import codec, sockets
from triptych.store.bulk import SaveResult
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.sockets import command


@pytest.fixture
def pair() -> Iterator[Pair]:
    with opened(NOWHERE) as made:
        yield made


def peer_only(source: EmbeddingSource) -> EmbeddingSource:
    return replace(source, socket="")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("change, path", [(lambda source: source, "shm"), (peer_only, "peer")])
@pytest.mark.parametrize("rows, width", [(7, 32), (700, 1024), (1, 1)])
def test_a_tensor_comes_without_a_store(pair, change, path, rows, width):
    item = entry(make_plan("direct", rows=rows, width=width))
    source = change(pair.offer(item))
    out = pair.fetch(item.plan, source)
    assert (list(out.fetched), out.paths) == ([item.plan.mm_hash], {item.plan.mm_hash: path})
    assert torch.equal(pair.move(item.plan), item.data)


def test_a_small_embedding_is_one_reply_on_a_connection_that_is_kept(pair, monkeypatch):
    commands, read = list[bytes](), output_server.read_command

    def recorded(raw: bytes) -> tuple[list[bytes], bytes] | None:
        if (parsed := read(raw)) is not None:
            commands.append(parsed[0][0])
        return parsed

    monkeypatch.setattr(output_server, "read_command", recorded)
    for number in range(3):
        item = entry(make_plan(f"small {number}", rows=7), number)
        assert pair.fetch(item.plan, pair.offer(item)).paths == {item.plan.mm_hash: "shm"}
        assert torch.equal(pair.move(item.plan), item.data)
    assert commands == [b"SELECT", b"GET", b"GET", b"GET"]
    large = entry(make_plan("large", rows=700, width=1024))
    assert pair.fetch(large.plan, pair.offer(large)).fetched
    assert commands[4:] == [b"FD"]


@pytest.mark.parametrize("rows", [7, 700])
def test_a_socket_of_another_user_is_not_read_from(pair, monkeypatch, rows):
    item = entry(make_plan("theirs", rows=rows, width=1024))
    source = pair.offer(item)
    for module in (sockets, direct_path):
        monkeypatch.setattr(module, "same_user", lambda _: False)
    assert pair.fetch(item.plan, source).paths == {item.plan.mm_hash: "peer"}


@pytest.mark.parametrize("rows", [7, 700])
def test_a_reader_of_another_user_gets_nothing_by_the_socket(pair, monkeypatch, rows):
    item = entry(make_plan("ours", rows=rows, width=1024))
    source = pair.offer(item)
    monkeypatch.setattr(output_server, "same_user", lambda _: False)
    found = pair.fetch(item.plan, source)
    assert found.fetched.keys() == {item.plan.mm_hash} and "shm" not in found.paths.values()


def test_connections_above_their_number_are_closed(pair, monkeypatch):
    item = entry(make_plan("one too many", rows=7))
    source = pair.offer(item)
    monkeypatch.setattr(output_server, "MAX_CONNECTIONS", -1)
    with socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(20)
        reader.connect(f"\0{source.socket}")
        assert reader.recv(1) == b"", "closed, and not left open without an answer"
    assert "shm" not in pair.fetch(item.plan, source).paths.values()


def test_the_last_bytes_of_a_reply_do_not_wait_for_an_acknowledgement() -> None:
    with output_server._bound("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_to_encoders_that_have_ended_are_forgotten(pair: Pair) -> None:
    loads = pair.pd._loads._direct_loads
    assert loads is not None
    for number in range(3):
        with opened(NOWHERE) as other:
            item = entry(make_plan(f"gone {number}", rows=7))
            assert pair.fetch(item.plan, other.offer(item)).fetched
    item = entry(make_plan("here", rows=7))
    assert pair.fetch(item.plan, pair.offer(item)).fetched
    assert len(loads._idle) == 1


def test_a_value_that_the_store_would_split_comes_in_one(store_url: str) -> None:
    item = entry(make_plan("large", rows=4097, width=4096))
    assert item.plan.nbytes > 64 << 20
    with opened(NOWHERE, memory=128 << 20) as pair:
        for change, path in ((lambda source: source, "shm"), (peer_only, "peer")):
            out = pair.fetch(item.plan, change(pair.offer(item)))
            assert out.paths == {item.plan.mm_hash: path}
            assert torch.equal(pair.move(item.plan), item.data)


def test_a_save_begins_once_the_first_reader_is_done(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.ec_connector.connectors.redis._FIRST_READ", 60.0)
    save, read_before = EmbeddingStore.save, list[bool]()
    with opened(store_url) as pair:

        async def watched(store: EmbeddingStore, plan: ItemPlan, *body: Any, **options: Any) -> SaveResult:
            read = pair.server.outputs.first_read(plan.mm_hash)
            read_before.append(read is not None and read.done())
            return await save(store, plan, *body, **options)

        monkeypatch.setattr(EmbeddingStore, "save", watched)
        item = entry(make_plan("read first", rows=7))
        source = pair.offer(item)
        assert list(pair.fetch(item.plan, source).paths.values()) == ["shm"]
        assert item.plan.mm_hash in wait_for(pair.encoder, lambda out: out.saved).saved
    assert read_before == [True]


@pytest.mark.parametrize("before_the_save", [False, True])
def test_the_bytes_of_a_served_output_are_passed_over_once(store_url, monkeypatch, before_the_save):
    made, update = list[int](), codec.PendingHead.update

    def counted(head: codec.PendingHead, piece: Any) -> None:
        made.append(len(piece))
        update(head, piece)

    monkeypatch.setattr(codec.PendingHead, "update", counted)
    item = entry(make_plan("once", rows=7))
    with opened(store_url) as pair:
        if before_the_save:
            assert pair.encoder.serve(item) is True and pair.encoder.serve(item) is None
            assert made == [item.plan.nbytes]
        pair.encoder.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash)
        source = wait_for(pair.encoder, lambda out: out.saved).offered[item.plan.mm_hash]
        assert made == [item.plan.nbytes]
        assert pair.fetch(item.plan, source).paths == {item.plan.mm_hash: "shm"}
        assert pair.fetch(item.plan, None).paths == {item.plan.mm_hash: "store"}


def test_what_is_served_already_is_offered_without_the_save(pair, monkeypatch):
    monkeypatch.setattr(StoreSaves, "_offer", lambda *_: b"")
    item = entry(make_plan("served", rows=7))
    assert pair.encoder.serve(item)
    source = pair.offer(item)
    assert pair.fetch(item.plan, source).paths == {item.plan.mm_hash: "shm"}


def test_what_is_not_finite_is_neither_served_nor_known_as_served(store_url: str) -> None:
    item = entry(make_plan("not finite", rows=7))
    item.data[6, -1] = torch.nan
    with opened(store_url) as pair:
        assert pair.encoder.serve(item) is False
        assert pair.server.outputs.get(item.plan) is None


def test_the_save_goes_on_and_others_load_from_the_store(store_url: str) -> None:
    item = entry(make_plan("both", rows=9))
    with opened(store_url) as pair:
        pair.encoder.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash)
        out = wait_for(pair.encoder, lambda out: out.saved)
        assert list(out.offered) == out.saved == [item.plan.mm_hash]
        assert pair.fetch(item.plan, None).paths == {item.plan.mm_hash: "store"}


@pytest.mark.parametrize(
    "forge",
    [
        lambda source: replace(source, name="0" * 32),
        lambda source: replace(source, socket="triptych-ec-nobody", address="127.0.0.1:9"),
        lambda source: replace(source, socket="", address="nobody.invalid:1"),
        lambda source: replace(source, socket="", address="no port"),
        lambda source: EmbeddingSource("f" * 32),
    ],
)
def test_a_forged_source_falls_to_the_store(store_url, forge):
    item = entry(make_plan("forged", rows=5))
    with opened(store_url) as pair:
        source = pair.offer(item)
        out = pair.fetch(item.plan, forge(source))
        assert out.paths == {item.plan.mm_hash: "store"}
        assert torch.equal(pair.move(item.plan), item.data)


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """The address of a data port that answers every command with `raw` and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1000)
                        connection.sendall(raw)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [b"", b"$-1\r\n", b"-ERR\r\n", b"+OK\r\n", b"$5\r\nhello\r\n", b"$99999999999\r\n", b"\0" * 9999],
)
def test_a_forged_port_falls_to_the_store(store_url: str, answer: bytes) -> None:
    item = entry(make_plan("forged port", rows=5))
    with opened(store_url) as pair, answering(answer) as address:
        source = replace(peer_only(pair.offer(item)), address=address)
        assert pair.fetch(item.plan, source).paths == {item.plan.mm_hash: "store"}
        assert torch.equal(pair.move(item.plan), item.data)


def test_an_encoder_that_ends_while_it_sends_is_followed_by_the_store(store_url: str) -> None:
    item = entry(make_plan("half sent", rows=300, width=1024))
    with opened(store_url) as pair:
        source = pair.offer(item)
        with pair.server.outputs.reading(source.name) as output:
            half = b"$%d\r\n" % output.nbytes + bytes(output.view[: output.nbytes // 2])
        with answering(half) as address:
            out = pair.fetch(item.plan, replace(peer_only(source), address=address))
        assert out.paths == {item.plan.mm_hash: "store"}
        assert torch.equal(pair.move(item.plan), item.data)


def test_a_reader_that_ends_while_it_is_sent_to_keeps_no_memory(pair: Pair) -> None:
    item = entry(make_plan("half read", rows=300, width=1024))
    source = pair.offer(item)
    output = pair.server.outputs._by_name[source.name]
    host, port = source.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(command("GET", source.name))
        assert sock.recv(1000).startswith(b"$")
    wait_until(lambda: not output.readers)
    assert pair.fetch(item.plan, peer_only(source)).paths == {item.plan.mm_hash: "peer"}
    assert torch.equal(pair.move(item.plan), item.data)


@pytest.mark.parametrize("change", [lambda source: source, peer_only])
def test_another_tenants_embedding_is_never_taken(pair, change):
    theirs, ours = entry(make_plan("theirs")), make_plan("ours")
    source = change(pair.offer(theirs))
    for plan in (ours, replace(theirs.plan, namespace="f" * 64), replace(theirs.plan, rows=6, length=6)):
        out = pair.fetch(plan, source)
        assert [failure.mm_hash for failure in out.failed] == [plan.mm_hash]
        assert not out.fetched


@pytest.mark.parametrize("change", [lambda source: source, peer_only])
def test_a_changed_byte_is_found(pair: Pair, change: Callable[[EmbeddingSource], EmbeddingSource]) -> None:
    item = entry(make_plan("changed", rows=300, width=1000))
    source = change(pair.offer(item))
    with pair.server.outputs.reading(source.name) as output:
        output.segment.memory[output.nbytes - 5] ^= 1
    out = pair.fetch(item.plan, source)
    assert out.failed and not out.fetched


def test_an_item_that_no_path_has_is_first_missing_then_out_of_reach(pair: Pair) -> None:
    plan = make_plan("gone")
    first = pair.fetch(plan, EmbeddingSource("0" * 32, "triptych-ec-nobody", "127.0.0.1:9"))
    assert [failure.mm_hash for failure in first.missing] == [plan.mm_hash]
    second = pair.fetch(plan, None)
    assert [failure.unreachable for failure in second.failed] == [True]


def test_a_store_that_hangs_is_not_waited_for_once_it_is_known_to_be_lost(tmp_path: Path) -> None:
    with mute_server(tmp_path) as url, opened(url) as pair:
        pair.reading.reaches_store = lambda: False
        assert pair.fetch(make_plan("lost"), None).missing
        item = entry(make_plan("fresh"))
        assert pair.fetch(item.plan, pair.offer(item)).fetched


def test_a_full_pool_offers_nothing_more_until_an_output_is_read(pair: Pair) -> None:
    items = [entry(make_plan(f"full {i}", rows=300, width=1024), i) for i in range(4)]
    first, second, third = (pair.offer(item) for item in items[:3])
    key = items[3].plan.mm_hash
    pair.encoder.save_caches({key: items[3]}, key)
    assert not wait_for(pair.encoder, lambda out: key in out.unsaved).offered
    assert pair.fetch(items[1].plan, second).fetched
    fourth = pair.offer(items[3])
    assert pair.fetch(items[3].plan, fourth).fetched
    assert pair.fetch(items[1].plan, second).failed
    assert pair.fetch(items[0].plan, first).fetched
    assert pair.fetch(items[2].plan, third).fetched
    assert pair.server.outputs.nbytes <= LIMIT


def test_what_makes_room_for_another_output_is_read_from_the_store(store_url: str) -> None:
    first, second = (entry(make_plan(f"evicted {i}", rows=700, width=1024), i) for i in range(2))
    with opened(store_url) as pair:
        source = pair.offer(first)
        wait_for(pair.encoder, lambda out: out.saved)
        assert pair.fetch(second.plan, pair.offer(second)).paths == {second.plan.mm_hash: "shm"}
        assert pair.fetch(first.plan, source).paths == {first.plan.mm_hash: "store"}
        assert torch.equal(pair.move(first.plan), first.data)


_READER = """
import os, socket, sys
from triptych.store.sockets import command
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.bulk import SaveResult
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
sock.sendall(command("FD", sys.argv[2]))
line, fds, _, _ = socket.recv_fds(sock, 64, 1)
try:
    os.pwrite(fds[0], b"x", 0)
except OSError as error:
    print("refused", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_is_killed_with_a_segment_leaves_it_free_and_unchanged(pair: Pair) -> None:
    item = entry(make_plan("held", rows=300, width=1024))
    source = pair.offer(item)
    output = pair.server.outputs._by_name[source.name]
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, source.socket, source.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdout.readline() == "refused\n"
        assert output.readers == 1
        reader.send_signal(signal.SIGKILL)
    wait_until(lambda: not output.readers)
    assert pair.fetch(item.plan, source).paths == {item.plan.mm_hash: "shm"}
    assert torch.equal(pair.move(item.plan), item.data)


_ENCODER = """
import sys, torch
sys.path.insert(0, "tests")
from support.data.items import make_plan
from support.engine.direct_pair import NOWHERE, Pair, entry
pair = Pair(NOWHERE)
item = entry(make_plan("killed", rows=300, width=1024))
source = pair.offer(item)
print(source.name, source.socket, source.address, flush=True)
sys.stdin.read()
"""


def memory_files() -> set[str]:
    """Files of shared memory, without those by which OpenMP registers each process of the machine."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("__KMP_")}


def test_an_encoder_that_is_killed_leaves_nothing_and_its_reader_goes_on(pair: Pair) -> None:
    before = memory_files()
    root = Path(__file__).parents[4]
    encoder = subprocess.Popen(
        [sys.executable, "-c", _ENCODER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    item = entry(make_plan("killed", rows=300, width=1024))
    with encoder:
        source = EmbeddingSource(*encoder.stdout.readline().split())
        assert pair.fetch(item.plan, source).paths == {item.plan.mm_hash: "shm"}
        assert torch.equal(pair.move(item.plan), item.data)
        encoder.send_signal(signal.SIGKILL)
    assert memory_files() <= before
    assert pair.fetch(item.plan, source).missing
