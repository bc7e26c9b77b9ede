"""The child process that decodes one file, within limits, and is killed at its deadline or by its end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media.cost import slowness
from triptych.encoder_worker.media.work import Abandoned, DecodeWork

logger = logging.getLogger(__name__)

#: Longest line that the process prints.
_MAX_LINE = 4096
#: A process may use so many times the limit of CPU time, since estimates are no better, and for one answer
#: so many times of the clock's, since others use the cores too.
_CPU_SLACK, _CLOCK_SLACK = 2.0, 4.0
#: Seconds in which a process that has closed its output ends.
_ENDING_SECONDS = 5.0


class DecoderProcess:
    """To be closed. `noun` ("video", "audio") begins its errors, `format` is what a remedy converts to.

    Its CPU time has a bound, and each `question` a deadline; the end of the work that it is for kills it.
    """

    noun: ClassVar[str]
    format: ClassVar[str]
    program: ClassVar[str] = "clip_decoder.py"
    #: Modules that the program needs, and the extra of the package that installs them.
    needs: ClassVar[tuple[str, str]] = ("av", "triptych[video]")

    def __init__(
        self, data: bytes, limits: Mapping[str, object], seconds: float, work: DecodeWork | None = None
    ) -> None:
        """Starts it on the file; `limits` are what the program takes, `seconds` what a file may take."""
        self._seconds = seconds
        module, extra = self.needs
        if importlib.util.find_spec(module) is None:
            raise InvalidRequest(
                f"{self.noun}: no such file is decoded here: install {extra} for the encoder workers",
                param=self.noun,
            )
        if work is not None:
            work.check()
        limits = {**limits, "decode_seconds": seconds, "slowness": slowness()}
        limits["cpu_seconds"] = math.ceil(_CPU_SLACK * seconds)
        descriptor = os.memfd_create(self.noun, os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data)
            os.lseek(descriptor, 0, os.SEEK_SET)
            # Isolated: neither the folder nor variables of this process decide what it imports.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", str(Path(__file__).with_name(self.program))),
                    *(str(descriptor), json.dumps(limits)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
            )
        finally:
            os.close(descriptor)
        self._late = threading.Event()
        self._killed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what is still to be written goes nowhere
                    pipe.close()
        self._process.wait()

    @contextlib.contextmanager
    def question(self, work: DecodeWork | None = None) -> Iterator[None]:
        """While the body asks: the process is killed at the deadline, and by the end of the work."""
        deadline = threading.Timer(_CLOCK_SLACK * self._seconds, self._expire)
        deadline.daemon = True
        deadline.start()
        try:
            if work is None:
                yield
            else:
                with work.ended_by(self.kill):
                    yield
        finally:
            deadline.cancel()

    def kill(self) -> None:
        """Ends it, from any thread: nobody waits for it."""
        self._killed.set()
        self._process.kill()

    @property
    def late(self) -> bool:
        """It has been ended by its deadline, or by the bound of its CPU time."""
        return self._late.is_set()

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, line: object) -> None:
        """Sends a line of JSON."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(line).encode() + b"\n")
            pipe.flush()
        except OSError:
            raise self.refused() from None

    def line(self, key: str) -> dict[str, Any]:
        """Its line of JSON with this key, or the error that it says instead."""
        line = _parsed(self.stdout.readline(_MAX_LINE))
        if key not in line:
            raise self._refused(line)
        return line

    def read_into(self, view: memoryview) -> bool:
        """Whether the whole of `view` was filled with what comes next."""
        return self.stdout.readinto(view) == len(view)  # type: ignore[attr-defined,no-any-return]

    def refused(self, begun: bytes = b"") -> Exception:
        """What its line says that has begun with these bytes."""
        return self._refused(_parsed(begun + self.stdout.readline(_MAX_LINE)))

    def _refused(self, line: dict[str, Any]) -> Exception:
        if self._killed.is_set():
            return Abandoned()
        ended = self._signal() if not line else None
        if ended == signal.SIGXCPU:
            self._late.set()
        if self.late:
            message = (
                f"{self.noun}: it was not decoded within the {self._seconds:g} s allowed; send a shorter or "
                "smaller one, or have --max-decode-seconds of the encoder workers raised"
            )
            return TooLarge(message, param=self.noun)
        # A process that ends without an answer has met its memory limit, or a fault of a decoder.
        message = f"the file is truncated or damaged; convert it to {self.format} again, or send another"
        if ended is not None:
            message = f"its decoder was ended by {ended.name}: {message}"
        message = line.get("error") or message
        logger.info("a file could not be decoded (%s: %s)", self.noun, line.get("cause") or message)
        return (TooLarge if line.get("large") else InvalidRequest)(f"{self.noun}: {message}", param=self.noun)

    def _signal(self) -> signal.Signals | None:
        """The signal that has ended the process, if one has."""
        try:
            code = self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return signal.Signals(-code) if code < 0 else None

    def _expire(self) -> None:
        self._late.set()
        self._process.kill()


def package_root() -> str:
    """The folder that this project is imported from, for programs that import it too."""
    import triptych

    return str(Path(triptych.__file__ or ".").parents[1])


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
