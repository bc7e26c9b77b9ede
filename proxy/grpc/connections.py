"""Connections of the gRPC port by peer: each has its share, and one without a call is closed soon."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from triptych.proxy.http.peers import TrustedProxies, plain_address
from triptych.proxy.quotas.quota import Hold, Quota, QuotaExceeded

_SOCK_DIAG = 4
_DIAG_BY_FAMILY, _DUMP = 20, 0x301
_DONE, _ERROR = 3, 2
_ESTABLISHED, _LISTEN = 1, 10
_HEAD, _MESSAGE_BYTES = struct.Struct("=IHHII"), 72
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
#: Peers that one filter names.
MAX_BLOCKED = 64
_NETWORK_HEADER = 0xFFF00000
_LOAD, _LOAD_BYTE, _SHIFT, _IF_EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x05, 0x06
_Step = tuple[int, int, int, int]
_DROP: _Step = (_RETURN, 0, 0, 0)
_PASS: _Step = (_RETURN, 0, 0, 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class PortSocket:
    """A socket of a port, by the number that the system knows it by; a listening one has no peer."""

    inode: int
    listening: bool
    address: str
    port: int


def sockets_of(port: int) -> list[PortSocket]:
    """The listening sockets and the connections of a local port. OSError where the system does not tell."""
    sockets = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            states = 1 << _ESTABLISHED | 1 << _LISTEN
            request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, states)
            request += struct.pack("!H", port) + bytes(46)
            size = _HEAD.size + len(request)
            netlink.sendto(_HEAD.pack(size, _DIAG_BY_FAMILY, _DUMP, 1, 0) + request, (0, 0))
            sockets += [one for data in _answers(netlink) if (one := _parsed(data, port)) is not None]
    return sockets


def _answers(netlink: socket.socket) -> Iterator[bytes]:
    while True:
        data = netlink.recv(1 << 18)
        at = 0
        while at < len(data):
            size, kind = _HEAD.unpack_from(data, at)[:2]
            if kind == _DONE:
                return
            if kind == _ERROR:
                raise OSError("sock_diag is not served here")
            yield data[at + _HEAD.size : at + size]
            at += size + 3 & ~3


def _parsed(data: bytes, port: int) -> PortSocket | None:
    family, state = data[0], data[1]
    own, other = struct.unpack_from("!HH", data, 4)
    if own != port:
        return None
    raw = data[24:28] if family == socket.AF_INET else data[24:40]
    (inode,) = struct.unpack_from("=I", data, _MESSAGE_BYTES - 4)
    return PortSocket(inode, state == _LISTEN, str(ipaddress.ip_address(raw)), other)


def shut_down(inodes: set[int]) -> None:
    """Ends these sockets of this process; their owner sees that as the peer's end."""
    for own in _own_sockets(inodes):
        with contextlib.suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)


def block(inodes: set[int], addresses: Iterable[str]) -> None:
    """Drops what comes from these addresses, or networks of 64 bits, to these listening sockets of ours."""
    steps = filter_steps(addresses)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    for own in _own_sockets(inodes):
        if len(steps) > len(filter_steps(())):
            fields = struct.pack("HP", len(steps), ctypes.addressof(program))
            own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fields)
        else:
            with contextlib.suppress(OSError):
                own.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def filter_steps(addresses: Iterable[str]) -> list[_Step]:
    """The program that drops packets of these sources and passes all others."""
    of_4: list[_Step] = [(_LOAD, 0, 0, _NETWORK_HEADER + 12)]
    of_6: list[_Step] = []
    for text in addresses:
        source = ipaddress.ip_network(text)
        if isinstance(source, ipaddress.IPv4Network):
            of_4 += [(_IF_EQUAL, 0, 1, int(source.network_address)), _DROP]
        else:
            high, low = struct.unpack("!II", source.network_address.packed[:8])
            of_6 += [(_LOAD, 0, 0, _NETWORK_HEADER + 8), (_IF_EQUAL, 0, 3, high)]
            of_6 += [(_LOAD, 0, 0, _NETWORK_HEADER + 12), (_IF_EQUAL, 0, 1, low), _DROP]
    of_4.append(_PASS)
    version: list[_Step] = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_SHIFT, 0, 0, 4)]
    return [*version, (_IF_EQUAL, 0, 1, 6), (_JUMP, 0, 0, len(of_4)), *of_4, *of_6, _PASS]


