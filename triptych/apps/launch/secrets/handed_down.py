"""Secrets for a child process: in an inherited anonymous file, never on a command line or in variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: The variable with the file's descriptor.
VARIABLE = "TRIPTYCH_SECRETS_FD"


@contextmanager
def hand_down(secrets: Mapping[str, str]) -> Iterator[int]:
    """The descriptor of a file with these variables, for a process started within the `with`."""
    with os.fdopen(os.memfd_create("secrets"), "w+b") as file:
        file.write(json.dumps(dict(secrets)).encode())
        file.flush()
        file.seek(0)
        yield file.fileno()


def receive() -> None:
    """Makes the secrets handed down to this process its variables, which no other process sees. Once."""
    descriptor = os.environ.pop(VARIABLE, "")
    if descriptor:
        with os.fdopen(int(descriptor), "rb") as file:
            os.environ.update(json.load(file))
