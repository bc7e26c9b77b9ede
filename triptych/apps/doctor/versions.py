"""Versions of Python and of the libraries that a proxy or a worker needs, by the package's own metadata."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from triptych.apps.doctor.finding import CheckResult, fail, note, ok


def installed_version(name: str) -> str:
    """The installed version of a library, "" where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def needed() -> list[Requirement]:
    """What a proxy needs, and a worker beside it: those have a marker."""
    every = map(Requirement, requires("triptych") or ())
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": "worker"})]


def check_versions(
    libraries: Sequence[Requirement],
    found: Callable[[str], str] = installed_version,
    python: str = platform.python_version(),
) -> list[CheckResult]:
    """Python, the libraries that do not fit, and how many do; those that only workers need may be missing."""
    range_ = metadata("triptych")["Requires-Python"]
    remedy = f"make the environment with Python {range_}"
    results = [
        ok("python", python) if _fits(python, SpecifierSet(range_)) else fail("python", python, remedy)
    ]
    absent = [one.name for one in libraries if one.marker is not None and not found(one.name)]
    others = [one for one in libraries if one.name not in absent]
    wrong = [one for one in others if not _fits(found(one.name), one.specifier)]
    for one in wrong:
        install = f"pip install -c constraints.txt '{one.name}{one.specifier}'"
        results.append(fail(one.name, found(one.name) or "not installed", install))
    if absent:
        results.append(
            note("worker", f"{', '.join(absent)} missing: this machine can run a proxy, no worker")
        )
    return [*results, ok("libraries", f"{len(others) - len(wrong)} of {len(libraries)} fit")]


def _fits(found: str, wanted: SpecifierSet) -> bool:
    try:
        return wanted.contains(found, prereleases=True)
    except InvalidVersion:
        return False
