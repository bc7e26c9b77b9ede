"""Hosts as network namespaces on one switch, and cuts between them by blackhole routes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

#: What runs a program where an ordinary user may make namespaces, which `ip netns` keeps below /run.
AS_USER = ("unshare", "-Urnm", "sh", "-c", 'mount -t tmpfs run /run && exec "$@"', "sh")


class NetworkError(AssertionError):
    """This machine has no network namespaces. A test that needs them fails: it never passes without."""


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(
            f"{' '.join(words)}: {done.stderr.strip()}; network namespaces need root, or "
            "`unshare -Urnm` with a tmpfs on /run"
        )


class Network:
    """Namespaces by host name, with one address each. The calling process is a host of its own on the switch.

    `cut` and `heal` change routes only: no interface goes down, connections stay open, and nothing says that
    its packets are lost.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        if shutil.which("ip") is None:
            raise NetworkError("there is no `ip` on this machine: install iproute2")
        number = os.getpid()
        self._prefix = f"tt{number % 100_000}"
        self._net = f"10.{64 + number % 128}.{number // 128 % 256}"
        #: The calling process's own.
        self.address = f"{self._net}.1"
        self.addresses = {host: f"{self._net}.{index}" for index, host in enumerate(hosts, 2)}
        self._cuts: set[tuple[str, str]] = set()

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        switch = self._namespace("sw")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        _run("ip", "link", "add", self._prefix, "type", "veth", "peer", "name", "own", "netns", switch)
        _run("ip", "addr", "add", f"{self.address}/24", "dev", self._prefix)
        _run("ip", "link", "set", self._prefix, "up")
        self._plug(switch, "own")
        for index, (host, address) in enumerate(self.addresses.items()):
            name, port = self._namespace(host), f"port{index}"
            _run("ip", "netns", "add", name)
            _run(
                "ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch
            )
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            self._plug(switch, port)

    def _plug(self, switch: str, port: str) -> None:
        _run("ip", "-n", switch, "link", "set", port, "master", "br0")
        _run("ip", "-n", switch, "link", "set", port, "up")

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def close(self) -> None:
        """Removes all namespaces, and with them their links. Idempotent."""
        for host in (*self.addresses, "sw"):
            with contextlib.suppress(NetworkError):
                _run("ip", "netns", "del", self._namespace(host))
        with contextlib.suppress(NetworkError):
            _run("ip", "link", "del", self._prefix)

    def command(self, host: str, *words: str) -> list[str]:
        """The command line that runs `words` on the host."""
        ip = shutil.which("ip")
        assert ip is not None
        return [ip, "netns", "exec", self._namespace(host), *words]

    def cut(self, sender: str, receiver: str, *, both: bool = True) -> None:
        """Packets from `sender` to `receiver` are lost, and with `both` those back, too."""
        for source, target in ((sender, receiver), (receiver, sender))[: 2 if both else 1]:
            if (source, target) not in self._cuts:
                self._route("add", source, target)
                self._cuts.add((source, target))

    def isolate(self, host: str) -> None:
        """Cuts a host off from all others, the calling process left out."""
        for other in self.addresses:
            if other != host:
                self.cut(host, other)

    def heal(self) -> None:
        """Ends all cuts."""
        for source, target in sorted(self._cuts):
            self._route("del", source, target)
        self._cuts.clear()

    def _route(self, change: str, source: str, target: str) -> None:
        place = f"{self.addresses[target]}/32"
        _run("ip", "-n", self._namespace(source), "route", change, "blackhole", place)

    @contextlib.contextmanager
    def healed(self) -> Iterator[None]:
        """A block after which no cut is left."""
        try:
            yield
        finally:
            self.heal()


def run_as_root(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` as root of a user namespace, in which `Network` works for an ordinary user."""
    return subprocess.run([*AS_USER, sys.executable, *words], capture_output=True, text=True)
