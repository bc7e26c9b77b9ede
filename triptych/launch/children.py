"""One supervised process: started, watched, restarted with back-off, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence

from triptych.launch.parent import PARENT_VARIABLE

log = logging.getLogger("launch")

#: A process that lived this long may restart at once; before that, waiting doubles.
STABLE_SECONDS = 30.0
MAX_BACKOFF_SECONDS = 10.0
#: The exit code of a process that cannot work as configured; starting it again would not help.
CONFIG_EXIT = 2


def backoff(failures: int) -> float:
    """Seconds to wait before start number `failures + 1` in a row."""
    return 0.0 if failures == 0 else min(0.5 * 2.0 ** (failures - 1), MAX_BACKOFF_SECONDS)


class Child:
    """A process that is meant to run for ever."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False

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
            code = await self._run_once()
            if self._ending:
                break
            if code == CONFIG_EXIT:
                return code
            failures = 1 if time.monotonic() - started > STABLE_SECONDS else failures + 1
            log.warning(
                "%s ended with %s; it starts again in %.1f s", self.name, _told(code), backoff(failures)
            )
        return 0

    async def _run_once(self) -> int:
        environment = os.environ | self._environment
        environment |= {"TRIPTYCH_SERVICE": self.name, PARENT_VARIABLE: str(os.getpid())}
        # A session of its own: Ctrl-C in the terminal reaches the supervisor, which ends all in order.
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        return await self._process.wait()

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
            log.warning("%s did not end within %.0f s; it is killed", self.name, grace)
            process.kill()
            await process.wait()


def _told(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
