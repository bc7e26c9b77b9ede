"""Secrets for a process that we start: in an inherited file without a name, never in words or variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: Names the descriptor.
VARIABLE = "TRIPTYCH_SECRETS_FD"


@contextmanager
def hand_down(secrets: Mapping[str, str]) -> Iterator[int]:
    """The descriptor of a file with these variables, for a process started within the `with`."""
    with os.fdopen(os.memfd_create("secrets"), "w+b") as file:
        file.write(json.dumps(dict(secrets)).encode())
        file.flush()
        file.seek(0)
        yield file.fileno()


def take_over() -> None:
    """Makes what was handed down variables of this process, which no other one sees. Once."""
    descriptor = os.environ.pop(VARIABLE, "")
    if descriptor:
        with os.fdopen(int(descriptor), "rb") as file:
            os.environ.update(json.load(file))
