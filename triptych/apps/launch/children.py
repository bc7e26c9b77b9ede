"""One supervised process: started, watched, restarted with back-off, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych.apps.launch.fork.client import ForkedProcess, ForkServer
from triptych.apps.launch.secrets import VARIABLE, hand_down
from triptych.base.parent import CAUSE_VARIABLE, PARENT_VARIABLE

logger = logging.getLogger("launch")

#: A process that lived this long may restart at once; before that, waiting doubles.
STABLE_SECONDS = 30.0
MAX_BACKOFF_SECONDS = 10.0
#: The exit code of a process that cannot work as configured; starting it again would not help.
CONFIG_EXIT = 2
#: Where the words of a command begin, after interpreter, -m and module.
_WORDS = 3


def backoff(failures: int) -> float:
    """Seconds to wait before start number `failures + 1` in a row."""
    return 0.0 if failures == 0 else min(0.5 * 2.0 ** (failures - 1), MAX_BACKOFF_SECONDS)


class Child:
    """A process that is restarted whenever it ends.

    `command` is interpreter, -m, module and the words for it; a fork server forks the process if it can.
    `secrets` are variables that only the process itself sees.
    `on_change` is called when `pid` has another value.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        secrets: Mapping[str, str] | None = None,
        fork_server: ForkServer | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._on_change = on_change
        self._command = list(command)
        self._secrets = dict(secrets or {})
        self._fork_server = fork_server
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._ending = False
        #: Why it cannot work as configured, once that is known.
        self.cause = ""

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def watch(self) -> int:
        """Runs the process until `end`, or until it says that its configuration cannot work (2)."""
        failures = 0
        while not self._ending:
            await asyncio.sleep(backoff(failures))
            if self._ending:
                break
            started = time.monotonic()
            try:
                with TemporaryDirectory(prefix="triptych-") as folder:
                    code = await self._run_once(cause := Path(folder, "cause"))
                    if code == CONFIG_EXIT and cause.is_file():
                        self.cause = f"{self.name}: {cause.read_text(encoding='utf-8')}"
            except OSError as error:
                # There may be memory, a process id or room for a file again.
                code, told = 1, f"could not be started: {error}"
            else:
                told = f"ended with {_told(code)}"
            if self._ending:
                break
            if code == CONFIG_EXIT:
                return code
            failures = 0 if time.monotonic() - started > STABLE_SECONDS else failures + 1
            logger.warning("%s %s; it starts again in %.1f s", self.name, told, backoff(failures))
        return 0

    async def _run_once(self, cause: Path) -> int:
        own = {"TRIPTYCH_SERVICE": self.name, PARENT_VARIABLE: str(os.getpid()), CAUSE_VARIABLE: str(cause)}
        self._process = await self._start(own)
        if self._process is None:
            return 0
        self._on_change()
        if self._ending:
            # `end` found no process yet.
            self._process.send_signal(signal.SIGTERM)
        code = await self._process.wait()
        self._on_change()
        return code

    async def _start(self, own: Mapping[str, str]) -> asyncio.subprocess.Process | ForkedProcess | None:
        if self._fork_server is not None:
            forked = await self._fork_server.fork(self.name, self._command[_WORDS:], {**self._secrets, **own})
            if forked is not None or self._ending:
                return forked
        # A session of its own: Ctrl-C in the terminal reaches the supervisor, which ends all in order.
        with hand_down(self._secrets) as descriptor:
            return await asyncio.create_subprocess_exec(
                *self._command,
                env=os.environ | own | {VARIABLE: str(descriptor)},
                pass_fds=(descriptor,),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )

    async def end(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds."""
        self._ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace)
        except TimeoutError:
            logger.warning("%s did not end within %.0f s; it is killed", self.name, grace)
            process.kill()
            await process.wait()


def _told(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
