"""Connections of the gRPC port by peer: each has its share, and one without a call is closed soon."""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from functools import partial

from triptych.proxy.grpc.sockets import MAX_BLOCKED, PortSocket, block, shut_down, sockets_of
from triptych.proxy.http.peers import TrustedProxies, plain_address
from triptych.proxy.quotas.quota import Hold, Quota, QuotaExceeded

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25


class GrpcConnections:
    """Follows the connections of gRPC's port beside gRPC; it is not in the way of their bytes.

    A peer may go above its share until the next look. Then what is too much is closed, and while the peer has
    its share nothing more of it is accepted. A gateway of `--trusted-proxies` has no bound.
    """

    def __init__(self, quota: Quota, trusted: TrustedProxies) -> None:
        self.port = 0
        self._quota = quota
        self._trusted = trusted
        self._holds: dict[int, Hold] = {}
        #: The peers of calls that were let in since the last look, as gRPC writes them.
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
                found = await asyncio.to_thread(sockets_of, self.port)
                await asyncio.to_thread(self._apply, *self.look(found, callers))
            except OSError as error:
                if not warned:
                    logger.warning("gRPC connections are not limited per client now: %s", error)
                warned = True
            await asyncio.sleep(LOOK_SECONDS)

    def look(self, found: list[PortSocket], callers: set[str]) -> tuple[set[int], frozenset[str]]:
        """The connections to end, and the peers to block, for the sockets that there are now."""
        calling = {_split(peer) for peer in callers}
        self._listeners = {one.inode for one in found if one.listening}
        # One without a number is not accepted yet.
        connections = {one.inode: one for one in found if one.inode and not one.listening}
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
