"""The actor that a worker or a proxy is on Ray: it runs the service as its child process, and nothing else.

A child process and not the actor's own: its signals, its watchdog, its event loop and its exit are then those
of the same service anywhere else. Requests, tokens and embeddings never pass through the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from triptych.apps.launch.children import CONFIG_EXIT, MAX_BACKOFF_SECONDS, Child
from triptych.base.log import setup_logging

logger = logging.getLogger("launch")

#: Seconds that a service gets to finish what it holds.
GRACE_SECONDS = 35.0
_STOP_SECONDS = 5.0
#: How much of the actor's log is searched for what a service said last.
_TAIL_BYTES = 4096


class ActorState(TypedDict):
    """The state of an actor's service.

    `state` is "runs", "drains", "failed" (as configured it cannot work; `message` is its own) or "ended".
    """

    state: str
    message: str
    pid: int
    node: str
    address: str


class ServiceActor:
    """A Ray actor with one service as its child process, which ends with it.

    `arguments` are those of the command `triptych`; secrets are named by their files only. `ports`, like
    "20000-29999", are those that a worker may listen at; a proxy's `arguments` name its `port`.
    """

    def __init__(self, name: str, arguments: Sequence[str], ports: str, port: int) -> None:
        setup_logging(name, log_format=_option(arguments, "--log-format", "text"))
        raise_priority()
        self._name = name
        self._arguments = list(arguments)
        self._ports = "" if port else ports
        self._node = node_address()
        self._address = f"{self._node}:{port}"
        self._state, self._message = "runs", ""
        self._child = self._new_child()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="service")

    def __repr__(self) -> str:
        # Ray's logs and Dashboard show it.
        return self._name

    async def command(self) -> list[str]:
        """The command line as it was given: another `triptych serve` compares it."""
        return self._arguments

    async def health(self) -> ActorState:
        """How the service's process is; whether it takes requests is for its own health service to say."""
        return {
            "state": self._state,
            "message": self._message,
            "pid": self._child.pid or 0,
            "node": self._node,
            "address": self._address,
        }

    async def address(self) -> str:
        """Where the service listens, host:port."""
        return self._address

    async def drain(self) -> None:
        """Returns when the service has finished what it holds and has ended, after 35 s at the latest."""
        await self._end(GRACE_SECONDS)

    async def stop(self) -> None:
        """Returns when the service has ended, after 5 s at the latest."""
        await self._end(_STOP_SECONDS)

    async def _end(self, grace: float) -> None:
        if self._state == "runs":
            self._state = "drains"
        await self._child.end(grace)
        await asyncio.wait([self._task], timeout=MAX_BACKOFF_SECONDS + 1)

    async def _run(self) -> None:
        try:
            await self._keep_running()
        except Exception as error:
            # An actor that runs nothing would never be missed: another one takes its place.
            logger.exception("%s could not be started", self._name)
            self._state, self._message = "failed", f"could not be started: {error}"

    async def _keep_running(self) -> None:
        while True:
            code = await self._child.watch()
            if code != CONFIG_EXIT or self._state != "runs":
                self._state = "ended"
                return
            if not self._ports or is_free(self._port()):
                self._state, self._message = "failed", last_error()
                logger.error("%s cannot work as configured: %s", self._name, self._message)
                return
            logger.warning("port %d was taken meanwhile; another one is tried", self._port())
            self._child = self._new_child()

    def _new_child(self) -> Child:
        command = [sys.executable, "-m", "triptych.apps.cli", *self._arguments]
        if self._ports:
            place, self._address = listen_at(self._node, free_port_in(self._ports))
            command += place
        return Child(self._name, command)

    def _port(self) -> int:
        return int(self._address.rpartition(":")[2])


def raise_priority() -> None:
    """Gives this process, and its child, the priority of the node's raylet again.

    Ray starts actors with a niceness of 15: beside any other work on the node, requests would wait for it.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
    except OSError:
        logger.warning("the service runs with Ray's low priority: start Ray with RAY_worker_niceness=0")


def node_address() -> str:
    """The IP address of this node, as Ray knows it."""
    import ray

    return str(ray.util.get_node_ip_address())


def listen_at(node: str, port: int) -> tuple[list[str], str]:
    """(options, address) of a worker on this node: all interfaces, or loopback where Ray itself is local."""
    six = ":" in node
    any_host, loopback = ("::", "::1") if six else ("0.0.0.0", "127.0.0.1")
    host = loopback if node == loopback else any_host
    address = f"[{node}]:{port}" if six else f"{node}:{port}"
    return ["--host", host, "--port", str(port), "--advertise", address], address


def free_port_in(ports: str) -> int:
    """A port of the range that nothing listens at; OSError when there is none."""
    first, _, last = ports.partition("-")
    candidates = list(range(int(first), int(last) + 1))
    random.shuffle(candidates)
    for port in candidates:
        if is_free(port):
            return port
    raise OSError(f"no port of {ports} is free on this node")


def is_free(port: int) -> bool:
    """Whether the port can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def last_error(log: Path = Path("/proc/self/fd/2")) -> str:
    """The last line that a service of ours has written to the actor's log, which Ray keeps as a file."""
    try:
        with log.resolve().open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    said = [text for line in lines if (text := _error_in(line))]
    return said[-1] if said else "its log says why"


def _error_in(line: str) -> str:
    """The error of a configuration that a line of the log tells, "" for other lines."""
    if line.startswith("triptych:"):
        return line.removeprefix("triptych:").strip()
    with contextlib.suppress(ValueError):
        record = json.loads(line) if line.startswith("{") else None
        if isinstance(record, dict) and record.get("logger") == "triptych":
            return str(record.get("message", ""))
    return ""


def _option(arguments: Sequence[str], option: str, default: str) -> str:
    """The value of an option in a command line, where it is given."""
    return arguments[arguments.index(option) + 1] if option in arguments[:-1] else default
