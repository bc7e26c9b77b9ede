"""Connections of the gRPC port: what each look ends and blocks, and the sockets that the system shows."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from support.clock import Clock
from triptych.proxy.grpc.connections import GrpcConnections, PortSocket, block, shut_down, sockets_of
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.quotas.quota import Quota, QuotaSpec

LISTENER = PortSocket(1, True, "::", 0)


def connections(clock: Clock, capacity: int = 8, trusted: str = "") -> tuple[GrpcConnections, Quota]:
    spec = QuotaSpec(
        "grpc-connections", capacity, "connections", "places", "", "closed", per="peer", idle_seconds=15.0
    )
    quota = Quota(spec, clock)
    return GrpcConnections(quota, TrustedProxies(trusted)), quota


def from_address(address: str, count: int, first: int = 10) -> list[PortSocket]:
    return [PortSocket(first + index, False, address, 40000 + index) for index in range(count)]


def test_what_a_peer_opens_above_its_share_is_ended_and_the_peer_blocked() -> None:
    watched, quota = connections(Clock())
    found = [LISTENER, *from_address("192.0.2.7", 6)]
    assert watched.poll(found, set()) == ({14, 15}, frozenset({"192.0.2.7"}))
    fewer = [LISTENER, *found[1:4]]
    watched.poll(fewer, set())
    assert watched.poll(fewer, set()) == (set(), frozenset())
    assert quota.used == 3


def test_a_connection_that_one_listing_misses_is_still_known() -> None:
    clock = Clock()
    watched, quota = connections(clock)
    found = from_address("192.0.2.7", 1)
    watched.poll(found, {"ipv4:192.0.2.7:40000"})
    watched.poll([], set())
    watched.poll(found, set())
    clock.now = 16.0
    quota.sweep()
    assert watched.poll(found, set())[0] == set()


def test_a_connection_without_a_call_is_ended_and_one_with_a_call_stays() -> None:
    clock = Clock()
    watched, quota = connections(clock)
    found = [LISTENER, *from_address("::ffff:192.0.2.7", 1), *from_address("2001:db8::1", 2, 30)]
    watched.poll(found, {"ipv4:192.0.2.7:40000", "ipv6:%5B2001:db8::1%5D:40001"})
    assert watched.poll(found, set()) == (set(), frozenset())
    clock.now = 16.0
    quota.sweep()
    assert watched.poll(found, set())[0] == {30}


def test_a_gateway_has_no_bound_and_no_deadline() -> None:
    clock = Clock()
    watched, quota = connections(clock, trusted="192.0.2.0/24")
    found = from_address("192.0.2.7", 8)
    assert watched.poll(found, set()) == (set(), frozenset())
    clock.now = 1000.0
    quota.sweep()
    assert watched.poll(found, set())[0] == set()


@pytest.fixture(params=["127.0.0.1", "::"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as own:
        own.bind((request.param, 0))
        own.listen()
        yield own


def opened(listener: socket.socket, source: str) -> socket.socket:
    port = listener.getsockname()[1]
    return socket.create_connection(("127.0.0.1", port), timeout=0.3, source_address=(source, 0))


def inodes(listener: socket.socket, *, listening: bool) -> set[int]:
    port = listener.getsockname()[1]
    return {one.inode for one in sockets_of(port) if one.listening == listening}


def test_a_blocked_address_cannot_connect_and_others_can(listener: socket.socket) -> None:
    own = inodes(listener, listening=True)
    assert own == {os.fstat(listener.fileno()).st_ino}
    block(own, ["127.0.0.2", "2001:db8::/64"])
    with pytest.raises(TimeoutError):
        opened(listener, "127.0.0.2")
    opened(listener, "127.0.0.3").close()
    block(own, [])
    opened(listener, "127.0.0.2").close()


def test_a_connection_is_shut_down_beside_its_owner(listener: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        stays, ends = (stack.enter_context(opened(listener, "127.0.0.1")) for _ in range(2))
        owned = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
        number = {one.getpeername()[1]: os.fstat(one.fileno()).st_ino for one in owned}
        assert inodes(listener, listening=False) == set(number.values())
        shut_down({number[ends.getsockname()[1]]})
        assert ends.recv(1) == b""
        with pytest.raises(TimeoutError):
            stays.recv(1)