def _own_sockets(inodes: set[int]) -> Iterator[socket.socket]:
    """Copies of this process's sockets with these numbers, each closed when the next one is asked for."""
    for name in os.listdir("/proc/self/fd") if inodes else ():
        with contextlib.suppress(OSError):
            state = os.fstat(int(name))
            if not stat.S_ISSOCK(state.st_mode) or state.st_ino not in inodes:
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if os.fstat(own.fileno()).st_ino == state.st_ino:
                    yield own


logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25


class GrpcConnections:
    """Follows the connections of gRPC's port beside gRPC; it is not in the way of their bytes.

    A peer may go above its share until the next poll. Then what is too much is closed, and while the peer has
    its share nothing more of it is accepted. A gateway of `--trusted-proxies` has no bound.
    """

    def __init__(self, quota: Quota, trusted: TrustedProxies) -> None:
        self.port = 0
        self._quota = quota
        self._trusted = trusted
        self._holds: dict[int, Hold] = {}
        #: The peers of calls that were let in since the last poll, as gRPC writes them.
        self._callers: set[str] = set()
        self._ending: set[int] = set()
        self._missed: set[int] = set()
        self._listeners: set[int] = set()
        self._blocked: frozenset[str] = frozenset()

    def called(self, peer: str) -> None:
        """A call of this peer was let in: its connection stays."""
        self._callers.add(peer)

    async def run(self) -> None:
        """Until cancelled."""
        warned = False
        while True:
            callers, self._callers = self._callers, set()
            try:
                sockets = await asyncio.to_thread(sockets_of, self.port)
                await asyncio.to_thread(self._apply, *self.poll(sockets, callers))
            except OSError as error:
                if not warned:
                    logger.warning("gRPC connections are not limited per client now: %s", error)
                warned = True
            await asyncio.sleep(LOOK_SECONDS)

    def poll(self, sockets: list[PortSocket], callers: set[str]) -> tuple[set[int], frozenset[str]]:
        """The connections to end, and the peers to block, for the sockets that there are now."""
        calling = {_split(peer) for peer in callers}
        self._listeners = {one.inode for one in sockets if one.listening}
        # One without a number is not accepted yet.
        connections = {one.inode: one for one in sockets if one.inode and not one.listening}
        # A listing may miss one while others come and go.
        missed, self._missed = self._missed, self._holds.keys() - connections.keys()
        for inode in missed & self._missed:
            self._holds.pop(inode).close()
        ending = self._ending & connections.keys()
        self._ending.clear()
        for inode, one in connections.items():
            if (hold := self._holds.get(inode)) is None:
                holder = self._trusted.holder(one.address)
                try:
                    hold = self._quota.hold(holder, 1, partial(self._ending.add, inode))
                except QuotaExceeded:
                    ending.add(inode)
                    continue
                self._holds[inode] = hold
                hold.settled = not holder
            if (plain_address(one.address), one.port) in calling:
                hold.settled = True
        holders = {hold.holder for hold in self._holds.values() if hold.holder}
        full = [holder for holder in holders if not self._quota.fits(holder, 1)]
        return ending, frozenset(sorted(full, key=self._quota.held)[-MAX_BLOCKED:])

    def _apply(self, ending: set[int], full: frozenset[str]) -> None:
        if full != self._blocked:
            block(self._listeners, full)
            logger.info("%d clients have their share of gRPC connections", len(full))
            self._blocked = full
        shut_down(ending)


def _split(peer: str) -> tuple[str, int]:
    """Address and port of "ipv4:1.2.3.4:5" or "ipv6:%5B::1%5D:5"."""
    address, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    return plain_address(address.strip("[]")), int(port) if port.isdigit() else 0
