"""Three hosts on one machine: network namespaces whose links carry no more than a given rate. Needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
#: Of a link: what may go out at once, and the longest wait in its queue.
_BURST, _LATENCY = "2mb", "20ms"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The namespaces of encoder worker, vLLM and store, and their addresses."""

    encoder: str
    vllm: str
    store: str
    encoder_address: str = "10.77.0.1"
    vllm_address: str = "10.77.0.2"
    store_address: str = "10.77.0.3"


@contextmanager
def hosts(rate: str) -> Iterator[Hosts]:
    """Hosts whose links carry `rate`, in tc's words (10gbit), each way; they meet at the store's."""
    names = [f"triptych-{os.getpid()}-{role}" for role in ("encoder", "vllm", "store")]
    made = Hosts(*names)
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", made.store, "link", "add", "switch", "type", "bridge")
        _ip("-n", made.store, "addr", "add", f"{made.store_address}/24", "dev", "switch")
        _ip("-n", made.store, "link", "set", "switch", "up")
        for name, address, port in (
            (made.encoder, made.encoder_address, "port1"),
            (made.vllm, made.vllm_address, "port2"),
        ):
            _ip("-n", made.store, "link", "add", port, "type", "veth", "peer", "name", "wire", "netns", name)
            _ip("-n", made.store, "link", "set", port, "master", "switch")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for namespace, end in ((made.store, port), (name, "wire")):
                _ip("-n", namespace, "link", "set", end, "up")
                shape = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
                _run("tc", "-n", namespace, "qdisc", "add", "dev", end, *shape)
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


def enter(name: str) -> None:
    """The calling thread, and those that it starts, are in the namespace from now on. OSError if refused."""
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered: needs root")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}: needs root, iproute2 and a kernel with tbf")
