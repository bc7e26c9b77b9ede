"""Versions of Python and of the libraries that a proxy or a worker needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from triptych.doctor.finding import CheckResult, fail, note, ok

LEAST_PYTHON = (3, 11)


class VersionRange:
    """The versions of a library that work: from `least` on, and below `below` where that is given."""

    def __init__(self, least: str, below: str = "", *, worker: bool = False) -> None:
        self.least, self.below = least, below
        #: A proxy does without it.
        self.worker = worker

    def holds(self, found: str) -> bool:
        return _numbers(found) >= _numbers(self.least) and not (
            self.below and _numbers(found) >= _numbers(self.below)
        )

    def __str__(self) -> str:
        return f"{self.least} or newer" + (f", below {self.below}" if self.below else "")


#: Those that have broken deployments; a test compares them with pyproject.toml.
LIBRARIES = {
    "grpcio": VersionRange("1.80"),
    "protobuf": VersionRange("6.31"),
    "redis": VersionRange("6"),
    "starlette": VersionRange("1.0.1"),
    "uvicorn": VersionRange("0.38"),
    "torch": VersionRange("2.11", "2.14", worker=True),
    "transformers": VersionRange("5.16", "6", worker=True),
    "tokenizers": VersionRange("0.22", worker=True),
    "pillow": VersionRange("13", worker=True),
}


def installed() -> dict[str, str]:
    """The versions of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_versions(
    found: Mapping[str, str], python: tuple[int, ...] = sys.version_info[:3]
) -> list[CheckResult]:
    """Python and each library; one that only workers need may be missing."""
    shown = ".".join(map(str, python))
    remedy = f"make the environment with Python {'.'.join(map(str, LEAST_PYTHON))} or newer"
    findings = [
        ok("python", shown) if python[:2] >= LEAST_PYTHON else fail("python", shown, remedy),
    ]
    for name, wanted in LIBRARIES.items():
        have = found.get(name, "")
        install = f"pip install -c constraints.txt '{name}': {wanted}"
        if not have and wanted.worker:
            findings.append(note(name, "not installed: this machine can run a proxy, and no worker"))
        elif not have:
            findings.append(fail(name, "not installed", install))
        else:
            findings.append(ok(name, have) if wanted.holds(have) else fail(name, have, install))
    return findings


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
