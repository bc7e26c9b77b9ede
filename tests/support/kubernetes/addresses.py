"""IP addresses for the pods and Services of one cluster on loopback. Linux answers on all of 127.0.0.0/8."""

from __future__ import annotations

import random
import socket
from collections import deque

#: The lock of a network: it belongs to the test process that has bound this port at its first address.
_CLAIM_PORT = 61_999


class Addresses:
    """A /24 of loopback that no other cluster on this machine uses. Freed addresses are taken again last."""

    def __init__(self) -> None:
        self._claim, network = _claimed_network()
        self._free = deque(f"{network}.{host}" for host in range(2, 255))

    def take(self) -> str:
        return self._free.popleft()

    def give_back(self, address: str) -> None:
        self._free.append(address)

    def close(self) -> None:
        self._claim.close()


def _claimed_network() -> tuple[socket.socket, str]:
    for _ in range(100):
        network = f"127.{random.randint(16, 250)}.{random.randint(0, 255)}"
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind((f"{network}.1", _CLAIM_PORT))
        except OSError:
            claim.close()
        else:
            return claim, network
    raise AssertionError("no free network in 127.0.0.0/8 (not Linux, or port 61999 is taken everywhere)")
