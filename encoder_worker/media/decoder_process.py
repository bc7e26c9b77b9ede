"""The child process that decodes one file by PyAV, within limits, and is killed at its deadline."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from triptych.base.errors import InvalidRequest, TooLarge

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("clip_decoder.py")
#: Longest line that the process prints.
_MAX_LINE = 4096


class DecoderProcess:
    """To be closed. `noun` ("video", "audio") begins its errors, `format` is what a remedy converts to."""

    noun: ClassVar[str]
    format: ClassVar[str]

    def __init__(self, data: bytes, limits: Mapping[str, object], seconds: float) -> None:
        """Starts it on the file; `limits` are what the program takes."""
        self._seconds = seconds
        if importlib.util.find_spec("av") is None:
            raise InvalidRequest(
                f"{self.noun}: no such file is decoded here: install triptych[video] for the encoder workers",
                param=self.noun,
            )
        descriptor = os.memfd_create(self.noun, os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data)
            os.lseek(descriptor, 0, os.SEEK_SET)
            # Isolated: neither the folder nor variables of this process decide what it imports.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_PROGRAM), str(descriptor), json.dumps(limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
            )
        finally:
            os.close(descriptor)
        self._late = threading.Event()
        self._deadline = threading.Timer(seconds, self._kill)
        self._deadline.daemon = True
        self._deadline.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline.cancel()
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

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

    def refused(self, begun: bytes = b"") -> InvalidRequest:
        """What its line says that has begun with these bytes."""
        return self._refused(_parsed(begun + self.stdout.readline(_MAX_LINE)))

    def _refused(self, line: dict[str, Any]) -> InvalidRequest:
        if self._late.is_set():
            message = (
                f"{self.noun}: it was not decoded within {self._seconds:g} s; send a shorter or smaller one"
            )
            return TooLarge(message, param=self.noun)
        # A process that ends without an answer has met its memory limit, or a fault of a decoder.
        damaged = f"the file is truncated or damaged; convert it to {self.format} again, or send another"
        message = line.get("error") or damaged
        logger.info("a file could not be decoded (%s: %s)", self.noun, line.get("cause") or message)
        return (TooLarge if line.get("large") else InvalidRequest)(f"{self.noun}: {message}", param=self.noun)

    def _kill(self) -> None:
        self._late.set()
        self._process.kill()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
